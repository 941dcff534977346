"""The training loop over a service: collect, forward_backward, optim_step, new sampling weights, repeat."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..collection.collect import collect_async
from ..collection.credit import CreditReport
from ..collection.groups import CollectStats, Group, GroupRequest, UsableSteps, summarize
from ..collection.recording import Recording, of_sampled
from ..collection.samples import Sample, to_samples
from .client import Passed, TrainingClient
from .config import PrimitivesConfig
from .data import to_data
from .publishing import Publish

if TYPE_CHECKING:
    from ...client import RolloutClient
    from ...gateway import GatewayClient

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The report of a step. `trained` is False when no sample had a non-zero advantage; the weights are the old ones then.

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


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The report of an evaluation: `when` is "before", "after" or "step-N"."""

    when: str
    weight_version: int
    stats: CollectStats


Observer = Callable[[StepResult | Evaluated, list[Group]], None]  # of a step or an evaluation, with its groups


async def train_async(
    batches: Iterable[Sequence[GroupRequest]],
    *,
    config: PrimitivesConfig,
    training: TrainingClient,
    client: RolloutClient,
    gateway: GatewayClient,
    publish: Publish,
    observe: Observer,
    held_out: Sequence[Mapping[str, Any]] = (),
    first_version: int = 0,
    first_step: int = 0,
    recording: Recording | None = None,
) -> int:
    """Train over `batches`; returns the last weight version.

    `publish(path, version)` puts new weights where agents sample. It is called before the first batch too, so that the first
    rollouts come from the weights in training. To go on from a saved state, give a client made from it, the batches that are
    left, and the version and step to count from. `held_out` are the rows
    of evaluations. `recording` keeps the rollouts in a run's folder.
    Raises: RolloutError after a first step, or `max_empty_steps` steps in a row, without any usable rollout; whatever the
    service raises.
    """
    version, usable = first_version, UsableSteps(limit=config.max_empty_steps, begun=first_step > 0)

    async def new_weights() -> str:
        path = await training.save_weights(f"{config.exp_id}-{version:06d}")
        await publish(path, version)
        return path

    async def evaluate(when: str, step: int) -> None:
        groups = await collect_async(
            [GroupRequest(input_id=f"{when}/{i:04d}", payload=row) for i, row in enumerate(held_out)],
            client=client,
            gateway=gateway,
            config=config.collect_config().evaluating(),
            weight_version=version,
            recording=recording.at(when if when in ("before", "after") else "eval", step) if recording else None,
        )
        observe(Evaluated(when=when, weight_version=version, stats=summarize(groups)), groups)

    sampler = await new_weights()
    if held_out and first_step == 0:
        await evaluate("before", 0)
    step = first_step - 1
    for step, requests in enumerate(batches, first_step):
        groups = await collect_async(
            requests,
            client=client,
            gateway=gateway,
            config=config.collect_config(),
            weight_version=version,
            recording=recording.at("train", step) if recording is not None else None,
        )
        stats = summarize(groups)
        usable.check(groups)
        report = CreditReport()
        every = to_samples(groups, estimator=config.estimator, credit=config, report=report)
        if recording is not None:
            recording.advantages(every)
        samples = [s for s in every if any(s.advantages)]
        data, trained = to_data(samples, max_tokens=config.max_tokens)
        metrics: dict[str, float] = {}
        state: str | None = None
        if data:
            # Both requests are sent before either is awaited: the service runs them in order without idling in between.
            forward = training.forward_backward(data, config.loss, config.loss_config)
            stepped = training.optim_step(config.adam)
            passed = await forward
            metrics = {**passed.metrics, **await stepped}
            if recording is not None:
                _record(recording, trained, passed)
            version += 1
            sampler = await new_weights()
        else:
            log.warning("step %d has nothing to learn from: %s", step, dict(stats.outcomes))
        if held_out and config.eval_every and (step + 1) % config.eval_every == 0 and step + 1 < config.steps:
            await evaluate(f"step-{step + 1}", step + 1)
        if config.checkpoint_every and (step + 1) % config.checkpoint_every == 0:
            state = await training.save_state(f"{config.exp_id}-{step + 1:06d}")
        result = StepResult(
            step=step,
            weight_version=version,
            trained=bool(data),
            samples=len(data),
            too_long=len(samples) - len(data),
            sampler=sampler,
            state=state,
            stats=stats,
            metrics={**metrics, **report.numbers(), **_staleness(samples, version)},
        )
        observe(result, groups)
    if held_out:
        await evaluate("after", step + 1)
    return version


def _record(recording: Recording, samples: Sequence[Sample], passed: Passed) -> None:
    """Add the service's own logprobs of the sampled tokens to the run, where the loss returns them."""
    if passed.logprobs is None or len(passed.logprobs) != len(samples):
        return
    for sample, computed in zip(samples, passed.logprobs, strict=True):
        context = len(sample.prompt_ids)
        if len(computed) != len(sample.token_ids) - 1:
            continue
        logprobs_T = of_sampled([float(lp) for lp in computed[context - 1 :]], sample.response_mask, context)
        recording.trained(sample.session_id, sample.sequence_index, logprobs=logprobs_T, updates=0)


def _staleness(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Versions between the oldest trained token and the weights it was trained into; absent when the engine gave none."""
    ranges = [s.version_range for s in samples]
    known = [r[0] for r in ranges if r is not None]
    return {"staleness_max": float(version - 1 - min(known))} if known else {}
