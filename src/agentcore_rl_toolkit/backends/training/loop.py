"""The training loop, from rollouts of a deployed agent to new weights at the engine.

Each step takes groups of rollouts of the same input, turns their rewards into advantages, makes the sampled tokens of the
better ones more likely, and lets agents sample from the new weights. Rollouts continue meanwhile, up to `staleness` weight
versions behind. The loss compares each token with the logprob that it was sampled with, whichever weights those were. The agent
runs elsewhere, without knowledge of the loop. Its reward comes back through the object store, and its exact tokens through the
model gateway.

    reward r_i of rollout i in a group of G          advantage A_t = (r_i - mean(r)) / (std(r) + eps), t sampled in rollout i
    ratio  rho_t = pi(token_t) / pi_sampled(token_t)
    loss = - mean over sampled tokens of  min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)

`collection.credit` has the other advantages, and `policy.losses` the other losses.

Sources: GRPO, arXiv:2402.03300; the asymmetric clip and the mean over tokens, DAPO, arXiv:2503.14476.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..._servers.process import write_private
from ...errors import CaptureError, ConfigError
from ...stats.intervals import interval
from ..collection.collect import collect_async
from ..collection.credit import CreditReport
from ..collection.groups import Group, GroupRequest, UsableSteps, summarize
from ..collection.recording import Recording
from ..collection.samples import to_samples
from ..collection.sessions import Places
from ..collection.stream import GroupStream
from .batch import Datum, to_data
from .client import TrainingClient
from .metrics import Sums, ages_of, group_metrics, staleness
from .settings import STATE_FILE, LoopSettings, Observer, Row, Services, State


async def train(
    services: Services,
    training: TrainingClient,
    settings: LoopSettings,
    rows: Sequence[Row],
    held_out: Sequence[Row],
    observe: Observer,
    *,
    resumed: State | None = None,
) -> int:
    """Train and return the last weight version. Version k is the result of k steps.

    ``rows`` are trained on, in another order each time all were used. ``held_out`` may be empty. To continue a run, give its
    state and a training client opened from ``resumed.state``.
    Raises: ConfigError without rows. RolloutError when no rollout of the first step, or of `max_empty_steps` steps in a row, is
    usable. CaptureError when the trainer's logprobs differ from the sampler's at equal weights. WeightsError when new weights did
    not arrive.
    """
    if not rows:
        raise ConfigError("there are no rows to train on")
    done, plan, recording = resumed.steps if resumed else 0, settings.step, services.recording
    if done > plan.steps:
        raise ConfigError(f"the run has done {done} steps, which is more than `steps` {plan.steps}")
    per_step, places = plan.groups * plan.rollouts, Places(settings.limits.max_concurrent)  # shared with evaluations
    evaluate = functools.partial(_evaluate, services, settings, held_out, observe, places)
    if recording is not None:
        recording.resumed(done, plan.steps)
    evaluations = 1 + (done // plan.eval_every if plan.eval_every else 0)
    observe("begins", {"steps_done": done, "rollouts_done": done and evaluations * len(held_out) + done * per_step})
    if plan.hold_calls:
        await services.gateway.resume_async()  # the gateway keeps a pause, also if the run was interrupted in it
    await training.publish(done, services.gateway, None)
    if done == 0 and held_out:
        await evaluate(0)

    def request(place: int) -> GroupRequest | None:
        if place >= plan.steps * plan.groups + stream.replaced:
            return None
        # A row of the data is the payload, as in every backend.
        return GroupRequest(input_id=f"train/{place:05d}", payload=row_at(place, rows, plan.seed), n=plan.rollouts)

    stream = GroupStream(
        request,
        client=services.client,
        gateway=services.gateway,
        batch_groups=plan.groups,
        max_staleness=plan.max_staleness,
        replace_up_to=plan.replace_up_to,
        config=settings.collect_config(),
        places=places,
        weight_version=done,
        state=resumed.stream if resumed else None,
        on_rollout=lambda rollout: observe("rollout", {"phase": "training", "rollout": rollout}),
        recording=recording and recording.at("train"),
    )
    usable = UsableSteps(limit=plan.max_empty_steps, begun=done > 0)
    observe("rollouts_started", {"phase": "training", "total": (plan.steps - done) * per_step})
    async with stream:
        sampling_since = time.monotonic()
        for step in range(done, plan.steps):
            started = time.monotonic()
            groups = await stream.take_async()
            observe("collected", {"step": step, "groups": groups})
            taken = time.monotonic()
            fitting = [group.within(settings.update.max_tokens) for group in groups]
            facts = await update(training, fitting, settings, step, recording)
            whole = facts["too_long"] and facts["too_long"] == facts["sequences"]
            usable.check(groups, left_out=f"longer than max_tokens {settings.update.max_tokens}" if whole else None)
            try:
                while plan.hold_calls and (await services.gateway.pause_async())["in_flight"]:
                    pass  # running model calls end, and the gateway holds new ones
                await training.publish(step + 1, services.gateway, probe_of(groups))
            finally:
                if plan.hold_calls:
                    await services.gateway.resume_async()
            ended = time.monotonic()
            if held_out and plan.eval_every and (step + 1) % plan.eval_every == 0 and step + 1 < plan.steps:
                # Before the step is saved: both are kept, or none. Without staleness, the next rollouts start afterwards.
                await evaluate(step + 1)
                observe("rollouts_started", {"phase": "training", "total": (plan.steps - step - 1) * per_step})
            # Rollouts run during checkpoints. With staleness, they also run during training and evaluations.
            sampling_s = (ended if plan.max_staleness else taken) - sampling_since
            sampling_since = ended if plan.max_staleness else time.monotonic()
            stream.published(step + 1)
            position = stream.state()  # before anything else ends: a resumed run repeats all that is not trained
            facts |= group_metrics([*fitting, *stream.left_out]) | {
                "groups_replaced": len(stream.left_out),
                "rollout_s": taken - started,
                "train_s": ended - taken,
                "waiting": (taken - started) / (ended - started),
            }
            facts["sampled_tokens_per_s"] = facts["sampled_tokens"] / sampling_s
            facts["computed_tokens_per_s"] = facts["computed_tokens"] / facts["train_s"]
            observe("step", {"step": step, **facts, **staleness(fitting, step)})
            # The last: a step that a checkpoint contains is not repeated, so its numbers must be written.
            if plan.checkpoint_every and ((step + 1) % plan.checkpoint_every == 0 or step + 1 == plan.steps):
                state = State(steps=step + 1, state=await training.save(step + 1), stream=position)
                write_private(services.run_dir / STATE_FILE, json.dumps(asdict(state)))

    if held_out:
        await evaluate(plan.steps)
    return plan.steps


async def update(
    training: TrainingClient,
    groups: Sequence[Group],
    settings: LoopSettings,
    step: int,
    recording: Recording | None = None,
) -> dict[str, Any]:
    """Train on the groups of a step. Returns its metrics; without usable rollouts that differ, nothing is trained."""
    report, plan, loss, stats = CreditReport(), settings.update, settings.update.token_loss, summarize(groups)
    left_out = [r.trajectory for group in groups for r in group.rollouts if r.mask_reason == "too_long"]
    too_long = sum(trajectory.report.sequences for trajectory in left_out if trajectory is not None)
    samples = to_samples(groups, estimator=plan.estimator, credit=settings.signals, report=report)
    pairs = to_data(samples, groups, version=step, equal=training.penalizes)
    if recording is not None:
        recording.masked(groups)
        recording.advantages(samples, trained=[sample for _, sample in pairs])
    random.Random(settings.step.seed * 1_000_003 + step).shuffle(pairs)
    adam, sums = settings.optimizer.at(step, settings.step.steps), Sums(loss)
    for minibatch in range(plan.minibatches):
        if not (part := pairs[minibatch :: plan.minibatches]):
            continue
        data = [datum for datum, _ in part]
        # Every token of the step weighs the same, whichever minibatch it is in. Both requests are sent before either is awaited.
        forward = training.forward_backward(data, loss, stats.trained_tokens / plan.minibatches)
        passed, stepped = await asyncio.gather(forward, training.step(adam))
        # Only in the first minibatch do trainer and sampler have the same weights.
        gap = await asyncio.to_thread(sums.add, data, passed, stepped, plan.minibatches, check_gap=minibatch == 0)
        limit = training.max_logprob_gap
        if gap is not None and limit is not None and not gap <= limit:
            raise CaptureError(
                f"the logprobs of engine and trainer differ by {gap:g} (at most {limit:g}): they compute different models"
            )
        if recording is not None and passed.logprobs is not None:
            for n, (datum, sample) in enumerate(part):
                recording.trained(
                    sample.session_id,
                    sample.sequence_index,
                    logprobs=_of_targets(passed.logprobs[n], datum),
                    entropies=_of_targets(passed.entropies[n], datum) if passed.entropies is not None else None,
                    updates=minibatch + plan.minibatches * ages_of(sample, step),
                )
    return {
        "learning_rate": adam.learning_rate,
        "sequences": stats.sequences + too_long,
        "too_long": too_long,
        "groups_that_differ": len({sample.group_index for _, sample in pairs if any(sample.advantages)}),
        "gradient_tokens": sum(A != 0 for _, sample in pairs for A in sample.advantages),
        "computed_tokens": sum(len(sample.token_ids) for _, sample in pairs),  # prompts too
        **sums.metrics(),
        **report.numbers(),
    }


def _of_targets(values: Sequence[float], datum: Datum) -> list[float | None]:
    """Align the values of the trained targets with the sequence's tokens. Shapes: (T - 1,) -> (T,)."""
    return [None, *(value if m else None for value, m in zip(values, datum.mask, strict=True))]


