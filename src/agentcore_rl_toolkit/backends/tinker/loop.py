"""A small training loop over Tinker: collect, forward_backward, optim_step, new sampling weights, repeat.

The training client is the SDK's (0.38: every verb sends its request and returns a future at once), duck-typed by the methods
used. New weights reach the agents through the model gateway, which samples from Tinker by their ``tinker://`` path.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..._installation import missing_extra
from ...errors import ConfigError, RolloutError
from ..collection.advantages import Estimator, advantages
from ..collection.collect import (
    Client,
    CollectConfig,
    CollectStats,
    Gateway,
    Group,
    GroupRequest,
    Recording,
    collect_async,
    summarize,
)
from ..collection.samples import Sample, to_samples
from .convert import to_tinker_batch

log = logging.getLogger(__name__)

Loss = Literal["importance_sampling", "ppo", "cispo"]


class TrainingClient(Protocol):
    """The part of Tinker's training client that is used here. What the methods return can be awaited."""

    def forward_backward(
        self, data: list[Any], loss_fn: Any, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Awaitable[Any]: ...
    def optim_step(self, optim_params: Any) -> Awaitable[Any]: ...
    def save_weights_for_sampler(self, name: str) -> Awaitable[Any]: ...
    def save_state(self, name: str, ttl_seconds: int | None = None, overwrite: bool = False) -> Awaitable[Any]: ...


class SamplingGateway(Gateway, Protocol):
    """A gateway that samples from Tinker: `GatewayClient` of one served with ``--engine tinker``."""

    async def set_weight_version_async(self, version: int, *, sampler: str | None = None) -> None: ...


Publish = Callable[[str, int], Awaitable[None]]


def to_gateway(gateway: SamplingGateway) -> Publish:
    """`publish` for our gateway: it samples from the new weights once this returns, and records their version with each
    turn. Calls that run at that moment end on the old weights, and are recorded so."""

    async def publish(path: str, version: int) -> None:
        await gateway.set_weight_version_async(version, sampler=path)

    return publish


@dataclass(frozen=True, kw_only=True)
class TinkerConfig:
    """Settings of the loop. Units: `learning_rate` per step; `max_tokens` of a whole sequence, longer ones are left out.

    `loss_config` goes to the service with the loss (``clip_low_threshold``, ``clip_high_threshold``). `checkpoint_every`
    steps the state is saved at the service, so that `train_async` can go on from it; 0 never does.
    Raises: ConfigError.
    """

    exp_id: str
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
    collect: CollectConfig = field(default_factory=CollectConfig)

    def __post_init__(self) -> None:
        if not self.learning_rate > 0 or not math.isfinite(self.learning_rate):
            raise ConfigError(f"learning_rate must be positive, got {self.learning_rate}")
        if not self.collect.require_reward:
            raise ConfigError("collect.require_reward must be on: nobody here computes rewards but the agent")
        if self.max_empty_steps < 1:
            raise ConfigError(f"max_empty_steps must be at least 1, got {self.max_empty_steps}")
        if self.checkpoint_every < 0:
            raise ConfigError(f"checkpoint_every cannot be negative, got {self.checkpoint_every}")


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did. `trained` is False when no sample had a non-zero advantage; the weights are the old ones then.

    `sampler` is the path of the weights that agents sample now; `state` that of a saved training state, if the step made
    one.
    """

    step: int
    weight_version: int
    trained: bool
    samples: int
    too_long: int
    sampler: str
    state: str | None
    stats: CollectStats
    metrics: Mapping[str, float]


async def train_async(
    batches: Iterable[Sequence[GroupRequest]],
    *,
    config: TinkerConfig,
    training_client: TrainingClient,
    client: Client,
    gateway: SamplingGateway,
    publish: Publish | None = None,
    on_step: Callable[[StepResult, list[Group]], None] | None = None,
    first_version: int = 0,
    first_step: int = 0,
    recording: Recording | None = None,
) -> int:
    """Train over `batches`; returns the last weight version.

    `publish(path, version)` puts new weights where agents sample; None tells `gateway`. It is called before the first
    batch too, so that the first rollouts come from the training client's own weights. To go on from a saved state, give
    a training client made from it, the batches that are left, and the version and step to count from. `recording`
    keeps the rollouts in a run's folder.
    Raises: RolloutError after `max_empty_steps` steps in a row without any usable rollout; whatever the service raises.
    """
    send = publish or to_gateway(gateway)
    version, empty = first_version, 0
    sampler = await _publish(training_client, config, version, send)
    for step, requests in enumerate(batches, first_step):
        groups = await collect_async(
            requests,
            client=client,
            gateway=gateway,
            config=config.collect,
            weight_version=version,
            recording=recording.at("train", step) if recording is not None else None,
        )
        stats = summarize(groups)
        empty = 0 if stats.usable else empty + 1
        if empty >= config.max_empty_steps:
            first = next((r.error for g in groups for r in g.rollouts if r.error is not None), None)
            raise RolloutError(f"{empty} steps in a row without a usable rollout; first error: {first}")
        if recording is not None:
            for group in groups:
                recording.advantages(group, advantages(group.rewards, estimator=config.estimator))
        samples = [s for s in to_samples(groups, estimator=config.estimator) if s.advantage != 0.0]
        data, too_long = to_tinker_batch(samples, max_tokens=config.max_tokens)
        metrics: dict[str, float] = {}
        state: str | None = None
        if data:
            metrics, outputs = await _update(training_client, data, config)
            if recording is not None:
                left_out = set(map(id, too_long))
                _record(recording, [s for s in samples if id(s) not in left_out], outputs)
            version += 1
            sampler = await _publish(training_client, config, version, send)
        else:
            log.warning("step %d has nothing to learn from: %s", step, dict(stats.outcomes))
        if config.checkpoint_every and (step + 1) % config.checkpoint_every == 0:
            name = f"{config.exp_id}-{step + 1:06d}"
            state = str((await training_client.save_state(name, overwrite=True)).path)
        if on_step is not None:
            result = StepResult(
                step=step,
                weight_version=version,
                trained=bool(data),
                samples=len(data),
                too_long=len(too_long),
                sampler=sampler,
                state=state,
                stats=stats,
                metrics={**metrics, **_staleness(samples, version)},
            )
            on_step(result, groups)
    return version


async def _update(
    client: TrainingClient, data: list[dict[str, Any]], config: TinkerConfig
) -> tuple[dict[str, float], Sequence[Mapping[str, Any]]]:
    """The metrics of both requests, and what the service computed for each datum."""
    # Both requests are sent before either is awaited: the service runs them in order without idling in between.
    forward = client.forward_backward([sdk_datum(d) for d in data], config.loss, dict(config.loss_config) or None)
    step = client.optim_step(sdk_adam(config))
    output, stepped = await forward, await step
    found = {**(getattr(output, "metrics", None) or {}), **(getattr(stepped, "metrics", None) or {})}
    return {str(k): float(v) for k, v in found.items()}, getattr(output, "loss_fn_outputs", None) or ()


def _record(recording: Recording, samples: Sequence[Sample], outputs: Sequence[Mapping[str, Any]]) -> None:
    """Add the service's own logprobs of the sampled tokens to the run, where the loss returns them."""
    if len(outputs) != len(samples):
        return
    for sample, output in zip(samples, outputs, strict=True):
        computed = getattr(output.get("logprobs"), "data", None)
        context = len(sample.prompt_ids)
        if computed is None or len(computed) != len(sample.token_ids) - 1:
            continue
        sampled = zip(list(computed)[context - 1 :], sample.response_mask, strict=True)
        logprobs_T = [*[None] * context, *(float(lp) if mask else None for lp, mask in sampled)]
        recording.trained(sample.session_id, sample.sequence_index, logprobs=logprobs_T, updates=0)


async def _publish(client: TrainingClient, config: TinkerConfig, version: int, send: Publish) -> str:
    path = str((await client.save_weights_for_sampler(f"{config.exp_id}-{version:06d}")).path)
    await send(path, version)
    return path


def _staleness(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Versions between the oldest trained token and the weights it was trained into; absent when the engine told none."""
    ranges = [s.version_range for s in samples]
    known = [r[0] for r in ranges if r is not None]
    return {"staleness_max": float(version - 1 - min(known))} if known else {}


def sdk_datum(datum: Mapping[str, Any]) -> Any:
    """A `tinker.Datum`. Raises: MissingExtraError without the SDK."""
    tinker = sdk()
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(datum["tokens"]), loss_fn_inputs=dict(datum["loss_fn_inputs"])
    )


def sdk_adam(config: TinkerConfig) -> Any:
    """`tinker.AdamParams` of the configuration."""
    return sdk().AdamParams(
        learning_rate=config.learning_rate,
        beta1=config.beta1,
        beta2=config.beta2,
        grad_clip_norm=config.grad_clip_norm,
    )


def sdk() -> Any:
    """The SDK. Raises: MissingExtraError."""
    try:
        import tinker
    except ModuleNotFoundError as e:
        raise missing_extra("Tinker needs its SDK", "tinker") from e
    return tinker
