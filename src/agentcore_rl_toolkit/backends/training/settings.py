"""The settings of the training loop, the clients that it uses, and the state that it saves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...errors import ConfigError
from ...policy.losses import OPTIONS
from ..collection.advantages import Estimator
from ..collection.recording import Recording
from ..collection.settings import CollectConfig, RolloutSettings
from ..settings import Count, GroupSize, Least0, NotNegative, Positive, SettingsGroup
from .client import Adam, Loss

if TYPE_CHECKING:
    from ...client import RolloutClient
    from ...gateway import GatewayClient

STATE_FILE = "state.json"
Schedule = Literal["constant", "linear", "cosine"]
Observer = Callable[[str, dict[str, Any]], None]  # (event name, its facts)
Decay = Annotated[float, Field(ge=0, lt=1)]
Row = Mapping[str, Any]  # one input: the payload that the agent receives


class StepSettings(SettingsGroup):
    """The steps: ``groups`` inputs, ``rollouts`` times each.

    With ``replace_up_to`` 3, groups without spread are replaced by up to twice as many others. A rollout may start up to
    ``max_staleness`` weight versions before it is trained; with 0, nothing runs while the model trains. ``hold_calls`` replaces
    weights between model calls; otherwise running calls continue with the new weights. Held-out rows are run before, after, and
    every ``eval_every`` steps (0: never between). The state is saved every ``checkpoint_every`` steps and after the last one (0:
    never). The run ends after ``max_empty_steps`` steps in a row without a usable rollout.
    """

    steps: Count = 32
    groups: Count = 8
    rollouts: GroupSize = 8
    replace_up_to: Annotated[float, Field(ge=1)] = 1.0
    max_staleness: Least0 = 0
    hold_calls: bool = False
    eval_every: Least0 = 0
    checkpoint_every: Least0 = 0
    max_empty_steps: Count = 3
    seed: int = 0


class OptimizerSettings(SettingsGroup):
    """The optimizer. ``schedule`` reduces ``learning_rate`` over all steps, and the first ``warmup_steps`` reduce it further.

    A ``max_grad_norm`` of 0 does not clip.
    """

    learning_rate: Positive = 2e-5
    schedule: Schedule = "constant"
    warmup_steps: Least0 = 0
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    max_grad_norm: NotNegative = 0.0

    def at(self, step: int, steps: int) -> Adam:
        progress = step / steps
        fall = {
            "constant": 1.0,
            "linear": max(0.05, 1 - progress),
            "cosine": 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2,
        }[self.schedule]
        warm = min(1, (step + 1) / (self.warmup_steps + 1))
        return Adam(
            learning_rate=self.learning_rate * warm * fall,
            beta1=self.beta1,
            beta2=self.beta2,
            grad_clip_norm=self.max_grad_norm,
        )


class UpdateSettings(SettingsGroup):
    """The updates of a step: ``minibatches`` optimizer steps.

    ``estimator`` compares the rewards of a group. ``clip_low`` and ``clip_high`` limit the ratio to 1 - ``clip_low`` and
    1 + ``clip_high``; None leaves both to the loss. ``dual_clip`` limits the loss of tokens with a negative advantage.
    ``loss_options`` are further options of the loss, by its own names. Rollouts with a sequence longer than ``max_tokens``
    are left out.
    """

    estimator: Estimator = "grpo"
    loss: Literal["ppo", "cispo", "importance_sampling"] = "ppo"
    clip_low: NotNegative | None = None
    clip_high: NotNegative | None = None
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    loss_options: Mapping[str, float] = Field(default_factory=dict)
    minibatches: Count = 1
    max_tokens: Count | None = None

    def model_post_init(self, _: Any) -> None:
        unused = {"ppo": (), "cispo": ("dual_clip",)}.get(self.loss, OPTIONS)
        if ignored := [name for name in unused if name in self.token_loss.options]:
            raise ConfigError(f"the loss {self.loss} has no {ignored[0].removesuffix('_threshold')}")

    @property
    def token_loss(self) -> Loss:
        given = {
            "clip_low_threshold": None if self.clip_low is None else 1 - self.clip_low,
            "clip_high_threshold": None if self.clip_high is None else 1 + self.clip_high,
            "dual_clip": self.dual_clip,
        }
        options = {name: value for name, value in given.items() if value is not None}
        return Loss(name=self.loss, options={**options, **self.loss_options})


class LearnerSettings(SettingsGroup):
    """A model, and its training in this process. `train` takes the defaults of a model from its size.

    ``model`` is a folder, None the built-in policy. ``lora_rank`` 0 trains all weights. Adapters are scaled by ``lora_alpha``
    divided by the rank (None: twice the rank). ``tokens_at_once`` of a minibatch, with padding, are computed together.
    ``gradient_checkpointing`` computes activations again in the backward pass, which takes less memory and a third more time.
    Engine and trainer multiply matrices in ``dtype``. ``weight_decay`` is that of AdamW. ``kl_penalty`` times the divergence from
    the model at the start is added to the loss of each token. Without LoRA, this needs a second copy of the model.
    """

    model: Path | None = None
    lora_rank: Least0 = 0
    lora_alpha: Count | None = None
    tokens_at_once: Count = 4096
    gradient_checkpointing: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    weight_decay: NotNegative = 0.0
    kl_penalty: NotNegative = 0.0

    @property
    def alpha(self) -> int:
        return self.lora_alpha or 2 * self.lora_rank


class TorchSettings(LearnerSettings):
    """The settings of `TorchClient`. ``temperature`` divides the logits, as in the engine. ``threads`` None takes all cores."""

    temperature: Positive = 1.0
    threads: Count | None = None
    seed: int = 0


class LoopSettings(RolloutSettings):
    """The settings of the training loop."""

    ALIASES: ClassVar[Mapping[str, str]] = {"staleness": "max_staleness", "grad_clip_norm": "max_grad_norm"}

    step: StepSettings = Field(default_factory=StepSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    update: UpdateSettings = Field(default_factory=UpdateSettings)

    if TYPE_CHECKING:  # type checkers know the groups only

        def __init__(self, **settings: Any) -> None: ...

    def collect_config(self) -> CollectConfig:
        return super().collect_config().replace(require_reward=self.signals.uses_rewards)


@dataclass(frozen=True, kw_only=True)
class Services:
    """The clients of a run, and its folder. ``recording`` keeps every rollout there."""

    client: RolloutClient
    gateway: GatewayClient
    run_dir: Path
    recording: Recording | None = None


@dataclass(frozen=True, kw_only=True)
class State:
    """The checkpoint of a run: the steps done, and the saved states of the training client and the stream."""

    steps: int
    state: str
    stream: Mapping[str, Any]

    @classmethod
    def read(cls, run_dir: Path) -> State | None:
        """Read the state of a run, None before the first checkpoint. Raises: ConfigError if the file is damaged."""
        file = run_dir / STATE_FILE
        if not file.is_file():
            return None
        try:
            return cls(**json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as e:
            raise ConfigError(f"{file} is not the state of a run ({e}); remove it to start the run again") from e
