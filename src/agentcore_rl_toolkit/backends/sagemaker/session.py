"""The life of a training session: it bills from its start until it is stopped, so its name is kept from before it exists.

``session.json`` in the run's folder has the name until the stop is confirmed. A run that finds one there stops that session.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from pathlib import Path
from typing import Any

from ...errors import ConfigError, TrainingServiceError
from ...gateway.sampling_services.sagemaker import CONTROL, INVALID, Caller, client_of
from .config import SageMakerConfig

log = logging.getLogger(__name__)

FILE = "session.json"
LIVE = ("Created", "Scheduled", "Running", "Blocked")  # these bill, or will
STOP_S = 300.0
UNKNOWN = "ResourceNotFound"
_STEP_S = 10.0


async def start(control: Caller, config: SageMakerConfig) -> str:
    """The name of a new session that runs. One that an earlier run left is stopped first. Raises: TrainingServiceError."""
    await stop_left(control, config.output_dir)
    name = f"{re.sub('[^A-Za-z0-9]+', '-', config.exp_id)[:50].strip('-') or 'run'}-{secrets.token_hex(4)}"
    (config.output_dir / FILE).write_text(json.dumps({"session": name}), encoding="utf-8")
    creating = asyncio.ensure_future(_create(control, config, name))
    try:
        await asyncio.shield(creating)
        await _running(control, name, config.start_timeout_s)
    except BaseException:
        await asyncio.wait([creating])  # a request that is under way would make a session after the stop
        await stop(control, name, config.output_dir)
        raise
    return name


async def _create(control: Caller, config: SageMakerConfig, name: str) -> None:
    model = {"BaseModelArn": config.base_model} | ({"AcceptEula": True} if config.accept_eula else {})
    group = config.model_package_group_arn
    try:
        await control.call(
            "create_training_session",
            TrainingSessionName=name,
            LoraConfig={"Rank": config.rank, "Alpha": config.alpha},
            RoleArn=config.role_arn,
            ModelConfig=model,
            OutputConfig={"S3Location": {"Path": config.output_s3}},
            **({} if group is None else {"ModelPackageGroupArn": group}),
        )
    except TrainingServiceError as e:
        if e.code != "ResourceInUse":  # the name is random: a request whose answer was lost has made it
            raise


async def _running(control: Caller, name: str, timeout_s: float) -> None:
    give_up_s, delay_s = time.monotonic() + timeout_s, 0.1
    while (detail := await describe(control, name))["TrainingSessionStatus"] != "Running":
        status = detail["TrainingSessionStatus"]
        if status not in ("Created", "Scheduled"):
            why = detail.get("ErrorDetails", "SageMaker does not say why")
            raise TrainingServiceError(f"session {name} is {status} and did not start: {why}", code=status)
        if time.monotonic() > give_up_s:
            raise TrainingServiceError(f"session {name} is {status} after {timeout_s:g} s (start_timeout_s)")
        await asyncio.sleep(delay_s)
        delay_s = min(_STEP_S, 2 * delay_s)


async def describe(control: Caller, name: str) -> Any:
    return (await control.call("describe_training_session", TrainingSessionName=name))["TrainingSessionDetail"]


async def stop(control: Caller, name: str, folder: Path) -> None:
    """Stop a session at a run's end and forget its name. Where it cannot be stopped, that is said and the name stays."""
    try:
        await _stopped(control, name)
    except Exception as e:
        log.error("session %s may still run, which costs: %s. `agentcore-rl train --stop-session %s`", name, e, name)
    else:
        (folder / FILE).unlink(missing_ok=True)


async def stop_left(control: Caller, folder: Path) -> None:
    """Stop the session of a run that did not end by itself. Raises: TrainingServiceError."""
    file = folder / FILE
    if file.is_file():
        name = str(json.loads(file.read_text(encoding="utf-8"))["session"])
        log.warning("an earlier run in %s left session %s: stopping it", folder, name)
        await _stopped(control, name)
        file.unlink()


async def _stopped(control: Caller, name: str) -> str:
    """Ask for the stop until the session no longer bills; its status. Raises: TrainingServiceError, TimeoutError."""
    delay_s = 0.1
    async with asyncio.timeout(STOP_S):
        while True:
            try:
                status = (await describe(control, name))["TrainingSessionStatus"]
            except TrainingServiceError as e:
                if e.code != UNKNOWN:
                    raise
                return "unknown to SageMaker"
            if status not in LIVE:
                return str(status)
            try:
                await control.call("stop_training_session", TrainingSessionName=name)
            except TrainingServiceError as e:
                if e.code not in (INVALID, UNKNOWN):  # one that starts cannot be stopped in every state
                    raise
            await asyncio.sleep(delay_s)
            delay_s = min(_STEP_S, 2 * delay_s)


async def stop_named(name: str) -> str:
    """Stop the session of this name; its status then. Raises: ConfigError where there is none; TrainingServiceError."""
    control = Caller(client_of(CONTROL))
    try:
        await describe(control, name)
        return await _stopped(control, name)
    except TrainingServiceError as e:
        if e.code == UNKNOWN:
            raise ConfigError(f"there is no training session {name!r} in this account and region") from e
        raise
    finally:
        control.close()
