"""Half surrogates: escapes like ``\\ud83d`` without their partner, which no UTF-8 text can hold.

JavaScript writes them when it cuts a string inside an emoji. JSON decoders and tokenizers refuse them.
"""

from __future__ import annotations

import re

HALF_SURROGATE = "half surrogate"  # the name under which they are counted

# The lookbehind comes after the literal prefix, which `re` searches for fast.
_HALF = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)


def replace_half_surrogates(body: bytes) -> tuple[bytes, int]:
    """Return a JSON text with U+FFFD in place of each half surrogate, and their number."""
    count = 0

    def replaced(half: re.Match[bytes]) -> bytes:
        nonlocal count
        before = body[max(0, half.start() - 64) : half.start()]
        if (len(before) - len(before.rstrip(b"\\"))) % 2:
            return half[0]  # the backslash is escaped: the text shows an escape and is none
        count += 1
        return rb"\ufffd"

    return _HALF.sub(replaced, body), count
