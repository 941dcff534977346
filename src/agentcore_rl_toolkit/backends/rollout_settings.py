"""The settings of rollouts, in groups, which every trainer's settings contain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from ..errors import ConfigError
from .collection.credit import Credit
from .collection.groups import MAX_TURNS, CollectConfig, PolicyFailures
from .llm_judge import JudgeSettings
from .scorer import SCORE_TIMEOUT_S, checked_spec
from .settings import Count, Least0, Positive, Settings, SettingsGroup


class LimitSettings(SettingsGroup):
    """The limits of rollouts. Units: seconds. `CollectConfig` describes them."""

    rollout_timeout_s: Positive = 900.0
    submit_timeout_s: Positive = 120.0
    tps_limit: Count = 25
    max_concurrent: Count = 128
    max_pool_connections: Count = 100
    max_turns: Count | None = MAX_TURNS
    extra_rollouts: Least0 = 0


class SelectionSettings(SettingsGroup):
    """Selection of trained tokens, and sampling. `CollectConfig` describes the fields; ``train_on`` is its ``train``."""

    policy_failures: PolicyFailures = "score"
    train_on: str | None = None
    refuse_other_sampling: bool = False
    sampling_params: Mapping[str, Any] | None = None


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
        if self.judging.judge is not None and self.signals.credit == "turn":
            raise ConfigError("a judge gives one reward per rollout: it cannot be used with credit `turn`")
        if self.scoring.score is not None and self.signals.credit == "turn":
            raise ConfigError("a scorer gives one reward per rollout: it cannot be used with credit `turn`")

    def collect_config(self) -> CollectConfig:
        """Return the settings of collections."""
        flat = self.flat()
        same = {name: flat[name] for name in CollectConfig.model_fields if name in flat}
        same |= {"train": self.selection.train_on, "judged_by": JudgeSettings.of(self.judging)}
        return CollectConfig(**same, require_reward=self.require_reward)

    @property
    def require_reward(self) -> bool:
        """Return True if a record without a reward is invalid."""
        return True