def probe_of(groups: Sequence[Group]) -> list[int] | None:
    """Return a prompt of the policy's own dialogues: the tokens of a usable rollout before its first sampled one."""
    for group in groups:
        for rollout in group.usable:
            for sequence in rollout.trajectory.sequences if rollout.trajectory is not None else ():
                if any(sequence.loss_mask):
                    return list(sequence.token_ids[: sequence.loss_mask.index(1)])
    return None


async def _evaluate(
    services: Services, settings: LoopSettings, held_out: Sequence[Row], observe: Observer, places: Places, version: int
) -> None:
    """Run each held-out input once, with this version of the weights and the agent's own sampling."""
    when = {0: "before", settings.step.steps: "after"}.get(version, f"step-{version}")
    observe("rollouts_started", {"phase": when, "total": len(held_out)})
    groups = await collect_async(
        [GroupRequest(input_id=f"{when}/{i:04d}", payload=row) for i, row in enumerate(held_out)],
        client=services.client,
        gateway=services.gateway,
        config=settings.collect_config().replace(evaluation=True),
        places=places,
        weight_version=version,
        on_rollout=lambda rollout: observe("rollout", {"phase": when, "rollout": rollout}),
        recording=services.recording and services.recording.at("eval" if when.startswith("step-") else when, version),
    )
    scores = [rollout.score for group in groups for rollout in group.rollouts if rollout.score is not None]
    observe(
        "evaluated", {"when": when, "version": version, **group_metrics(groups), "reward_interval": interval(scores)}
    )


def row_at(place: int, rows: Sequence[Row], seed: int) -> Row:
    """Return the input at a place of the training. The data set repeats, in another order each time."""
    epoch, at = divmod(place, len(rows))
    return rows[_order_of(len(rows), seed, epoch)[at]]


@functools.lru_cache(maxsize=2)  # shuffling a large data set takes too long to do it for each group
def _order_of(rows: int, seed: int, epoch: int) -> list[int]:
    order = list(range(rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
