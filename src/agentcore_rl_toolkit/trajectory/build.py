"""Turns -> training sequences.

Turns are merged by exact token prefix: a turn continues the earlier turn whose prompt + completion its own prompt
starts with. That makes a forest; every leaf becomes one sequence, which is the leaf's prompt + completion, because
those already hold all tokens of the turns above it. A turn that several leaves share is trained in the branch of its
first child and re-read with mask 0 in the others, so that each sampled token is trained exactly once.

Turns that broke off or carry no usable logprobs take no part: their text in later prompts is context there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from agentcore_rl_toolkit.contract import DEFAULT_TRAIN, check_train
from agentcore_rl_toolkit.errors import CaptureError

from .selection import Placed, select
from .sequence import ExpertSpan, FidelityReport, TrainingSequence, Trajectory
from .tree import TOKEN_BYTES, Match, TokenTree, common_prefix, pack
from .turn import CUTS, Turn, overlaps

# How many tokens of a completion's tail must turn up again for a divergence to count as re-tokenization of the same
# text.
_TAIL = 4
_OTHER_SAMPLING = "other_sampling"  # one of `SIDE_CALLS`


def branch_cause(turn: Turn, match: Match) -> str | None:
    """Return why ``turn`` opens a branch (one of `BRANCH_REASONS`), or None if it continues a leaf or is the first turn.

    Tokens alone do not tell a sub-agent from a rewritten history: both answers are "history_rewritten" here unless
    little of the prompt is shared, and the caller corrects it when the older branch is taken up again later.
    """
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
        return "retokenized" if _same_text(turn, rival, shared) else "history_rewritten"
    if overlaps(turn, rival):
        return "parallel_calls"
    if _more_tools(turn, rival):
        return "tools_changed"
    if not match.parents and shared * 2 < min(asked, len(turn.prompt_ids)):
        return "sub_agent"
    return "history_rewritten"


def _more_tools(turn: Turn, rival: Turn) -> bool:
    """Return True if the same agent offers more tools than before, in a conversation that has grown."""
    grown = len(turn.prompt_ids) > len(rival.prompt_ids) and set(turn.tools or ()) > set(rival.tools or ())
    return grown and bool(rival.tools) and turn.system is not None and turn.system == rival.system


def _same_text(turn: Turn, rival: Turn, shared: int) -> bool:
    """Return True if the prompt repeats the rest of the rival's completion in other tokens."""
    rest = rival.completion_ids[shared - len(rival.prompt_ids) :]
    window = turn.prompt_ids[shared : shared + 2 * len(rest) + 2 * _TAIL]
    tail = list(rest[-_TAIL:])
    span = list(window)
    # The same ending close by means other tokens for the same words. A lone token proves little.
    while len(tail) > 1:
        if any(span[i : i + len(tail)] == tail for i in range(len(span))):
            return True
        tail = tail[1:]
    return len(rest) <= 2 and bool(tail) and tail[0] in span[:_TAIL]


def build_trajectory(
    session_id: str,
    turns: Iterable[Turn],
    *,
    train: str = DEFAULT_TRAIN,
    temperature: float | None = 1.0,
) -> Trajectory:
    """Merge the turns of a session into training sequences.

    ``turns`` may come in any order; ``Turn.index`` counts. ``train`` is the rule that picks what trains (`selection`); the rest
    is kept, with mask and weight 0. ``temperature`` is the trainer's: turns of another one, or with penalties, are kept likewise,
    and tokens of other sampling are counted. None: it is unknown, or nothing is trained.

    Cost: O(total tokens) of all prompts, 1 to 3 ms for 20 turns of 500 tokens.
    Raises: CaptureError when two different turns carry the same id, or token ids are not integers in [0, 2**32); ConfigError
        on an unknown rule.
    """
    check_train(train)
    try:
        distinct, duplicates = _distinct(turns)
        usable: list[Turn] = []
        excluded: Counter[str] = Counter()
        for turn in distinct:
            reason = turn.why_untrainable()
            if reason is None:
                usable.append(turn)
            else:
                excluded[reason] += 1
        placed = _place(usable)
        for node in placed:  # if a turn continues an answer, the agent got it
            node.lost = not node.turn.delivered and not node.children
        excluded.update("not_delivered" for node in placed if node.lost)
        select(placed, train)
        for node in placed:
            how = node.turn.sampled_otherwise(temperature)
            if node.side is None and temperature is not None and how and not how.startswith(CUTS):
                node.side = _OTHER_SAMPLING
        sequences = _sequences(placed)
    except CaptureError as e:
        e.session_id = session_id
        raise
    return Trajectory(
        session_id=session_id,
        sequences=sequences,
        report=_report(distinct, duplicates, excluded, placed, sequences, train, temperature),
    )


