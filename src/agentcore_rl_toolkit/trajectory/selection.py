"""Which turns of a session train, and why the others do not.

A conversation is a tree of turns, with the branches that the same agent opened: a rewritten history, another attempt, what
follows a compaction. The rule of a session picks among them:

- `all`: every turn.
- `task`, the default: every conversation but side calls. A side call offers none of the tools of the largest conversation,
  where that offers any: titles, topics, memory. Sub-agents with tools train. If the largest offers no tools, all train.
- `main`: the largest conversation.
- any other word is a tag, or several with commas between: the turns that carry one of them.

The largest conversation has the most sampled tokens; of two equal ones it is the first. A turn with a tag is a side call
under `task` and `main`: a judge, say. Of several summaries of one prompt, only those train that the agent used (not under `all`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from agentcore_rl_toolkit.contract import TRAIN_RULES

from .tree import pack
from .turn import Turn

# Why a turn is kept and not trained: the words of reports, and what each means.
SIDE_CALLS = {
    "no_task_tools": "it offers none of the task's tools",
    "not_main": "it is not of the largest conversation",
    "tagged": "it carries a tag",
    "other_tag": "it carries none of the tags that train",
    "thrown_away": "a summary that the agent did not go on from",
    "other_sampling": "it was sampled at another temperature than the trainer's, or with penalties",
}

_WINDOW = 6  # tokens in a row that must turn up again, for a prompt to quote an answer
_WINDOWS = 16  # at most so many are looked for, spread over the answer
_LOOK_BACK = 16  # answers before a prompt that it may be the compaction of
_GENERATION = 10  # tokens at a prompt's end that its template may write for the answer
_QUESTION = 14  # tokens before those, by which the last message is known again
_AS_GOOD = 0.75  # of the best match: answers that a prompt quotes as much are all accepted


@dataclass(slots=True, eq=False)
class Placed:
    """A trainable turn, what it goes on from, and why it is not trained, where it is not.

    ``reason`` is why it does not go on from the turn before it, ``rival`` the earlier turn that it leaves there. ``superseded``:
    a retry that the agent never used, or an answer that it never got. ``side`` is one of `selection.SIDE_CALLS`. ``carries``: it
    or a turn that goes on from it is trained.
    """

    turn: Turn
    position: int
    reason: str | None
    rival: Turn | None
    parent: Placed | None = None
    children: list[Placed] = field(default_factory=list)
    continues: Placed | None = None  # after a compaction: the turn whose conversation it is
    superseded: bool = False
    undelivered: bool = False
    side: str | None = None
    carries: bool = False


def find_compactions(placed: Sequence[Placed]) -> list[tuple[Placed, list[Placed]]]:
    """Branches that begin with a summary of what came before, and the summaries that each quotes. They get their reason."""
    found = []
    latest: dict[tuple[str, tuple[str, ...] | None], Placed] = {}  # the last turn of each agent
    for node in placed:
        turn = node.turn
        if turn.system is None or node.superseded:
            continue
        agent = (turn.system, turn.tools)
        if node.reason in ("sub_agent", "history_rewritten") and agent in latest:
            accepted = _quoted(placed, node)
            if accepted:
                node.reason, node.continues = "compaction", latest[agent]
                found.append((node, accepted))
        latest[agent] = node
    return found


def _quoted(placed: Sequence[Placed], node: Placed) -> list[Placed]:
    """The answers before a prompt that it quotes in place of what they were asked with."""
    prompt = pack(node.turn.prompt_ids)
    shares: list[tuple[float, Placed]] = []
    before = (other for other in reversed(placed[: node.position]) if not (other.children or other.superseded))
    for other in islice((other for other in before if other.turn.parse_status == "none"), _LOOK_BACK):
        turn = other.turn
        question = pack(turn.prompt_ids[-_GENERATION - _QUESTION : -_GENERATION])
        shrunk = len(turn.prompt_ids) + len(turn.completion_ids) > len(node.turn.prompt_ids)
        if shrunk and not (question and question in prompt):
            shares.append((_share(turn, prompt), other))
    best = max((share for share, _ in shares), default=0.0)
    return [other for share, other in shares if share and share >= _AS_GOOD * best]


def _share(turn: Turn, prompt: bytes) -> float:
    """How much of an answer a prompt quotes; 0 for a single match among many."""
    body = turn.completion_ids[:-1]  # the last one ends the turn
    size = min(_WINDOW, len(body))
    if size < 4:  # too few to prove anything
        return 0.0
    starts = range(0, len(body) - size + 1, max(_WINDOW // 2, len(body) // _WINDOWS))
    windows = [pack(body[start : start + size]) for start in starts]
    if not any(window in prompt for window in windows[:: max(1, len(windows) // 4)]):  # most prompts quote nothing
        return 0.0
    found = sum(window in prompt for window in windows)
    return found / len(starts) if found >= min(2, len(starts)) else 0.0


def select(placed: Sequence[Placed], rule: str) -> None:
    """Give every turn that does not train its reason."""
    compactions = find_compactions(placed)
    if rule == "all":
        return
    conversations = _conversations(placed, compactions)
    if rule in TRAIN_RULES:
        _pick(placed, conversations, rule)
    else:
        tags = rule.split(",")
        for node in placed:
            node.side = None if node.turn.tag in tags else "other_tag"
    for _, accepted in compactions:
        for node in placed:
            if node.side is None and node not in accepted and not node.children and _same_prompt(node, accepted[0]):
                node.side = "thrown_away"


def _same_prompt(node: Placed, other: Placed) -> bool:
    mine, others = node.turn.prompt_ids, other.turn.prompt_ids
    return len(mine) == len(others) and list(mine) == list(others)


def _conversations(placed: Sequence[Placed], compactions: Sequence[tuple[Placed, list[Placed]]]) -> list[int]:
    """The conversation of each turn, by the position of its first turn."""
    nodes = {node.turn.turn_id: node for node in placed}
    numbers: list[int] = []
    for node in placed:
        rival = nodes.get(node.rival.turn_id) if node.rival is not None else None
        before = node.parent or node.continues
        if before is None and rival is not None and _same_agent(node, rival):
            before = rival
        numbers.append(numbers[before.position] if before is not None else node.position)
    for node, accepted in compactions:  # a summary may be asked for with a prompt of its own
        merged = {numbers[summary.position] for summary in accepted}
        numbers = [numbers[node.position] if number in merged else number for number in numbers]
    return numbers


def _same_agent(node: Placed, rival: Placed) -> bool:
    """Whether a prompt that leaves an earlier turn is still of that turn's conversation."""
    if node.reason in (None, "sub_agent"):
        return False
    if node.reason == "parallel_calls" and not _same_prompt(node, rival):
        return False
    mine, others = set(node.turn.tools or ()), set(rival.turn.tools or ())
    return bool(mine & others) or not (mine or others)


def _pick(placed: Sequence[Placed], conversations: Sequence[int], rule: str) -> None:
    sizes: dict[int, int] = {}
    tools: dict[int, set[str]] = {}
    for node, number in zip(placed, conversations, strict=True):
        if node.turn.tag is not None:
            node.side = "tagged"
        elif not node.superseded:
            sizes[number] = sizes.get(number, 0) + len(node.turn.completion_ids)
            tools.setdefault(number, set()).update(node.turn.tools or ())
    largest = max(sizes, key=lambda number: (sizes[number], -number), default=None)
    if largest is None:
        return
    for node, number in zip(placed, conversations, strict=True):
        if node.side is None and number != largest:
            if rule == "main":
                node.side = "not_main"
            elif tools[largest] and not tools[largest] & tools.get(number, set()):
                node.side = "no_task_tools"
