"""Find the earlier turn that a prompt continues, and where the prompt leaves the other turns.

Theory of operation. Every trainable turn is kept as the token string ``prompt + completion``, packed to four bytes per token, in
a sorted list. Strings with a common beginning stand side by side there, so a new prompt shares most with one of its two
neighbours, and each comparison is one memcmp. A prompt continues the longest string that it begins with: the string before it
in the list if the prompt begins with it; otherwise the string before the shared part, and so on.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass

from agentcore_rl_toolkit.errors import CaptureError

from .turn import Turn

TOKEN_BYTES = 4
_CODE = "I" if array("I").itemsize == TOKEN_BYTES else "L"


def pack(ids: Sequence[int]) -> bytes:
    """Return token ids as four bytes each. Raises: CaptureError when an id is negative, too large or not an integer."""
    try:
        return array(_CODE, ids).tobytes()
    except (OverflowError, TypeError) as e:
        raise CaptureError(f"token ids must be integers in [0, 2**32): {e}") from e


@dataclass(frozen=True, slots=True)
class Match:
    """The place of a prompt among the earlier turns.

    ``parents`` are positions (in insertion order) of the turns that the prompt continues, empty if none. ``shared``
    is the number of leading tokens that some earlier turn also has; ``rival`` is the first of the turns that the prompt
    leaves at ``shared``, None when the prompt simply continues a leaf or nothing was there before.
    """

    parents: tuple[int, ...]
    shared: int
    rival: Turn | None


class TokenTree:
    """The turns placed so far, as sorted token strings."""

    def __init__(self) -> None:
        self._strings: list[bytes] = []  # sorted, each once
        self._turns: dict[bytes, list[tuple[int, Turn]]] = {}  # those that end there, by position
        self._rivals: dict[bytes, Turn] = {}

    def add(self, position: int, turn: Turn) -> Match:
        """Look up the prompt of ``turn``, then insert the whole turn under ``position``."""
        prompt = pack(turn.prompt_ids)
        at = bisect_right(self._strings, prompt)
        beside = [(common_prefix(prompt, other), len(other)) for other in self._strings[max(0, at - 1) : at + 1]]
        shared = max((common for common, _ in beside), default=0)
        left = any(common == shared < size for common, size in beside)
        rival = self._rival(prompt[:shared]) if left else None
        match = Match(self._continued(prompt, at), shared // TOKEN_BYTES, rival)
        full = prompt + pack(turn.completion_ids)
        if full not in self._turns:
            insort(self._strings, full)
        self._turns.setdefault(full, []).append((position, turn))
        return match

    def _continued(self, prompt: bytes, at: int) -> tuple[int, ...]:
        """Return positions of the turns that end deepest in the prompt. ``at`` is its place in the list."""
        while at:
            before = self._strings[at - 1]
            if prompt.startswith(before):
                return tuple(position for position, _ in self._turns[before])
            at = bisect_right(self._strings, prompt[: common_prefix(prompt, before)])
        return ()

    def _rival(self, shared: bytes) -> Turn:
        """Return the first turn that continues ``shared``. Later turns do not change it."""
        if shared not in self._rivals:
            begin = bisect_right(self._strings, shared)
            end = bisect_left(self._strings, shared + b"\xff" * TOKEN_BYTES, begin)  # no tokenizer has such tokens
            those = self._strings[begin : max(end, begin + 1)]
            self._rivals[shared] = min(self._turns[string][0] for string in those)[1]
        return self._rivals[shared]


def common_prefix(a: bytes, b: bytes) -> int:
    """Return the length in bytes, a multiple of four, of the common prefix of two packed token strings. O(len), by halving."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * TOKEN_BYTES : middle * TOKEN_BYTES] == b[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low * TOKEN_BYTES