def _distinct(turns: Iterable[Turn]) -> tuple[list[Turn], int]:
    """Return the turns in the order of their start, each call once, and the number of repeated records."""
    by_id: dict[str, Turn] = {}
    duplicates = 0
    for turn in turns:
        known = by_id.setdefault(turn.turn_id, turn)
        if known is turn:
            continue
        if list(known.prompt_ids) != list(turn.prompt_ids) or list(known.completion_ids) != list(turn.completion_ids):
            raise CaptureError(f"two different turns carry the id {turn.turn_id}")
        duplicates += 1
    return sorted(by_id.values(), key=lambda t: (t.index, t.choice_index)), duplicates


def _place(usable: list[Turn]) -> list[Placed]:
    tree = TokenTree()
    placed: list[Placed] = []
    side_roots: list[Placed] = []
    for position, turn in enumerate(usable):
        match = tree.add(position, turn)
        node = Placed(turn, position, branch_cause(turn, match), match.rival)
        placed.append(node)
        if match.parents:
            node.parent = _choose_parent([placed[i] for i in match.parents], turn)
            if not node.parent.children:  # this turn simply continues the tokens, whatever else does
                node.reason = None
            node.parent.children.append(node)
            # An older branch is taken up again: what began since then was a side conversation, not a rewrite of
            # history.
            while side_roots and side_roots[-1].position > node.parent.position:
                side = side_roots.pop()
                if side.turn.branch_reason is None and side.reason == "history_rewritten":
                    side.reason = "sub_agent"
        elif position:
            side_roots.append(node)
    return placed


def _choose_parent(candidates: list[Placed], turn: Turn) -> Placed:
    """Choose the parent among turns that end in the same tokens.

    Prefer turns that the agent received, then the turn that the gateway names, then one without a continuation.
    """
    candidates = [node for node in candidates if node.turn.delivered] or candidates
    for node in candidates:
        if node.turn.turn_id == turn.parent_turn:
            return node
    for node in candidates:
        if not node.children:
            return node
    return candidates[0]


def _sequences(placed: list[Placed]) -> list[TrainingSequence]:
    # A lost turn has no children, so leaving it out never orphans anything; its parent may become a leaf by it.
    kept = [node for node in placed if not node.lost]
    for node in reversed(kept):
        node.carries = node.carries or node.side is None
        if node.parent is not None:
            node.parent.carries = node.parent.carries or node.carries
    first_child: dict[int, Placed] = {}
    for node in sorted(kept, key=lambda node: not node.carries):  # no side call takes the turns that it shares
        if node.parent is not None:
            first_child.setdefault(node.parent.position, node)
    paths = [_path(leaf, first_child) for leaf in kept if leaf.position not in first_child]
    total = sum(node.turn.trained_tokens for node in kept if node.side is None)
    # Side calls come last, so that a sequence has one number in a trainer and in the trajectory.
    paths.sort(key=lambda path: (all(node.side is not None for node in path[1]), path[1][0].position))
    return [_sequence(context, trained, total) for context, trained in paths]


def _path(leaf: Placed, first_child: dict[int, Placed]) -> tuple[list[Placed], list[Placed]]:
    """Return the turns of the path to a leaf, oldest first: those of another leaf, and those of this one."""
    trained = [leaf]
    node = leaf
    while node.parent is not None and first_child[node.parent.position] is node:
        node = node.parent
        trained.append(node)
    context: list[Placed] = []
    while node.parent is not None:
        node = node.parent
        context.append(node)
    return context[::-1], trained[::-1]


