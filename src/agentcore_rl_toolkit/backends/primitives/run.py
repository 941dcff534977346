"""A whole run over a training service: gateway, clients, loop, checkpoints."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..._servers.process import write_private
from ...client.data import payload_id, read_rows
from ...client.evaluation import metrics_line
from ...contract import Cause
from ...errors import ConfigError
from ..collection.groups import Group, GroupRequest
from ..collection.recording import Recording, kept, open_recording
from ..service import RolloutService
from .client import TrainingClient
from .config import PrimitivesConfig
from .loop import Evaluated, Observer, StepResult, train_async
from .publishing import to_gateway

log = logging.getLogger(__name__)

STATE_FILE = "state.json"


def batches(
    config: PrimitivesConfig, rows: list[dict[str, Any]], *, first_step: int = 0
) -> Iterator[list[GroupRequest]]:
    """The inputs of every step from `first_step` on, the same whichever step a run begins with.

    Rows come in a new order each time all have been used. Raises: ConfigError when a step needs more rows than there are.
    """
    if config.groups_per_step > len(rows):
        raise ConfigError(f"groups_per_step is {config.groups_per_step}, the data has {len(rows)} rows")
    per_epoch = len(rows) // config.groups_per_step
    for step in range(first_step, config.steps):
        epoch, place = divmod(step, per_epoch)
        order = list(range(len(rows)))
        random.Random(config.seed * 1_000_003 + epoch).shuffle(order)
        chosen = order[place * config.groups_per_step : (place + 1) * config.groups_per_step]
        yield [
            GroupRequest(input_id=f"{payload_id(rows[i])}-s{step:05d}-{k}", payload=rows[i], n=config.group_size)
            for k, i in enumerate(chosen)
        ]


async def run_async(
    config: PrimitivesConfig,
    connect: Callable[[str | None], Awaitable[TrainingClient]],
    observe: Observer | None = None,
) -> int:
    """Train as configured; goes on from `output_dir` where a checkpoint is. Returns the last weight version.

    `connect(state)` opens the service with the weights in training, those of a saved state if there is one.
    Raises: ConfigError; GatewayError when the gateway does not start; whatever the service raises.
    """
    rows = read_rows(config.data_path)
    held_out = read_rows(config.eval_data_path) if config.eval_data_path is not None else []
    config.output_dir.mkdir(parents=True, exist_ok=True)
    done = _read_state(config.output_dir)
    if done is not None:
        log.info("going on after step %s from %s", done["steps"], done["state"])
    training = await connect(done["state"] if done else None)
    rollouts: RolloutService | None = None
    recording: Recording | None = None
    ended = "errored"
    try:
        rollouts = await asyncio.to_thread(
            RolloutService.open, config.services(), lambda: [training.upstream], training.engine
        )
        recording = open_recording(config.output_dir, kept(config), tokenizer=config.model_dir)
        first_step = int(done["steps"]) if done else 0
        recording.resumed(first_step)
        version = await train_async(
            batches(config, rows, first_step=first_step),
            config=config,
            training=training,
            client=rollouts.client,
            gateway=rollouts.gateway,
            publish=to_gateway(rollouts.gateway, training, max_gap=config.max_weights_gap),
            observe=_recorder(config, recording, observe),
            held_out=held_out,
            first_version=int(done["weight_version"]) if done else 0,
            first_step=first_step,
            recording=recording,
        )
        ended = "success"
        return version
    except asyncio.CancelledError:  # Ctrl-C
        ended = "interrupted"
        raise
    finally:
        try:
            await training.close(ended)  # first: a session may cost until it is stopped
        finally:
            if recording is not None:
                await asyncio.to_thread(recording.run.close)
            if rollouts is not None:
                await asyncio.to_thread(rollouts.close)


def _recorder(config: PrimitivesConfig, recording: Recording, observe: Observer | None) -> Observer:
    started_s = time.monotonic()

    def record(result: StepResult | Evaluated, groups: list[Group]) -> None:
        if isinstance(result, Evaluated):
            facts = {"when": result.when, "version": result.weight_version, **result.stats.evaluation()}
            recording.run.event("evaluated", facts)
        else:
            facts = asdict(result) | {"elapsed_s": round(time.monotonic() - started_s, 3)}
            facts |= {**facts.pop("stats"), **result.stats.evaluation(), **facts.pop("metrics")}
            del facts["state"]
            recording.run.event("step", facts)
            if result.state is not None:
                state = {"steps": result.step + 1, "state": result.state, "sampler": result.sampler}
                text = json.dumps({**state, "weight_version": result.weight_version})
                write_private(config.output_dir / STATE_FILE, text)
        if observe is not None:
            observe(result, groups)

    return record


def line(result: StepResult | Evaluated) -> str:
    """A step or an evaluation in one line, for people."""
    stats = result.stats
    if isinstance(result, Evaluated):
        reward = "none" if stats.score_mean is None else f"{stats.score_mean:.3f}"
        text = f"held out, {result.when}: reward {reward} of {stats.scored} rollouts, weights {result.weight_version}"
        return "  ".join(filter(None, (text, metrics_line(stats.metrics))))
    reward = "  none" if stats.reward_mean is None else f"{stats.reward_mean:6.3f}"
    failed = stats.causes.get(Cause.POLICY, 0)
    text = f"step {result.step:4d}  reward {reward}  usable {stats.usable}/{stats.rollouts}  weights {result.weight_version}"
    losses = "  ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
    text += f"  policy failed {failed}" if failed else ""
    return "  ".join(filter(None, (text, losses or "nothing to learn from", metrics_line(stats.metrics))))


def _read_state(folder: Path) -> dict[str, Any] | None:
    file = folder / STATE_FILE
    if not file.is_file():
        return None
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        return {key: state[key] for key in ("steps", "weight_version", "state")}
    except (json.JSONDecodeError, KeyError) as e:
        raise ConfigError(f"{file} is not a run's state ({e!r}); remove it to begin anew") from e
