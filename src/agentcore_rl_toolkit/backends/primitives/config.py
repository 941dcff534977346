"""Settings of a run over a service with training primitives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ...errors import ConfigError
from ..collection.advantages import Estimator
from ..data import read_rows
from ..service import ServiceSettings, gateway_place
from ..settings import check_numbers, check_run
from .client import Adam
from .publishing import MAX_GAP

Loss = Literal["importance_sampling", "ppo", "cispo"]


@dataclass(frozen=True, kw_only=True)
class PrimitivesConfig(ServiceSettings):
    """The loop's settings, on top of those of every run's rollouts.

    `base_model` is the service's name of the model; `model_dir` a local folder with that model's tokenizer and chat template
    (no weights). `steps` steps of `groups_per_step` inputs, `group_size` rollouts each; the rows are shuffled anew every
    time all were used. `max_tokens` is that of a whole sequence: longer ones are left out. `loss_config` goes to the service
    with the loss (``clip_low_threshold``, ``clip_high_threshold``). `output_dir` keeps the metrics and, with
    `checkpoint_every`, what a further run with the same folder goes on from; 0 saves nothing.
    Raises: ConfigError.
    """

    model_id: str = "policy"
    base_model: str
    model_dir: Path
    data_path: Path
    output_dir: Path = Path("runs/primitives")
    seed: int = 0
    steps: int = 100
    groups_per_step: int = 8
    group_size: int = 8
    learning_rate: float = 2e-5
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip_norm: float = 0.0
    loss: Loss = "importance_sampling"
    loss_config: Mapping[str, float] = field(default_factory=dict)
    estimator: Estimator = "grpo"
    max_tokens: int | None = 32768
    max_empty_steps: int = 3
    checkpoint_every: int = 0
    max_weights_gap: float = MAX_GAP

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.learning_rate > 0 or not math.isfinite(self.learning_rate):
            raise ConfigError(f"learning_rate must be positive, got {self.learning_rate}")
        if self.checkpoint_every < 0:
            raise ConfigError(f"checkpoint_every cannot be negative, got {self.checkpoint_every}")
        if self.group_size < 2:
            raise ConfigError(f"a group needs at least 2 rollouts to compare, got group_size={self.group_size}")
        counts = ("steps", "groups_per_step", "max_empty_steps", "gateway_context_tokens", "max_tokens")
        check_numbers(self, positive=("tps_limit", "max_weights_gap"), counts=counts, ports=("gateway_port",))
        self.collect_config()

    @property
    def adam(self) -> Adam:
        return Adam(
            learning_rate=self.learning_rate, beta1=self.beta1, beta2=self.beta2, grad_clip_norm=self.grad_clip_norm
        )

    def services(self) -> ServiceSettings:
        """What `RolloutService.open` needs: the gateway that it starts renders prompts with `model_dir`."""
        return replace(self, gateway_model=str(self.model_dir), record_dir=None)

    def facts(self) -> list[tuple[str, str]]:
        """The run, for people. Raises: ConfigError when the data cannot be read."""
        check_run(agent_runtime_arn=self.agent_runtime_arn, s3_bucket=self.s3_bucket, exp_id=self.exp_id)
        started = f"started here, on {self.gateway_host}, with the tokenizer in {self.model_dir}"
        return [
            ("agent", self.agent_runtime_arn),
            ("records", f"{self.s3_bucket}  (experiment {self.exp_id})"),
            ("gateway", gateway_place(self.gateway_url, self.gateways, started)),
            ("rows", f"{len(read_rows(self.data_path))} in {self.data_path}"),
            ("steps", f"{self.steps} of {self.groups_per_step} groups of {self.group_size} rollouts"),
            ("loss", f"{self.loss}, advantages {self.estimator}, learning rate {self.learning_rate:g}"),
            ("checkpoints", f"every {self.checkpoint_every} steps" if self.checkpoint_every else "none"),
            ("output", str(self.output_dir)),
        ]

    def needs(self) -> list[str]:
        """What is missing on this machine."""
        if self.gateway_url is None and not (self.model_dir / "tokenizer_config.json").is_file():
            return [f"tokenizer and chat template in {self.model_dir} (model_dir)"]
        return []
