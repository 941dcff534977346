"""Makes text of agents, sessions and callers safe to print on a terminal.

An agent may print anything that a model wrote. Escape sequences can change the title, the colours and the clipboard of the
reader's terminal, and hide what was printed before.
"""

from __future__ import annotations

import re

# Control characters but tab and line feed, those of Latin-1 among them, and what turns the direction of text around.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SHOWN = {"\x1b": "\\e", "\x07": "\\a", "\x08": "\\b", "\x00": "\\0"}


def visible(text: object) -> str:
    """The text with every character that a terminal would obey written out; a carriage return begins a new line."""
    plain = str(text).replace("\r\n", "\n").replace("\r", "\n")
    return _COMMANDS.sub(_written_out, plain)


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return _SHOWN.get(found[0]) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")
