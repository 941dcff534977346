"""Why a turn does not continue the sequence before it."""

from __future__ import annotations

from .tree import Match
from .turn import Turn

# How many tokens of a completion's tail must turn up again for a divergence to count as re-tokenisation of the same
# text.
_TAIL = 4


def overlaps(a: Turn, b: Turn) -> bool:
    """True when both calls were under way at the same time; False when that is not known."""
    if a.started_s is None or b.started_s is None or a.finished_s is None or b.finished_s is None:
        return False
    return a.started_s < b.finished_s and b.started_s < a.finished_s


def branch_cause(turn: Turn, match: Match) -> str | None:
    """One of `BRANCH_REASONS` when ``turn`` opens a branch, None when it continues a leaf or is the session's first.

    Tokens alone do not tell a sub-agent from a rewritten history: both answers are "history_rewritten" here unless
    little of the prompt is shared, and the caller corrects it when the older branch is taken up again later."""
    rival = match.rival
    if rival is None:
        return None
    if turn.branch_reason is not None:
        return turn.branch_reason
    shared = match.shared
    asked = len(rival.prompt_ids)
    if shared == len(turn.prompt_ids) == asked:
        return "parallel_calls" if overlaps(turn, rival) else "resampled"
    if shared >= len(turn.prompt_ids):
        return "history_rewritten"
    if shared >= asked:
        return "retokenised" if _same_text(turn, rival, shared) else "history_rewritten"
    if overlaps(turn, rival):
        return "parallel_calls"
    if _more_tools(turn, rival):
        return "tools_changed"
    if not match.parents and shared * 2 < min(asked, len(turn.prompt_ids)):
        return "sub_agent"
    return "history_rewritten"


def _more_tools(turn: Turn, rival: Turn) -> bool:
    """Does the same agent offer tools that it loaded since, in a conversation that has grown?"""
    grown = len(turn.prompt_ids) > len(rival.prompt_ids) and set(turn.tools or ()) > set(rival.tools or ())
    return grown and bool(rival.tools) and turn.system is not None and turn.system == rival.system


def _same_text(turn: Turn, rival: Turn, shared: int) -> bool:
    """Does the prompt repeat the rest of the rival's completion in other tokens?"""
    rest = rival.completion_ids[shared - len(rival.prompt_ids) :]
    window = turn.prompt_ids[shared : shared + 2 * len(rest) + 2 * _TAIL]
    tail = list(rest[-_TAIL:])
    span = list(window)
    # The same ending close by means other tokens for the same words. A lone token proves little.
    while len(tail) > 1:
        if any(span[i : i + len(tail)] == tail for i in range(len(span) - len(tail) + 1)):
            return True
        tail = tail[1:]
    return len(rest) <= 2 and bool(tail) and tail[0] in span[:_TAIL]
