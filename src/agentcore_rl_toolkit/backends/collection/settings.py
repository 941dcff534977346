"""The settings of rollouts, in groups, which every trainer's settings contain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from ...contract import check_train
from ...errors import ConfigError
from ..llm_judge import JudgeSettings
from ..scorer import SCORE_TIMEOUT_S, checked_spec
from ..settings import Count, Least0, NotNegative, Positive, Settings, SettingsGroup
from .credit import Credit

MAX_TURNS = 2_000  # an agent in an endless loop makes a hundred calls per second


class LimitSettings(SettingsGroup):
    """The limits of rollouts. Units: seconds.

    `submit_timeout_s` limits a request that starts a rollout, `rollout_timeout_s` the time from its answer to the record.
    `max_concurrent` bounds sessions alive at once; the client paces the calls itself. `max_turns` ends a session after so many
    model calls, which is the policy's failure. `extra_rollouts` are started on top of `n` in every group; as soon as `n` usable
    ones are in, the rest of that group is cancelled. Over-sampling makes groups full in spite of failures and stragglers, at the
    price of favoring short episodes: leave it at 0 unless stragglers hurt.
    """

    rollout_timeout_s: Positive = 900.0
    submit_timeout_s: Positive = 120.0
    tps_limit: Count = 25
    max_concurrent: Count = 128
    max_pool_connections: Count = 100
    max_turns: Count | None = MAX_TURNS
    extra_rollouts: Least0 = 0


class SelectionSettings(SettingsGroup):
    """Selection of trained tokens, and sampling.

    `policy_failures` "mask" leaves rollouts whose policy failed (ran out of tokens, turns or context, or made calls that do
    not parse) out of their group, as DAPO's overlong filtering does; "score" trains them with the reward that their agent
    declares. `train_on` is the rule of what trains of a session (`trajectory.selection`); None: the client's or the agent's rule,
    or "task". `sampling_params` win over the agent's own; in training it samples from the whole distribution at temperature 1
    where they have no other. Calls at another temperature than the trainer's or with penalties are not trained; tokens of a cut
    distribution are. Both are counted, and with `refuse_other_sampling` their rollout is masked.
    """

    policy_failures: Literal["score", "mask"] = "score"
    train_on: str | None = None
    refuse_other_sampling: bool = False
    sampling_params: Mapping[str, Any] | None = None

    def model_post_init(self, _: Any) -> None:
        if self.train_on is not None:
            check_train(self.train_on)


class ScoreSettings(SettingsGroup):
    """A function that scores rollouts: FILE:FUNCTION or MODULE:FUNCTION (`scorer`). A score may take ``score_timeout_s``."""

    score: Annotated[str | None, AfterValidator(checked_spec)] = None
    score_timeout_s: Positive = SCORE_TIMEOUT_S


class RolloutSettings(Settings):
    """The settings of a run's rollouts, and of the signals in them."""

    limits: LimitSettings = Field(default_factory=LimitSettings)
    selection: SelectionSettings = Field(default_factory=SelectionSettings)
    signals: Credit = Field(default_factory=Credit)
    judging: JudgeSettings = Field(default_factory=JudgeSettings)
    scoring: ScoreSettings = Field(default_factory=ScoreSettings)

    def model_post_init(self, _: Any) -> None:
        for what, given in (("judge", self.judging.judge), ("scorer", self.scoring.score)):
            if given is not None and self.signals.credit == "turn":
                raise ConfigError(f"a {what} gives one reward per rollout: it cannot be used with credit `turn`")

    def collect_config(self) -> CollectConfig:
        return CollectConfig(**{name: value for name, value in self.flat().items() if name in CollectConfig.known()})


class CollectConfig(RolloutSettings):
    """Settings for the collection of a batch of groups.

    A gateway that cannot be reached is waited for up to `gateway_patience_s`. With `require_reward` off a rollout without a
    reward is usable. With `evaluation` nothing is trained: the agent samples as it is deployed, but for `sampling_params`, its
    model calls need no token to train on, and no group has `extra_rollouts`. With `require_calls` off, an evaluation's rollout
    may call no model at the gateway.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"train": "train_on"}

    gateway_timeout_s: Positive = 60.0
    gateway_patience_s: NotNegative = 120.0
    require_reward: bool = True
    require_calls: bool = True
    evaluation: bool = False

    if TYPE_CHECKING:  # type checkers know the groups only

        def __init__(self, **settings: Any) -> None: ...

    def model_post_init(self, context: Any) -> None:
        if self.evaluation:
            object.__setattr__(self, "signals", Credit())
            object.__setattr__(self, "limits", self.limits.replace(extra_rollouts=0))
        super().model_post_init(context)
        temperature = (self.selection.sampling_params or {}).get("temperature", 1)
        self.signals.check_temperature(temperature, "sampling_params.temperature")
