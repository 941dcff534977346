"""A small training loop over Tinker: collect, forward_backward, optim_step, new sampling weights, repeat.

The training client is duck-typed by the methods used (Tinker SDK 0.38.0): `forward_backward_async(data, loss_fn)` and
`optim_step_async(params)` return futures with `result_async()`, `save_weights_and_get_sampling_client_async(name)` gives a client
that samples from the new weights. `Datum` and its parts come from the SDK unless `make_datum` replaces them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ...errors import ConfigError, MissingExtraError, RolloutError
from ..advantages import Estimator
from ..collect import Client, CollectConfig, CollectStats, Gateway, Group, GroupRequest, collect_async, summarize
from ..samples import Sample, to_samples
from .convert import to_tinker_batch

log = logging.getLogger(__name__)

Loss = Literal["importance_sampling", "ppo", "cispo"]


class TrainingClient(Protocol):
    """The part of Tinker's training client that is used here."""

    async def forward_backward_async(self, data: list[Any], loss_fn: str) -> Any: ...
    async def optim_step_async(self, adam_params: Any) -> Any: ...
    async def save_weights_and_get_sampling_client_async(self, name: str) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class TinkerConfig:
    """Settings of the loop. Units: `learning_rate` per step; `max_tokens` of a whole sequence, longer ones are left out.

    Raises: ConfigError.
    """

    exp_id: str
    learning_rate: float = 2e-5
    beta1: float = 0.9
    beta2: float = 0.95
    loss: Loss = "importance_sampling"
    estimator: Estimator = "grpo"
    max_tokens: int | None = 32768
    max_empty_steps: int = 3
    collect: CollectConfig = field(default_factory=CollectConfig)

    def __post_init__(self) -> None:
        if not self.learning_rate > 0 or not math.isfinite(self.learning_rate):
            raise ConfigError(f"learning_rate must be positive, got {self.learning_rate}")
        if self.max_empty_steps < 1:
            raise ConfigError(f"max_empty_steps must be at least 1, got {self.max_empty_steps}")


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did. `trained` is False when no sample had a non-zero advantage; the weights are the old ones then."""

    step: int
    weight_version: int
    trained: bool
    samples: int
    too_long: int
    stats: CollectStats
    metrics: Mapping[str, float]


async def train_async(
    batches: Iterable[Sequence[GroupRequest]],
    *,
    config: TinkerConfig,
    training_client: TrainingClient,
    client: Client,
    gateway: Gateway,
    publish: Callable[[Any, int], Awaitable[None]],
    on_step: Callable[[StepResult, list[Group]], None] | None = None,
    make_datum: Callable[[Mapping[str, Any]], Any] | None = None,
    make_adam: Callable[[TinkerConfig], Any] | None = None,
    first_version: int = 0,
) -> int:
    """Train over `batches`; returns the last weight version.

    `publish(sampling_client, version)` puts the new weights where agents sample: behind the gateway. It is called
    before the first batch too, so that the first rollouts come from the training client's own weights.
    Raises: RolloutError after `max_empty_steps` steps in a row without any usable rollout; whatever the service raises.
    """
    datum = make_datum or sdk_datum
    adam = make_adam or sdk_adam
    version, empty = first_version, 0
    await publish(await _sampler(training_client, config, version), version)
    for step, requests in enumerate(batches):
        groups = await collect_async(
            requests, client=client, gateway=gateway, config=config.collect, weight_version=version
        )
        stats = summarize(groups)
        empty = 0 if stats.usable else empty + 1
        if empty >= config.max_empty_steps:
            first = next((r.error for g in groups for r in g.rollouts if r.error is not None), None)
            raise RolloutError(f"{empty} steps in a row without a usable rollout; first error: {first}")
        samples = [s for s in to_samples(groups, estimator=config.estimator) if s.advantage != 0.0]
        data, too_long = to_tinker_batch(samples, max_tokens=config.max_tokens)
        metrics: dict[str, float] = {}
        if data:
            metrics = await _update(training_client, [datum(d) for d in data], adam(config), config.loss)
            version += 1
            await publish(await _sampler(training_client, config, version), version)
        else:
            log.warning("step %d has nothing to learn from: %s", step, dict(stats.outcomes))
        if on_step is not None:
            result = StepResult(
                step=step,
                weight_version=version,
                trained=bool(data),
                samples=len(data),
                too_long=len(too_long),
                stats=stats,
                metrics={**metrics, **_staleness(samples, version)},
            )
            on_step(result, groups)
    return version


async def _update(client: TrainingClient, data: list[Any], adam: Any, loss: str) -> dict[str, float]:
    # Both requests are sent before either is awaited: the service runs them in order without idling in between.
    forward = await client.forward_backward_async(data, loss)
    step = await client.optim_step_async(adam)
    output = await forward.result_async()
    await step.result_async()
    return {str(k): float(v) for k, v in (getattr(output, "metrics", None) or {}).items()}


async def _sampler(client: TrainingClient, config: TinkerConfig, version: int) -> Any:
    return await client.save_weights_and_get_sampling_client_async(f"{config.exp_id}-{version:06d}")


def _staleness(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Versions between the oldest trained token and the weights it was trained into; absent when the engine told none."""
    ranges = [s.version_range for s in samples]
    known = [r[0] for r in ranges if r is not None]
    return {"staleness_max": float(version - 1 - min(known))} if known else {}


def sdk_datum(datum: Mapping[str, Any]) -> Any:
    """A `tinker.Datum`. Raises: MissingExtraError without the SDK."""
    tinker = _sdk()
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(datum["tokens"]), loss_fn_inputs=dict(datum["loss_fn_inputs"])
    )


def sdk_adam(config: TinkerConfig) -> Any:
    """`tinker.AdamParams` of the configuration."""
    return _sdk().AdamParams(learning_rate=config.learning_rate, beta1=config.beta1, beta2=config.beta2)


def _sdk() -> Any:
    try:
        import tinker
    except ModuleNotFoundError as e:
        raise MissingExtraError('Tinker needs its SDK:\n    pip install "agentcore-rl-toolkit[tinker]"') from e
    return tinker