def _sequence(context: list[Placed], path: list[Placed], total: int) -> TrainingSequence:
    leaf = path[-1].turn
    trained = [node for node in path if node.side is None]
    own_turns = trained or path
    context = context + [node for node in path if trained and node.side is not None]
    token_ids = [*leaf.prompt_ids, *leaf.completion_ids]
    loss_mask = [0] * len(token_ids)
    logprobs: list[float | None] = [None] * len(token_ids)
    versions: list[int | None] = [None] * len(token_ids)
    own = 0
    for node in trained:
        turn = node.turn
        start = len(turn.prompt_ids)
        count = turn.trained_tokens
        loss_mask[start : start + count] = [1] * count
        logprobs[start : start + count] = turn.logprobs[:count]
        versions[start : start + count] = turn.token_versions()[:count]
        own += count
    experts = [
        ExpertSpan(
            turn_id=turn.turn_id,
            start=len(turn.prompt_ids),
            stop=len(turn.prompt_ids) + len(turn.completion_ids),
            data=turn.routed_experts,
        )
        for turn in sorted((node.turn for node in (*context, *own_turns)), key=lambda turn: len(turn.prompt_ids))
        if turn.routed_experts is not None
    ]
    return TrainingSequence(
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        prompt_length=len(own_turns[0].turn.prompt_ids),
        turn_ids=[node.turn.turn_id for node in own_turns],
        weight_versions=versions,
        weight=own / total if total else 0.0,
        context_turn_ids=[node.turn.turn_id for node in context],
        branch_reason=path[0].reason,
        finish_reason=leaf.finish_reason,
        routed_experts=experts,
        side_call=None if trained else path[-1].side,
    )


def _report(
    distinct: list[Turn],
    duplicates: int,
    excluded: Counter[str],
    placed: list[Placed],
    sequences: list[TrainingSequence],
    train: str,
    temperature: float | None,
) -> FidelityReport:
    kept = [node for node in placed if not node.lost]
    side_calls: Counter[str] = Counter()
    other_sampling: Counter[str] = Counter()
    for node in kept:
        if node.side not in (None, _OTHER_SAMPLING):
            side_calls[str(node.side)] += len(node.turn.completion_ids)
        elif how := node.turn.sampled_otherwise(temperature):
            other_sampling[how] += len(node.turn.completion_ids)
    shown = [s for s in sequences if s.side_call is None]
    reasons = Counter(node.reason for node in kept if node.reason is not None)
    versions = [v for s in sequences for v in s.weight_versions if v is not None]
    return FidelityReport(
        turns=len(distinct),
        sequences=len(shown),
        branches=sum(reasons.values()),
        branch_reasons=dict(reasons),
        sampled_tokens=sum(len(turn.completion_ids) for turn in distinct),
        trained_tokens=sum(s.trained_tokens for s in sequences),
        sequence_tokens=sum(len(s.token_ids) for s in shown),
        unparsed_tool_calls=sum(turn.parse_status == "unparsed" for turn in distinct),
        untrainable_turns=sum(excluded.values()),
        untrainable_reasons=dict(excluded),
        duplicate_turns=duplicates,
        mixed_version_turns=sum(_mixed(turn) for turn in distinct),
        weight_version_min=min(versions, default=None),
        weight_version_max=max(versions, default=None),
        train=train,
        side_calls=dict(side_calls),
        other_sampling=dict(other_sampling),
        unanswered_turns=sum(not turn.answered for turn in distinct),
        held_tokens=sum(len(node.turn.completion_ids) - node.turn.trained_tokens for node in kept if node.side is None),
        unsampled_answers=sum(turn.unsampled for turn in distinct),
        history_difference=_history_difference(placed),
        left_out=dict(Counter(kind for turn in distinct for kind in turn.left_out)),
    )


def _history_difference(placed: list[Placed]) -> float | None:
    """Return the share of the prompts' tokens that templates left out of the turns before them, or wrote otherwise."""
    differing = [
        _left_out(node.rival, node.turn)
        for node in placed
        if node.turn.branch_reason == "template" and node.rival is not None
    ]
    return sum(differing) / sum(len(node.turn.prompt_ids) for node in placed) if differing else None


def _left_out(earlier: Turn, turn: Turn) -> int:
    """Return the number of tokens of a turn that a later prompt does not repeat. It repeats a beginning and an end."""
    row, prompt = pack([*earlier.prompt_ids, *earlier.completion_ids]), pack(turn.prompt_ids)
    begin = common_prefix(row, prompt)
    least, most = 0, (len(row) - begin) // TOKEN_BYTES  # tokens at the end of the turn that the prompt has
    while least < most:
        size = (least + most + 1) // 2
        found = prompt.find(row[len(row) - size * TOKEN_BYTES :], begin)
        least, most = (size, most) if found >= 0 and found % TOKEN_BYTES == 0 else (least, size - 1)
    return (len(row) - begin) // TOKEN_BYTES - least


def _mixed(turn: Turn) -> bool:
    first, last = turn.weight_version_first, turn.weight_version_last
    if first is not None and last is not None and first != last:
        return True
    return len({v for v in turn.token_weight_versions or () if v is not None}) > 1
