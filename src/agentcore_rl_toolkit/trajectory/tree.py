"""A radix tree over token sequences: which earlier turn does a prompt continue, and where does it leave the others?

Theory of operation. Every trainable turn is inserted as the token string ``prompt + completion``; its end is marked.
A prompt continues the turn whose end is the deepest mark that lies on the prompt's own path. Tokens are packed to
four bytes each, so that comparing a run of them is one memcmp. Walking costs O(prompt length), inserting O(new
tokens); a prompt that continues one of the latest leaves, the common case, needs one comparison and no walk. Nothing
here recurses: sessions of thousands of turns are as deep as they are long.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from agentcore_rl_toolkit.errors import CaptureError

from .turn import Turn

TOKEN_BYTES = 4
_CODE = "I" if array("I").itemsize == TOKEN_BYTES else "L"


def pack(ids: Sequence[int]) -> bytes:
    """Token ids as four bytes each. Raises: CaptureError when an id is negative, too large or not an integer."""
    try:
        return array(_CODE, ids).tobytes()
    except (OverflowError, TypeError) as e:
        raise CaptureError(f"token ids must be integers in [0, 2**32): {e}") from e


_TIPS = 8  # branches that may grow side by side (parallel sub-agents) without a walk for each turn


class Node:
    """One edge of the tree, from its parent's depth to ``end`` (bytes), as a window into the token string of
    ``owner``.
    """

    __slots__ = ("children", "data", "end", "owner", "start", "turns")

    def __init__(self, data: bytes, start: int, end: int, owner: Turn | None) -> None:
        self.data = data
        self.start = start
        self.end = end
        self.owner = owner
        self.children: dict[bytes, Node] = {}
        self.turns: list[int] = []


@dataclass(frozen=True, slots=True)
class Match:
    """Where a prompt lies in the tree.

    ``parents`` are positions (in insertion order) of the turns that the prompt continues, empty if none. ``shared``
    is the number of leading tokens that some earlier turn also has; ``rival`` is an earlier turn that the prompt
    leaves at ``shared``, None when the prompt simply continues a leaf or nothing was there before."""

    parents: tuple[int, ...]
    shared: int
    rival: Turn | None


class TokenTree:
    """See the module's theory of operation."""

    def __init__(self) -> None:
        self._root = Node(b"", 0, 0, None)
        self._tips: list[Node] = []  # where the latest turns end, newest last

    def add(self, position: int, turn: Turn) -> Match:
        """Look up the prompt of ``turn``, then insert the whole turn under ``position``."""
        prompt = pack(turn.prompt_ids)
        full = prompt + pack(turn.completion_ids)
        for tip in reversed(self._tips):
            # Nothing lies below a leaf, so a leaf on the prompt's path is the deepest end on it.
            if not tip.children and prompt.startswith(tip.data[: tip.end]):
                match = Match(tuple(tip.turns), tip.end // TOKEN_BYTES, None)
                self._tips.remove(tip)
                self._remember(self._grow(tip, full, turn, position))
                return match
        return self._walk(prompt, full, turn, position)

    def _remember(self, tip: Node) -> None:
        self._tips.append(tip)
        del self._tips[:-_TIPS]

    def _grow(self, node: Node, full: bytes, turn: Turn, position: int) -> Node:
        """Hang the part of ``full`` behind ``node`` under it as one new edge; mark its end."""
        start = node.end
        if start == len(full):
            node.turns.append(position)
            return node
        leaf = Node(full, start, len(full), turn)
        leaf.turns.append(position)
        node.children[full[start : start + TOKEN_BYTES]] = leaf
        return leaf

    def _walk(self, prompt: bytes, full: bytes, turn: Turn, position: int) -> Match:
        node = self._root
        parents: tuple[int, ...] = ()
        shared: int | None = None
        rival: Turn | None = None
        limit = len(prompt)
        while True:
            depth = node.end
            if depth <= limit and node.turns:
                parents = tuple(node.turns)
            if depth >= limit and shared is None:
                # The whole prompt is known; whatever follows here was sampled or asked by somebody else.
                shared = limit
                rival = self._rival(node)
            if depth == len(full):
                node.turns.append(position)
                self._remember(node)
                break
            child = node.children.get(full[depth : depth + TOKEN_BYTES])
            if child is None:
                if shared is None:
                    shared = depth
                    rival = self._rival(node)
                self._remember(self._grow(node, full, turn, position))
                break
            if full.startswith(child.data[depth : child.end], depth):
                if child.end > limit and shared is None:
                    shared, rival = limit, child.owner
                node = child
                continue
            split = depth + common_prefix(full[depth : child.end], child.data[depth : child.end])
            if shared is None:
                shared, rival = min(split, limit), child.owner
            node = self._split(node, child, split)
        return Match(parents, (shared or 0) // TOKEN_BYTES, rival)

    @staticmethod
    def _rival(node: Node) -> Turn | None:
        for child in node.children.values():
            return child.owner
        return None

    @staticmethod
    def _split(parent: Node, child: Node, at: int) -> Node:
        upper = Node(child.data, parent.end, at, child.owner)
        upper.children[child.data[at : at + TOKEN_BYTES]] = child
        parent.children[child.data[parent.end : parent.end + TOKEN_BYTES]] = upper
        child.start = at
        return upper


def common_prefix(a: bytes, b: bytes) -> int:
    """Length in bytes, a multiple of four, of the common prefix of two packed token strings. O(len), by halving."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * TOKEN_BYTES : middle * TOKEN_BYTES] == b[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low * TOKEN_BYTES
