"""slime's `--custom-generate-function-path`: one sample, rolled out by a remote agent.

slime keeps its scheduling, groups, filters, evaluation and aborts; this function fills one sample. The first call in
a process opens the clients and, unless `gateway_url` names a running one, starts a model gateway in front of slime's
SGLang router. That gateway is a child of this process and ends with it.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError, GatewayError
from ..collect import Client, CollectConfig, CollectedRollout, Gateway, GroupRequest, collect_async
from ..data import payload_id
from .convert import NOTE, to_slime
from .settings import SlimeSettings

GATEWAY_START_S = 120.0
ABORT_LOOK_S = 0.5  # how often a running rollout looks whether slime aborts the step

# SGLang's names of sampling parameters -> OpenAI's. What is not listed means nothing to an OpenAI client.
_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "sampling_seed": "seed",
}


class SlimeRollouts:
    """The clients of one process. Made on the first rollout; `close` stops the gateway it started."""

    def __init__(self, settings: SlimeSettings, client: Client, gateway: Gateway, process: Any = None) -> None:
        self.settings, self.client, self.gateway, self.process = settings, client, gateway, process
        self.count = 0

    @classmethod
    def open(cls, settings: SlimeSettings, router_url: str) -> SlimeRollouts:
        """Raises: GatewayError when the gateway does not start in time; the message holds the end of its log."""
        from ...client import RolloutClient
        from ...gateway import GatewayClient

        client = RolloutClient(
            settings.agent_runtime_arn,
            settings.s3_bucket,
            settings.exp_id,
            tps_limit=settings.acr_tps_limit,
            max_pool_connections=settings.max_pool_connections,
            model_id=settings.model_id,
            endpoint_url=settings.endpoint_url,
        )
        if settings.gateway_url is not None:
            public = settings.gateway_public_url or settings.gateway_url
            gateway = GatewayClient(settings.gateway_url, admin_key=settings.gateway_admin_key, public_url=public)
            return cls(settings, client, gateway)
        admin_key = settings.gateway_admin_key or secrets.token_urlsafe(24)
        process, url = _start_gateway(settings, router_url, admin_key)
        made = cls(
            settings, client, GatewayClient(url, admin_key=admin_key, public_url=settings.public_url(url)), process
        )
        atexit.register(made.close)
        return made

    async def roll(self, payload: Mapping[str, Any], params: Mapping[str, Any]) -> CollectedRollout:
        """One rollout of one payload."""
        self.count += 1
        request = GroupRequest(
            input_id=f"{payload_id(payload)}-{os.getpid()}-{self.count:07d}", payload=payload, sampling_params=params
        )
        config = CollectConfig(
            rollout_timeout_s=self.settings.acr_timeout,
            model_id=self.settings.model_id,
            max_turns=self.settings.max_turns,
        )
        (group,) = await collect_async([request], client=self.client, gateway=self.gateway, config=config)
        return group.rollouts[0]

    def close(self) -> None:
        """Stop the gateway this object started; a gateway that was already there is left alone."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_lock = threading.Lock()
_opened: SlimeRollouts | None = None


def rollouts(args: Any) -> SlimeRollouts:
    """This process's rollouts. slime loads `generate` by name and gives it no place for state, hence the module's own."""
    global _opened
    with _lock:
        if _opened is None:
            _opened = SlimeRollouts.open(SlimeSettings.from_args(args), router_url(args))
        return _opened


def use(made: SlimeRollouts | None) -> None:
    """Replace this process's rollouts: another gateway or client, or a replay. None starts over."""
    global _opened
    with _lock:
        _opened = made


def router_url(args: Any) -> str:
    """slime's SGLang router. Raises: ConfigError before slime has started it."""
    ip, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    if not ip or not port:
        raise ConfigError("slime has no SGLang router address yet (sglang_router_ip, sglang_router_port)")
    host = f"[{ip}]" if ":" in str(ip) and not str(ip).startswith("[") else ip
    return f"http://{host}:{port}"


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """slime's entry: fill `sample`, or return several for a forked episode.

    Never raises for a failed rollout: it returns a removed sample that says why in its metadata. When slime aborts
    the step, the rollout is stopped and its sample comes back ABORTED and empty, to be run again.
    """
    payload = payload_of(sample)
    running = await asyncio.to_thread(rollouts, args)
    task = asyncio.ensure_future(running.roll(payload, openai_params(sampling_params)))
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=ABORT_LOOK_S)
            if not task.done() and not evaluation and _aborted(args):
                return await _abort(task, sample)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    made = to_slime(task.result(), sample, args=args, filler_id=_filler_id(args))
    return made[0] if len(made) == 1 else made


def payload_of(sample: Any) -> dict[str, Any]:
    """The agent's payload: the row's metadata, to which the prompt is added where it has none."""
    metadata = {k: v for k, v in (sample.metadata or {}).items() if k != NOTE}
    return {"prompt": sample.prompt, **metadata}


def openai_params(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's sampling parameters under the names OpenAI clients use; absent and neutral ones are left out."""
    found = {_PARAMETERS[k]: v for k, v in sampling_params.items() if k in _PARAMETERS and v is not None}
    return {k: v for k, v in found.items() if not (k == "top_k" and v == -1)}


async def _abort(task: asyncio.Future[Any], sample: Any) -> Any:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    sample.status = type(sample).Status.ABORTED
    return sample


def _aborted(args: Any) -> bool:
    """Whether slime is aborting the current step; slime keeps that in a singleton which is made once per process."""
    module = sys.modules.get("slime.rollout.sglang_rollout")
    return bool(module is not None and module.GenerateState(args).aborted)


def _filler_id(args: Any) -> int:
    return int(getattr(args, "pad_token_id", None) or 0)


def _start_gateway(settings: SlimeSettings, upstream: str, admin_key: str) -> tuple[subprocess.Popen[bytes], str]:
    folder = Path(tempfile.mkdtemp(prefix="agentcore-rl-gateway-"))
    ready, log_path = folder / "ready.json", folder / "gateway.log"
    command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "gateway", "serve", "--engine", "sglang"]
    command += ["--upstream", upstream, "--host", settings.gateway_host, "--port", str(settings.gateway_port)]
    command += ["--store", settings.gateway_store or str(folder / "turns")]
    command += ["--ready-file", str(ready), "--parent-pid", str(os.getpid())]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "AGENTCORE_RL_GATEWAY_ADMIN_KEY": admin_key},
        )
    give_up_s = time.monotonic() + GATEWAY_START_S
    while not ready.exists():
        ended = process.poll() is not None
        if ended or time.monotonic() > give_up_s:
            process.kill()
            process.wait()
            why = "ended" if ended else f"was not ready after {GATEWAY_START_S:g} s"
            tail = log_path.read_text(errors="replace")[-2000:]
            raise GatewayError(f"the model gateway {why}; its log ({log_path}) ends with:\n{tail}")
        time.sleep(0.05)
    url = str(json.loads(ready.read_text())["url"])
    return process, url.replace("0.0.0.0", "127.0.0.1")
