"""Select the turns of a session that train, and give the other turns their reason.

A conversation is a tree of turns, with the branches that the same agent opened: a rewritten history, another attempt, what
follows a compaction. The root is the first conversation that offers tools, or the first one if none does. The rule of a session
picks conversations:

- `all`: every turn.
- `task`, the default: the root, and what its answers flow to or from (`Turn.feeds`). If none offers tools, all train.
- `main`: the root.
- any other word is a tag, or several with commas between: the turns that carry one of them.

Under `task`, a conversation trains if a trained conversation has its answer in a prompt, or if the same agent (system text and
tools) has a trained conversation. It also trains if it begins with the answer of a trained conversation (`takes_up`): as a
handoff, as the last call without tools, as a sub-agent, or as the next task of a crew. All others are side calls.

No number of sampled tokens matters. A turn with a tag is a side call under `task` and `main`: a judge, say. Of several summaries
of one prompt, only those train that the agent used (not under `all`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentcore_rl_toolkit.contract import TRAIN_RULES

from .tree import pack
from .turn import Turn, overlaps

# Why a turn is kept and not trained: the words of reports, and what each means.
SIDE_CALLS = {
    "no_flow": "no conversation that trains has its answer, and it takes up none that trains",
    "not_main": "it is not of the root conversation",
    "tagged": "it carries a tag",
    "other_tag": "it carries none of the tags that train",
    "thrown_away": "a summary that the agent did not continue",
    "other_sampling": "it was sampled at another temperature than the trainer's, or with penalties",
}

_GENERATION = 10  # tokens at a prompt's end that its template may write for the answer
_QUESTION = 14  # tokens before those, by which the last message is known again


@dataclass(slots=True, eq=False)
class Placed:
    """A trainable turn, the turn that it continues, and why it is not trained, if it is not.

    ``reason`` is why it does not continue the turn before it, ``rival`` the earlier turn that it leaves there. ``lost``:
    an answer that the agent never got. ``side`` is one of `selection.SIDE_CALLS`. ``carries``: it
    or a turn that continues it is trained.
    """

    turn: Turn
    position: int
    reason: str | None
    rival: Turn | None
    parent: Placed | None = None
    children: list[Placed] = field(default_factory=list)
    continues: Placed | None = None  # the turn whose conversation it continues after a compaction
    lost: bool = False
    side: str | None = None
    carries: bool = False


def find_compactions(placed: Sequence[Placed]) -> list[tuple[Placed, list[Placed]]]:
    """Find branches that begin with a summary of earlier turns, and the summaries in each. Set their reason."""
    found = []
    latest: dict[tuple[str, tuple[str, ...] | None], Placed] = {}  # the last turn of each agent
    for node in placed:
        turn = node.turn
        if turn.system is None or node.lost:
            continue
        agent = (turn.system, turn.tools)
        if node.reason in ("sub_agent", "history_rewritten") and agent in latest:
            accepted = _quoted(placed, node)
            before = latest[agent]
            if accepted and (before.parent or before not in accepted):  # not the next prompt of a summarizer
                node.reason, node.continues = "compaction", before
                found.append((node, accepted))
        latest[agent] = node
    return found


def _quoted(placed: Sequence[Placed], node: Placed) -> list[Placed]:
    """Return the earlier answers that a prompt quotes instead of their prompts."""
    found = []
    for other in placed[: node.position]:
        turn = other.turn
        fed = turn.feeds.get(node.turn.turn_id) in ("quoted", "continued", "reviewed")
        if fed and turn.parse_status == "none" and not (other.children or other.lost):
            question = pack(turn.prompt_ids[-_GENERATION - _QUESTION : -_GENERATION])
            shrunk = len(turn.prompt_ids) + len(turn.completion_ids) > len(node.turn.prompt_ids)
            if shrunk and not (question and question in pack(node.turn.prompt_ids)):
                found.append(other)
    return found


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
    answers = [node for node in placed if not node.children]
    quoted = {pack(node.turn.prompt_ids) for node in answers if "quoted" in node.turn.feeds.values()}
    for node in answers:
        unused = node.side in (None, "no_flow", "not_main") and not node.turn.feeds
        if unused and pack(node.turn.prompt_ids) in quoted:
            node.side = "thrown_away"


def _conversations(placed: Sequence[Placed], compactions: Sequence[tuple[Placed, list[Placed]]]) -> list[int]:
    """Return the conversation of each turn, by the position of its first turn."""
    nodes = {node.turn.turn_id: node for node in placed}
    offering = any(node.turn.tools for node in placed)
    numbers: list[int] = []
    for node in placed:
        rival = nodes.get(node.rival.turn_id) if node.rival is not None else None
        before = node.parent or node.continues
        if before is None and rival is not None and _same_agent(node, rival, offering):
            before = rival
        numbers.append(numbers[before.position] if before is not None else node.position)
    for node, accepted in compactions:  # a summary may have its own prompt
        merged = {numbers[summary.position] for summary in accepted}
        numbers = [numbers[node.position] if number in merged else number for number in numbers]
    return numbers


def _same_agent(node: Placed, rival: Placed, offering: bool) -> bool:
    """Return True if a prompt that leaves an earlier turn is still of that turn's conversation.

    ``offering``: the session has tools. Then calls without tools are of one conversation only if their tokens are.
    """
    if node.reason in (None, "sub_agent"):
        return False
    if node.reason == "parallel_calls" and list(node.turn.prompt_ids) != list(rival.turn.prompt_ids):
        return False
    mine, others = set(node.turn.tools or ()), set(rival.turn.tools or ())
    if node.turn.system != rival.turn.system and mine != others:
        return False
    return bool(mine & others) or not offering


@dataclass(slots=True, eq=False)
class _Conversation:
    """The turns of a conversation that carry no tag."""

    nodes: list[Placed] = field(default_factory=list)
    tools: set[str] = field(default_factory=set)
    trains: bool = False

    def agents(self) -> set[Any]:
        """Return keys that conversations of one agent share: all tools, or the system text and a tool."""
        system = self.nodes[0].turn.system
        return {(system, tool) for tool in self.tools} | ({frozenset(self.tools)} if self.tools else set())


def _pick(placed: Sequence[Placed], numbers: Sequence[int], rule: str) -> None:
    found: dict[int, _Conversation] = {}
    home: dict[str, tuple[Placed, _Conversation]] = {}  # the place of each turn
    for node, number in zip(placed, numbers, strict=True):
        if node.turn.tag is not None:
            node.side = "tagged"
        elif not node.lost:
            conversation = found.setdefault(number, _Conversation())
            conversation.nodes.append(node)
            conversation.tools.update(node.turn.tools or ())
            home[node.turn.turn_id] = node, conversation
    offering = [conversation for conversation in found.values() if conversation.tools]
    if not found or (rule == "task" and not offering):
        return
    root = (offering or list(found.values()))[0]
    root.trains = True
    if rule == "task":
        _follow(root, list(found.values()), home)
    for node, conversation in home.values():
        if not conversation.trains:
            node.side = "not_main" if rule == "main" else "no_flow"


def _follow(
    root: _Conversation, conversations: list[_Conversation], home: dict[str, tuple[Placed, _Conversation]]
) -> None:
    def takes_up(source: _Conversation, how: str, node: Placed, other: _Conversation) -> bool:
        """Return True if a conversation whose prompt at ``node`` has an answer of ``source`` is a further part of the task."""
        if node.parent is not None:
            return False
        if how in ("quoted", "called") and other.tools:  # a sub-agent, or the next task of a crew
            return True
        if (
            how not in ("continued", "quoted")
            or max(root.nodes[-1].position, source.nodes[-1].position) > node.position
        ):
            return False  # a remark on what was said, or a question on the way of which nothing came
        turns = (turn.turn for those in conversations if those is not other for turn in those.nodes)
        return how == "continued" or not any(overlaps(node.turn, turn) for turn in turns)

    flows = [
        (source, how, *home[turn])
        for node, source in home.values()
        for turn, how in node.turn.feeds.items()
        if turn in home and home[turn][1] is not source
    ]
    trained = -1
    while trained < (trained := sum(conversation.trains for conversation in conversations)):
        for source, how, node, other in flows:
            source.trains = source.trains or other.trains
            other.trains = other.trains or (source.trains and takes_up(source, how, node, other))
        agents = {agent for conversation in conversations if conversation.trains for agent in conversation.agents()}
        for conversation in conversations:
            conversation.trains = conversation.trains or not agents.isdisjoint(conversation.agents())
