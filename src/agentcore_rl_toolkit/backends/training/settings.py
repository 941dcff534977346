"""The settings of the training loop, the clients that it uses, and the state that it saves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ..collection.advantages import Estimator
from ..collection.credit import Credit
from ..collection.groups import CollectConfig
from ..collection.recording import Recording
from .client import Adam, Loss, Schedule

if TYPE_CHECKING:
    from ...client import RolloutClient
    from ...gateway import GatewayClient

STATE_FILE = "state.json"
Observer = Callable[[str, dict[str, Any]], None]  # (event name, its facts)
Row = Mapping[str, Any]  # one input: the payload that the agent receives


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """The settings of the loop.

    A step takes ``groups`` inputs, ``rollouts`` times each, in ``minibatches`` optimizer steps. The learning rate of ``adam``
    is reached after ``warmup_steps`` and follows ``schedule``. Sequences longer than ``max_tokens`` are left out.
    ``replace_up_to`` 3 replaces groups without spread by up to twice as many others. A rollout may start up to ``staleness``
    weight versions before it is trained; 0 runs nothing while the model trains. ``hold_calls`` replaces weights between model
    calls; otherwise running calls continue with the new weights. Held-out rows are run before, after, and every ``eval_every``
    steps (0: never between). The state is saved every ``checkpoint_every`` steps (0: never). ``max_empty_steps`` steps in a row
    without a usable rollout end the run.
    """

    steps: int
    groups: int
    rollouts: int
    adam: Adam
    collect: CollectConfig = field(default_factory=CollectConfig)
    credit: Credit = field(default_factory=Credit)
    estimator: Estimator = "grpo"
    loss: Loss = field(default_factory=Loss)
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    minibatches: int = 1
    max_tokens: int | None = None
    replace_up_to: float = 1.0
    staleness: int = 0
    hold_calls: bool = False
    eval_every: int = 0
    checkpoint_every: int = 0
    max_empty_steps: int = 3
    seed: int = 0

    def adam_of(self, step: int) -> Adam:
        """The optimizer's settings in a step."""
        return self.adam.at(step, self.steps, self.schedule, self.warmup_steps)


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
        """The state of a run; None before its first checkpoint. Raises: ConfigError if the file is damaged."""
        file = run_dir / STATE_FILE
        if not file.is_file():
            return None
        try:
            return cls(**json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as e:
            raise ConfigError(f"{file} is not the state of a run ({e}); remove it to start the run again") from e
