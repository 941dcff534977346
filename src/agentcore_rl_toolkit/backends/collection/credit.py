"""Credit: the advantage of each sampled token, from the rewards of a group and from a teacher. Pure lists and numbers.

Of rollout i with rewards r_k, one for each model call k, and of token t sampled in call k::

    episode   A_t = estimator(r_i over the group), r_i the episode's reward
    turn      A_t = estimator(G_k over the turns of the group),  G_k = r_k + discount * G_(k+1)
    teacher   A_t = log p_teacher(t) - log p_student(t)  [ + reward_weight * A_t as above ]

The teacher's part is the negative reverse KL of the tokens that the student itself sampled.
Sources: MiniLLM, arXiv:2306.08543, and GKD, arXiv:2306.13649; returns of turns, arXiv:2505.11821.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ...errors import ConfigError, ContractError
from ...logs import WarnsOnceAMinute
from ..settings import NotNegative
from .advantages import Estimator, advantages

if TYPE_CHECKING:
    from ...trajectory import Trajectory, Turn
    from .groups import Reward

OFTEN = 1 / 3  # of the turns: badly made rewards of turns cost up to 14 points (arXiv:2604.02869)
_signs = WarnsOnceAMinute(logging.getLogger(__name__))


@dataclass(frozen=True, kw_only=True)
class Credit:
    """How the advantage of a token comes about.

    ``credit`` "turn" compares the returns of turns, ``discount`` per turn, at each position in a group or (``normalise`` "group")
    over all its turns: where early turns have more ahead of them, that pushes late ones down. "episode" compares the rewards of
    whole rollouts. ``teacher_url`` is a vLLM or built-in policy server with the student's vocabulary; the rewards' part then
    counts ``reward_weight``.
    """

    credit: Literal["episode", "turn"] = "episode"
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    normalise: Literal["turn", "group"] = "turn"
    teacher_url: str | None = None
    reward_weight: NotNegative = 0.0

    @property
    def per_token(self) -> bool:
        """Whether the tokens of a rollout may have different advantages."""
        return self.credit == "turn" or self.teacher_url is not None

    @property
    def uses_rewards(self) -> bool:
        """Whether advantages depend on the agent's rewards."""
        return self.teacher_url is None or self.reward_weight > 0


def refuse(values: Mapping[str, Any], trainer: str, why: str, settings: type[Any] = Credit) -> None:
    """Raises: ConfigError where the settings of a trainer name any of these, which it cannot take."""
    named = [f.name for f in fields(settings) if f.name in values]
    if named:
        raise ConfigError(f"{trainer} cannot take {', '.join(named)}: {why}")


@dataclass(frozen=True, kw_only=True)
class Signal:
    """What is known of a training sequence before its group is compared.

    Shapes: ``mask`` and ``gaps`` (teacher's minus student's logprob) (R,), of the response. ``turns`` are (position in the
    session, begin, end, return), of the response's tokens.
    """

    rollout: str
    reward: float | None
    mask: Sequence[int] = field(repr=False)
    turns: Sequence[tuple[int, int, int, float]] = ()
    gaps: Sequence[float] | None = field(default=None, repr=False)


@dataclass
class CreditReport:
    """How the turns of a step compare with their episodes, and how far the student is from its teacher."""

    turns: int = 0
    against: int = 0  # turns whose advantage has the other sign than the episode's
    tokens: int = 0
    gap_sum: float = 0.0

    def numbers(self) -> dict[str, float]:
        """Of a step, for its metrics; warns where turns often disagree with their episodes. A share of nothing is absent."""
        found = {"reverse_kl": -self.gap_sum / self.tokens} if self.tokens else {}
        if self.turns:
            share = found["turns_against_episode"] = self.against / self.turns
            if share > OFTEN:
                _signs.warning(
                    "%.0f %% of the turns are pushed against their episode: the rewards of turns reward something else than "
                    "the episode's reward; look at them, or train with credit: episode",
                    100 * share,
                )
        return found


def turns_of(trajectory: Trajectory, capture: Any) -> dict[str, tuple[int, int, int]]:
    """The turns that train, by id, in the order of their start: (sequence, begin, end) in the sequence's tokens."""
    known = {turn.turn_id: turn for turn in capture.turns}
    found = []
    for index, sequence in enumerate(trajectory.sequences):
        for turn in (known[name] for name in sequence.turn_ids if sequence.trained_tokens):
            begin = len(turn.prompt_ids)
            found.append(
                (turn.index, turn.choice_index, turn.turn_id, (index, begin, begin + len(turn.completion_ids)))
            )
    return {name: place for *_, name, place in sorted(found)}


