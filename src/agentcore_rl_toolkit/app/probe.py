"""The probe: a session reports what it can reach, in the reply to one invoke of `agentcore-rl doctor --aws`.

A probe gives its caller nothing that a rollout does not give: every caller of the agent may name gateway and store. A row of a
data set cannot start a probe: the payload has `_probe` and `_rollout` and nothing else, and the block has the doctor's experiment
and a proof key, which only the client writes. The report has the names of the served models and nothing else that the session
read; redirects are not followed. ``AGENTCORE_RL_PROBE=0`` turns it off.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from ..contract import PROBE_EXPERIMENT, PROBE_FIELD, PROBED, ROLLOUT_FIELD, RolloutConfig, result_key
from ..errors import AgentCoreRLError, ContractError, StorePermissionError
from ..store import ObjectStore, url_matches
from .settings import PREFIX, AgentSettings

STORE_S, GATEWAY_S = 10.0, 10.0
MAX_REPLY_BYTES, MAX_MODELS, MAX_TEXT = 2**20, 20, 300


async def answer(
    payload: Mapping[str, Any],
    session_id: str,
    settings: AgentSettings,
    store_for: Callable[[str], tuple[ObjectStore, bool]],
) -> dict[str, Any]:
    """Answer a probe. Raises: ContractError when the payload is not the doctor's, or probes are turned off."""
    config = _asked_for(payload, settings)
    key = result_key(PROBE_EXPERIMENT, str(config.input_id), session_id)
    store, gateway, jobs = await asyncio.gather(
        _store(store_for(str(config.s3_bucket))[0], key),
        asyncio.to_thread(_gateway, config),
        asyncio.to_thread(_jobs, payload),
    )
    report = {
        "toolkit": version("agentcore-rl-toolkit"),
        "python": platform.python_version(),
        "architecture": platform.machine(),
        "time_s": time.time(),
        "store": store,
        "gateway": gateway,
        "jobs": jobs,
    }
    return {"status": PROBED, "probe": report}


def _asked_for(payload: Mapping[str, Any], settings: AgentSettings) -> RolloutConfig:
    if not settings.probe:
        raise ContractError("this agent answers no probes: AGENTCORE_RL_PROBE=0 is set")
    config = RolloutConfig.from_payload(payload)
    ours = config is not None and config.exp_id == PROBE_EXPERIMENT and config.input_id and config.proof_key
    if config is None or not ours or set(payload) != {PROBE_FIELD, ROLLOUT_FIELD}:
        raise ContractError(
            f"a payload with {PROBE_FIELD!r} is for `agentcore-rl doctor` only; a row of data may not have it"
        )
    if settings.allowed_buckets and not url_matches(str(config.s3_bucket), settings.allowed_buckets):
        raise ContractError(f"this agent may not write to {config.s3_bucket!r} (AGENTCORE_RL_ALLOWED_BUCKETS)")
    if config.base_url is not None and urlsplit(config.base_url).scheme not in ("http", "https"):
        raise ContractError("base_url must begin with http:// or https://")
    settings.check_base_url(config.base_url)
    return config


def _found(ok: bool | None, about: object, **more: Any) -> dict[str, Any]:
    text = next(iter(str(about).splitlines()), "") or type(about).__name__
    return {"ok": ok, "text": text[:MAX_TEXT], **more}


async def _store(store: ObjectStore, key: str) -> dict[str, Any]:
    right = "s3:PutObject"
    try:
        await store.put_async(key, b"{}", timeout_s=STORE_S)
        right = "s3:DeleteObject"
        await store.delete_async(key, timeout_s=STORE_S)
    except StorePermissionError as e:
        return _found(False, e, right=right)
    except (AgentCoreRLError, OSError) as e:
        return _found(False, e)
    return _found(True, key)


def _gateway(config: RolloutConfig) -> dict[str, Any]:
    """Ask the gateway for its models, with the session's key. It calls no model."""
    if config.base_url is None:
        return _found(None, "none given")
    headers = {"authorization": f"Bearer {config.api_key or ''}"}
    request = urllib.request.Request(f"{config.base_url.rstrip('/')}/models", headers=headers)
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=GATEWAY_S) as reply:
            listed = json.loads(reply.read(MAX_REPLY_BYTES))["data"]
            models = [str(model["id"])[:100] for model in listed[:MAX_MODELS]]
    except urllib.error.HTTPError as e:
        with e:
            return _found(False, f"status {e.code}", reached=True, status=e.code)
    except (ValueError, KeyError, TypeError):
        return _found(False, "the server at this address is not a gateway", reached=True)
    except OSError as e:
        return _found(False, getattr(e, "reason", e), reached=False)
    return _found(True, "reached, and the key is accepted", reached=True, models=models)


def _jobs(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Ask SageMaker about a job that does not exist: its reply shows if an agent of SageMaker's jobs may report to them."""
    from .sagemaker.job import job_rollout
    from .sagemaker.runtime import JobCallError, JobRuntime

    given = payload[PROBE_FIELD].get("job_arn") if isinstance(payload[PROBE_FIELD], Mapping) else None
    job = job_rollout({"prompt": "", "metadata": {"jobArn": given, "rolloutId": PROBE_EXPERIMENT}})
    if job is None or not any(name.startswith(f"{PREFIX}SAGEMAKER_") for name in os.environ):
        return _found(None, "not asked")
    try:
        JobRuntime(job).call("complete_rollout", TrajectoryId=job.trajectory_id, Status="failed")
    except JobCallError as e:
        return _found(e.status in (400, 404), e)
    except AgentCoreRLError as e:
        return _found(False, e)
    return _found(True, "answered")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None
