"""The life of a training session. It costs money from its start to its stop, so its name is stored before it is created.

``sessions.json`` in the run's folder has each session of the run with its billed tokens, null until its stop is confirmed. A run
that finds such a session stops it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._servers.process import write_private
from ...errors import ConfigError, TrainingServiceError
from ...gateway.sampling_services.sagemaker import CONTROL, INVALID, Caller, client_of
from .settings import SageMakerConfig

log = logging.getLogger(__name__)

FILE = "sessions.json"
LIVE = ("Created", "Scheduled", "Running", "Blocked")  # sessions in these states cost money, or will
REGIONS = ("us-east-1", "us-west-2", "ap-south-1")  # regions with training sessions. Source: `sagemaker-train` 1.27.0
STOP_S = 300.0
UNKNOWN = "ResourceNotFound"
_STEP_S = 10.0


async def start(control: Caller, config: SageMakerConfig) -> str:
    """Return the name of a new session that runs. Stop the session of an earlier run first. Raises: TrainingServiceError."""
    await stop_left(control, config.output_dir)
    name = f"{re.sub('[^A-Za-z0-9]+', '-', config.exp_id)[:50].strip('-') or 'run'}-{secrets.token_hex(4)}"
    _keep(config.output_dir, name, None)
    model = {"BaseModelArn": config.base_model} | ({"AcceptEula": True} if config.accept_eula else {})
    group = config.model_package_group_arn
    try:
        # The name is random, so a session of this name belongs to a request whose answer was lost.
        await control.create(
            "create_training_session",
            TrainingSessionName=name,
            LoraConfig={"Rank": config.session.rank, "Alpha": config.session.alpha},
            RoleArn=config.session.role_arn,
            ModelConfig=model,
            OutputConfig={"S3Location": {"Path": config.output_s3}},
            **({} if group is None else {"ModelPackageGroupArn": group}),
        )
        await _running(control, name, config.start_timeout_s)
    except BaseException:
        await stop(control, name, config.output_dir)
        raise
    return name


async def _running(control: Caller, name: str, timeout_s: float) -> None:
    give_up_s, delay_s = time.monotonic() + timeout_s, 0.1
    while (detail := await describe(control, name))["TrainingSessionStatus"] != "Running":
        status = detail["TrainingSessionStatus"]
        if status not in ("Created", "Scheduled"):
            why = detail.get("ErrorDetails", "SageMaker gives no reason")
            raise TrainingServiceError(f"session {name} is {status} and did not start: {why}", code=status)
        if time.monotonic() > give_up_s:
            raise TrainingServiceError(f"session {name} is {status} after {timeout_s:g} s (start_timeout_s)")
        await asyncio.sleep(delay_s)
        delay_s = min(_STEP_S, 2 * delay_s)


async def describe(control: Caller, name: str) -> Any:
    return (await control.call("describe_training_session", TrainingSessionName=name))["TrainingSessionDetail"]


def billed(detail: Mapping[str, Any]) -> dict[str, int]:
    """Return the billed tokens in a session's description, by kind: prefill, sample, training."""
    counts = detail.get("BillableTokenUsage", {})
    return {name.removesuffix("TokenCount").lower(): count for name, count in counts.items()}


def billed_before(folder: Path) -> Counter[str]:
    """Sum the tokens of the run's sessions that have ended."""
    return sum((Counter(tokens) for tokens in _kept(folder).values() if tokens), Counter())


def _kept(folder: Path) -> dict[str, dict[str, int] | None]:
    file = folder / FILE
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _keep(folder: Path, name: str, tokens: dict[str, int] | None) -> None:
    write_private(folder / FILE, json.dumps({**_kept(folder), name: tokens}))


async def stop(control: Caller, name: str, folder: Path) -> None:
    """Stop a session at a run's end and store its billed tokens. If this fails, log it: the next run stops the session."""
    try:
        detail = await _stopped(control, name)
    except Exception as e:
        log.error(
            "session %s may still run and cost money: %s. Stop it with `agentcore-rl train --stop-session %s`",
            name,
            e,
            name,
        )
    else:
        _keep(folder, name, billed(detail))


async def stop_left(control: Caller, folder: Path) -> None:
    """Stop the sessions of a run that did not end by itself. Raises: TrainingServiceError."""
    for name in [name for name, tokens in _kept(folder).items() if tokens is None]:
        log.warning("an earlier run in %s left session %s: stopping it", folder, name)
        _keep(folder, name, billed(await _stopped(control, name)))


async def _stopped(control: Caller, name: str) -> Mapping[str, Any]:
    """Ask for the stop until the session costs nothing, and return its description, empty if it does not exist.

    Raises: TrainingServiceError, TimeoutError.
    """
    delay_s = 0.1
    async with asyncio.timeout(STOP_S):
        while True:
            try:
                detail: Mapping[str, Any] = await describe(control, name)
                if detail["TrainingSessionStatus"] not in LIVE:
                    return detail
                await control.call("stop_training_session", TrainingSessionName=name)
            except TrainingServiceError as e:
                if e.code == UNKNOWN:
                    return {}
                if e.code != INVALID:  # a starting session cannot be stopped in some states
                    raise
            await asyncio.sleep(delay_s)
            delay_s = min(_STEP_S, 2 * delay_s)


async def stop_named(name: str) -> str:
    """Stop the session of this name in the region that has it, and return its status.

    Raises: ConfigError if no region has it; TrainingServiceError.
    """
    problem: Exception = ConfigError(f"there is no training session {name!r} in this account in {', '.join(REGIONS)}")
    for region in REGIONS:
        control = Caller(client_of(CONTROL, region))
        try:
            await describe(control, name)
            return str((await _stopped(control, name)).get("TrainingSessionStatus", "gone"))
        except TrainingServiceError as e:
            problem = problem if e.code == UNKNOWN else e
        finally:
            control.close()
    raise problem