def rewards_of_turns(reward: Reward, trajectory: Trajectory, capture: Any) -> dict[str, float]:
    """The reward of each model call that the agent rewards, by turn id, in the order of their start.

    The agent names calls by the ids of the replies that it got (`turn_rewards`), or its list of `rewards` has one number for
    each call. A list fits the calls that train, or else the calls whose replies the agent got. Without the calls that were
    asked for again and not continued it may fit, too: an agent that repeats a call counts it once.
    Raises: ContractError with what the agent should return.
    """
    turns = sorted(capture.turns, key=lambda turn: (turn.index, turn.choice_index))
    if reward.by_call is not None:
        named = {_call(name): value for name, value in reward.by_call.items()}
        unknown = named.keys() - {_call(turn.reply_id or turn.turn_id) for turn in turns}
        if unknown:
            raise ContractError(
                f"`turn_rewards` has rewards for {len(unknown)} model calls that the session did not make, such as "
                f"{min(unknown)!r}: its keys are the ids of the model's replies (`response.id`)"
            )
        ids = {turn.turn_id: _call(turn.reply_id or turn.turn_id) for turn in turns}
        return {turn_id: named[call] for turn_id, call in ids.items() if call in named}
    trained = list(turns_of(trajectory, capture))
    superseded = {turn.retry_of for turn in turns} | repeated(turns)
    received = [turn.turn_id for turn in turns if turn.delivered or turn.turn_id in trained]
    for calls in (trained, received):
        for names in (calls, [name for name in calls if name not in superseded]):
            if reward.per_turn is not None and len(names) == len(reward.per_turn):
                return dict(zip(names, reward.per_turn, strict=True))
    given = "one reward" if reward.per_turn is None else f"a list of {len(reward.per_turn)} rewards"
    raise ContractError(
        f"the record has {given} and {len(trained)} of the session's model calls train: with credit `turn` an agent returns "
        "`rewards` as a list with one number for each of them, or `turn_rewards` as a dict from the ids of the model's replies "
        "to numbers; credit `episode` takes one reward"
    )


def repeated(turns: Sequence[Turn]) -> set[str]:
    """The turns whose prompt the agent sent again later, and which no later turn continues."""
    prompts = [list(turn.prompt_ids) for turn in turns]
    found = set()
    by_prompt: dict[tuple[int, ...], Turn] = {}
    for turn, prompt in zip(turns, prompts, strict=True):
        before = by_prompt.get(tuple(prompt))
        if before is not None and before.choice_index == turn.choice_index:
            whole = [*before.prompt_ids, *before.completion_ids]
            if not any(later[: len(whole)] == whole for later in prompts):
                found.add(before.turn_id)
        by_prompt[tuple(prompt)] = turn
    return found


def _call(reply_id: str) -> str:
    """The part of a reply's id that all wire formats share."""
    return re.sub("^(chatcmpl-|cmpl-|resp_|msg_)", "", reply_id)


def token_advantages(
    signals: Sequence[Signal], credit: Credit, *, estimator: Estimator = "grpo", report: CreditReport | None = None
) -> list[list[float] | None]:
    """The advantages of a group's sequences, one per token: 0 where the mask is 0, None for a rollout without one.

    ``report`` is added to. Shapes: N signals -> N lists (R,). Raises: ConfigError on a reward that is not finite.
    """
    report = report or CreditReport()
    rewards = {signal.rollout: signal.reward for signal in signals}
    episodes = dict(zip(rewards, advantages(list(rewards.values()), estimator=estimator), strict=True))
    # With credit by turns a call that has no reward teaches nothing. `or 0.0`: and not -0.0.
    whole = {name: 0.0 if credit.credit == "turn" else A or 0.0 for name, A in episodes.items()}
    found = [[whole[signal.rollout] if m else 0.0 for m in signal.mask] for signal in signals]
    pools: dict[int, list[tuple[int, int, int, float]]] = {}
    for row, signal in enumerate(signals):
        for position, begin, end, value in signal.turns:
            pools.setdefault(position if credit.normalise == "turn" else 0, []).append((row, begin, end, value))
    for pool in pools.values():
        known = advantages([value for *_, value in pool], estimator=estimator)
        for (row, begin, end, _), A in zip(pool, known, strict=True):
            found[row][begin:end] = [A or 0.0] * (end - begin)  # a turn that is compared with no other teaches nothing
            report.turns += 1
            report.against += (A or 0.0) * (episodes[signals[row].rollout] or 0.0) < 0
    if credit.teacher_url is None:
        return [None if episodes[s.rollout] is None else A_R for s, A_R in zip(signals, found, strict=True)]
    for signal, A_R in zip(signals, found, strict=True):
        if signal.gaps is None:
            raise ConfigError(f"rollout {signal.rollout} was collected without the teacher {credit.teacher_url}")
        A_R[:] = [gap + credit.reward_weight * A for gap, A in zip(signal.gaps, A_R, strict=True)]
        report.tokens += sum(signal.mask)
        report.gap_sum += sum(signal.gaps)
    return list(found)
