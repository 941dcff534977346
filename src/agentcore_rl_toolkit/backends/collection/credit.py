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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ...errors import ConfigError
from ...logs import WarnsOnceAMinute
from ..settings import NotNegative, SettingsGroup
from .advantages import Estimator, advantages

if TYPE_CHECKING:
    from ...trajectory import Trajectory

OFTEN = (
    1 / 3
)  # share of turns above which a warning is logged: poor rewards of turns cost up to 14 points (arXiv:2604.02869)
_signs = WarnsOnceAMinute(logging.getLogger(__name__))


class Credit(SettingsGroup):
    """Rules for the advantage of a token.

    ``credit`` "turn" compares the returns of turns, ``discount`` per turn, at each position in a group or (``normalize`` "group")
    over all its turns, which lowers late turns if early ones have more rewards ahead of them. "episode" compares the rewards of
    whole rollouts. ``teacher_url`` is a vLLM or built-in policy server with the student's vocabulary; the rewards' part then
    counts ``reward_weight``.
    """

    credit: Literal["episode", "turn"] = "episode"
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    normalize: Literal["turn", "group"] = "turn"
    teacher_url: str | None = None
    reward_weight: NotNegative = 0.0

    @property
    def per_token(self) -> bool:
        """Return True if the tokens of a rollout may have different advantages."""
        return self.credit == "turn" or self.teacher_url is not None

    @property
    def uses_rewards(self) -> bool:
        """Return True if advantages depend on the agent's rewards."""
        return self.teacher_url is None or self.reward_weight > 0

    def check_temperature(self, temperature: object, name: str) -> None:
        """Raise ConfigError if there is a teacher and this setting of the temperature is not 1."""
        if self.teacher_url is not None and temperature != 1:
            raise ConfigError(f"a teacher's logprobs are those at temperature 1: leave {name} at 1")


def refuse(values: Mapping[str, Any], trainer: str, why: str, settings: type[SettingsGroup] = Credit) -> None:
    """Raise ConfigError if the values have one of these settings, which the trainer cannot honor."""
    named = [name for name in settings.model_fields if name in values]
    if named:
        raise ConfigError(f"{trainer} cannot take {', '.join(named)}: {why}")


@dataclass(frozen=True, kw_only=True)
class Signal:
    """The facts about a training sequence before its group is compared.

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
    """The agreement of a step's turns with their episodes, and the distance of the student from its teacher."""

    turns: int = 0
    against: int = 0  # turns whose advantage has the other sign than the episode's
    tokens: int = 0
    gap_sum: float = 0.0

    def numbers(self) -> dict[str, float]:
        """Return the counts of a step for its metrics. Warn if turns often disagree. A share of nothing is absent."""
        found = {"kl_teacher": -self.gap_sum / self.tokens} if self.tokens else {}
        if self.turns:
            share = found["turns_against_episode"] = self.against / self.turns
            if share > OFTEN:
                _signs.warning(
                    "%.0f %% of the turns have an advantage with another sign than their rollout: the rewards of turns and of "
                    "rollouts disagree. Check them, or train with credit: episode",
                    100 * share,
                )
        return found


def turns_of(trajectory: Trajectory, capture: Any) -> dict[str, tuple[int, int, int]]:
    """Return the turns that train, by id, in the order of their start: (sequence, begin, end) in its tokens."""
    known = {turn.turn_id: turn for turn in capture.turns}
    found = []
    for index, sequence in enumerate(trajectory.sequences):
        for turn in (known[name] for name in sequence.turn_ids if sequence.trained_tokens):
            begin = len(turn.prompt_ids)
            found.append((turn.index, turn.choice_index, turn.turn_id, (index, begin, begin + turn.trained_tokens)))
    return {name: place for *_, name, place in sorted(found)}


def token_advantages(
    signals: Sequence[Signal], credit: Credit, *, estimator: Estimator = "grpo", report: CreditReport | None = None
) -> list[list[float] | None]:
    """Return the advantages of each sequence, one per token: 0 where the mask is 0, None for a rollout without one.

    Add counts to ``report``. Shapes: N signals -> N lists (R,). Raises: ConfigError on a reward that is not finite.
    """
    report = report or CreditReport()
    rewards = {signal.rollout: signal.reward for signal in signals}
    episodes = dict(zip(rewards, advantages(list(rewards.values()), estimator=estimator), strict=True))
    # With credit by turns a call that has no reward teaches nothing. `or 0.0`: and not -0.0.
    whole = {name: 0.0 if credit.credit == "turn" else A or 0.0 for name, A in episodes.items()}
    found = [[whole[signal.rollout] if m else 0.0 for m in signal.mask] for signal in signals]
    pools: dict[int | None, list[tuple[int, int, int, float]]] = {}
    for row, signal in enumerate(signals):
        for position, begin, end, value in signal.turns:
            pools.setdefault(position if credit.normalize == "turn" else None, []).append((row, begin, end, value))
    for pool in pools.values():
        known = advantages([value for *_, value in pool], estimator=estimator)
        for (row, begin, end, _), A in zip(pool, known, strict=True):
            found[row][begin:end] = [A or 0.0] * (end - begin)  # a turn without others to compare with teaches nothing
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
