"""The settings of a run over a training service."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from ...errors import ConfigError
from ..collection.advantages import Estimator
from ..collection.groups import trained_temperature
from ..service import ServiceSettings
from ..settings import Count, GroupSize, Least0, NotNegative, Positive, SettingsGroup
from .client import Adam, Loss, LossName
from .publishing import MAX_GAP
from .settings import LoopSettings

# Names that these settings had before all trainers got the same ones.
LOOP_ALIASES = {"groups_per_step": "groups", "group_size": "rollouts", "loss_config": "loss_options"}


class DataSettings(SettingsGroup):
    """The model and the data. ``base_model`` is the service's name of the model.

    ``model_dir`` is a local folder with that model's tokenizer and chat template (no weights). The rows are shuffled again
    after each pass. ``eval_data_path`` has rows that are never trained on. ``output_dir`` keeps the metrics and checkpoints.
    """

    base_model: str
    model_dir: Path
    data_path: Path
    eval_data_path: Path | None = None
    output_dir: Path = Path("runs/service")
    seed: int = 0


class StepSettings(SettingsGroup):
    """The steps: ``groups`` inputs, ``rollouts`` times each. `LoopSettings` describes the others.

    ``eval_every`` steps one rollout of each held-out row is run with the agent's own sampling, and also before and after the run.
    A further run with the same ``output_dir`` continues from the last checkpoint; ``checkpoint_every`` 0 saves none.
    """

    steps: Count = 100
    groups: Count = 8
    rollouts: GroupSize = 8
    eval_every: Least0 = 0
    checkpoint_every: Least0 = 0
    max_empty_steps: Count = 3
    max_weights_gap: Positive = MAX_GAP


class UpdateSettings(SettingsGroup):
    """The updates. ``loss_options`` go to the service with the loss (``clip_low_threshold``, ``clip_high_threshold``).

    Sequences longer than ``max_tokens`` are left out.
    """

    learning_rate: Positive = 2e-5
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip_norm: NotNegative = 0.0
    loss: LossName = "importance_sampling"
    loss_options: Mapping[str, float] = Field(default_factory=dict)
    estimator: Estimator = "grpo"
    max_tokens: Count | None = 32768


class ServiceTrainingConfig(ServiceSettings):
    """The loop's settings, on top of those of every run's rollouts. Raises: ConfigError."""

    ALIASES: ClassVar[Mapping[str, str]] = LOOP_ALIASES

    data: DataSettings
    step: StepSettings = Field(default_factory=StepSettings)
    update: UpdateSettings = Field(default_factory=UpdateSettings)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if (temperature := trained_temperature(self.selection.sampling_params)) != 1.0:
            raise ConfigError(
                f"sampling_params.temperature is {temperature:g}, and training services compute their losses at temperature 1: "
                "leave it at 1, or train with the loop, TRL, verl or slime"
            )

    @property
    def require_reward(self) -> bool:
        """Return True if a record without a reward is invalid."""
        return self.signals.uses_rewards

    def loop(self) -> LoopSettings:
        """The settings of the training loop."""
        step, update = self.step, self.update
        return LoopSettings(
            steps=step.steps,
            groups=step.groups,
            rollouts=step.rollouts,
            adam=Adam(
                learning_rate=update.learning_rate,
                beta1=update.beta1,
                beta2=update.beta2,
                grad_clip_norm=update.grad_clip_norm,
            ),
            collect=self.collect_config(),
            credit=self.signals,
            estimator=update.estimator,
            loss=Loss(name=update.loss, options=update.loss_options),
            max_tokens=update.max_tokens,
            eval_every=step.eval_every,
            checkpoint_every=step.checkpoint_every,
            max_empty_steps=step.max_empty_steps,
            seed=self.data.seed,
        )

    def services(self) -> ServiceSettings:
        """The settings for `RolloutService.open`: the gateway that it starts renders prompts with `model_dir`."""
        return self.replace(gateway_model=str(self.data.model_dir), record_dir=None)

    def needs(self) -> list[str]:
        """The parts that this machine lacks."""
        folder = self.data.model_dir
        if self.gateway.gateway_url is None and not (folder / "tokenizer_config.json").is_file():
            return [f"tokenizer and chat template in {folder} (model_dir)"]
        return []
