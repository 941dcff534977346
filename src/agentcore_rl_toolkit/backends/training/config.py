"""The settings of a run over a training service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...errors import ConfigError
from ..collection.advantages import Estimator
from ..collection.groups import trained_temperature
from ..service import ServiceSettings
from ..settings import Count, GroupSize, Least0, NotNegative, Positive
from .client import Adam, Loss, LossName
from .publishing import MAX_GAP
from .settings import LoopSettings


@dataclass(frozen=True, kw_only=True)
class ServiceTrainingConfig(ServiceSettings):
    """The loop's settings, on top of those of every run's rollouts.

    `base_model` is the service's name of the model; `model_dir` a local folder with that model's tokenizer and chat template
    (no weights). `steps` steps of `groups_per_step` inputs, `group_size` rollouts each; the rows are shuffled anew every
    time all were used. `eval_data_path` has rows that are never trained on: one rollout of each, with the agent's own sampling,
    before and after, and every `eval_every` steps; `sampling_params` hold there too. `max_tokens` is that of a whole
    sequence: longer ones are left out.
    `loss_config` goes to the service with the loss (``clip_low_threshold``, ``clip_high_threshold``). `output_dir` keeps the
    metrics and, with `checkpoint_every`, what a further run with the same folder goes on from; 0 saves nothing.
    Raises: ConfigError.
    """

    model_id: str = "policy"
    base_model: str
    model_dir: Path
    data_path: Path
    eval_data_path: Path | None = None
    eval_every: Least0 = 0
    output_dir: Path = Path("runs/service")
    seed: int = 0
    steps: Count = 100
    groups_per_step: Count = 8
    group_size: GroupSize = 8
    learning_rate: Positive = 2e-5
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip_norm: NotNegative = 0.0
    loss: LossName = "importance_sampling"
    loss_config: Mapping[str, float] = field(default_factory=dict)
    estimator: Estimator = "grpo"
    max_tokens: Count | None = 32768
    max_empty_steps: Count = 3
    checkpoint_every: Least0 = 0
    max_weights_gap: Positive = MAX_GAP

    def __post_init__(self) -> None:
        super().__post_init__()
        if (temperature := trained_temperature(self.sampling_params)) != 1.0:
            raise ConfigError(
                f"sampling_params.temperature is {temperature:g}, and training services compute their losses at temperature 1: "
                "leave it at 1, or train with the loop, TRL, verl or slime"
            )

    @property
    def require_reward(self) -> bool:
        """Return True if a record without a reward is invalid."""
        return self.uses_rewards

    def loop(self) -> LoopSettings:
        """The settings of the training loop."""
        return LoopSettings(
            steps=self.steps,
            groups=self.groups_per_step,
            rollouts=self.group_size,
            adam=Adam(
                learning_rate=self.learning_rate,
                beta1=self.beta1,
                beta2=self.beta2,
                grad_clip_norm=self.grad_clip_norm,
            ),
            collect=self.collect_config(),
            credit=self,
            estimator=self.estimator,
            loss=Loss(name=self.loss, options=self.loss_config),
            max_tokens=self.max_tokens,
            eval_every=self.eval_every,
            checkpoint_every=self.checkpoint_every,
            max_empty_steps=self.max_empty_steps,
            seed=self.seed,
        )

    def services(self) -> ServiceSettings:
        """The settings for `RolloutService.open`: the gateway that it starts renders prompts with `model_dir`."""
        return replace(self, gateway_model=str(self.model_dir), record_dir=None)

    def needs(self) -> list[str]:
        """The parts that this machine lacks."""
        if self.gateway_url is None and not (self.model_dir / "tokenizer_config.json").is_file():
            return [f"tokenizer and chat template in {self.model_dir} (model_dir)"]
        return []
