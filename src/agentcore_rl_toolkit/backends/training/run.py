"""A run over a training service: the gateway, the clients, the loop, and the files of the run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from ...client.data import read_rows
from ...runs import locked
from ..collection.recording import Recording, open_recording
from ..service import RolloutService
from .client import TrainingClient
from .loop import train
from .service_settings import ServiceTrainingConfig
from .settings import Observer, Services, State

log = logging.getLogger(__name__)


class ServiceClient(TrainingClient, Protocol):
    """A training client with weights from which a gateway samples."""

    engine: str  # the gateway's engine for this service
    upstream: str  # the URL from which the gateway samples


async def run_async(
    config: ServiceTrainingConfig,
    connect: Callable[[str | None], Awaitable[ServiceClient]],
    observe: Observer | None = None,
) -> int:
    """Train as configured, and continue from the checkpoint in `output_dir` if there is one. Returns the last weight version.

    `connect(state)` opens the service with the weights in training, those of a saved state if there is one.
    Raises: ConfigError, also when another process trains in this folder; GatewayError when the gateway does not start; the
    errors of the service.
    """
    data, folder = config.data, config.data.output_dir
    with locked(folder):
        rows = read_rows(data.data_path)
        held_out = read_rows(data.eval_data_path) if data.eval_data_path is not None else []
        resumed = State.read(folder)
        if resumed is not None:
            log.info("continuing after step %s from %s", resumed.steps, resumed.state)
        training = await connect(resumed.state if resumed else None)
        rollouts: RolloutService | None = None
        recording: Recording | None = None
        ended = "errored"
        try:
            rollouts = await asyncio.to_thread(
                RolloutService.open, config.services(), lambda: [training.upstream], training.engine
            )
            recording = open_recording(folder, config.shown(), tokenizer=config.data.model_dir)
            services = Services(client=rollouts.client, gateway=rollouts.gateway, run_dir=folder, recording=recording)
            observer = _written(recording, observe)
            version = await train(services, training, config, rows, held_out, observer, resumed=resumed)
            ended = "success"
            recording.finished(steps=version)
            return version
        except asyncio.CancelledError:  # Ctrl-C
            ended = "interrupted"
            raise
        finally:
            try:
                await training.close(ended)  # first: a session may cost money until it is stopped
            finally:
                if recording is not None:
                    await asyncio.to_thread(recording.run.close)
                if rollouts is not None:
                    await asyncio.to_thread(rollouts.close)


def _written(recording: Recording, observe: Observer | None) -> Observer:
    started_s = time.monotonic()

    def record(event: str, facts: dict[str, Any]) -> None:
        if event == "step":
            facts = {**facts, "elapsed_s": round(time.monotonic() - started_s, 3)}
        if event in ("step", "evaluated"):
            recording.run.event(event, facts)
        if observe is not None:
            observe(event, facts)

    return record
