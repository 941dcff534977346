"""Clients and, where none is running yet, a model gateway: what a trainer's process needs to roll out agents.

The gateway is a child process of whoever starts it and ends with it (`--parent-pid`), also when that process is killed.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import GatewayError
from .collect import Client, CollectConfig, CollectedRollout, Gateway, Group, GroupRequest, collect_async
from .data import payload_id

GATEWAY_START_S = 120.0
GATEWAY_STOP_S = 20.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """What rollouts inside a trainer's process need.

    `gateway_host` is where a gateway that we start listens. Agents on AWS must reach it, so it is not loopback by
    default; beyond loopback the gateway asks for keys, and one is made up unless `gateway_admin_key` is given.
    `gateway_public_url` is the gateway as agents see it; None takes this machine's own address. `gateway_url` uses a
    gateway that already runs. `gateway_model` is a folder with tokenizer and chat template: the gateway that we start
    then renders prompts itself and speaks token ids to the engine, `gateway_context_tokens` being the model's window.
    Units: seconds.
    """

    agent_runtime_arn: str
    s3_bucket: str
    exp_id: str
    model_id: str
    rollout_timeout_s: float = 900.0
    tps_limit: int = 25
    max_concurrent: int = 128
    max_pool_connections: int = 100
    endpoint_url: str | None = None
    gateway_host: str = "0.0.0.0"
    gateway_port: int = 0
    gateway_public_url: str | None = None
    gateway_url: str | None = None
    gateway_admin_key: str | None = field(default=None, repr=False)
    gateway_store: str | None = None
    gateway_model: str | None = None
    gateway_context_tokens: int | None = None
    max_turns: int | None = None
    extra_rollouts: int = 0

    def public_url(self, url: str) -> str:
        """The gateway as agents see it, given the URL it listens on."""
        if self.gateway_public_url:
            return self.gateway_public_url.rstrip("/")
        if self.gateway_host in LOOPBACK:
            return url
        return f"http://{own_address()}:{url.rstrip('/').rsplit(':', 1)[1]}"

    def collect_config(self) -> CollectConfig:
        return CollectConfig(
            max_concurrent=self.max_concurrent,
            extra_rollouts=self.extra_rollouts,
            rollout_timeout_s=self.rollout_timeout_s,
            model_id=self.model_id,
            max_turns=self.max_turns,
        )


class RolloutService:
    """The clients of one process, and the gateway it started, if it did."""

    def __init__(self, settings: ServiceSettings, client: Client, gateway: Gateway, process: Any = None) -> None:
        self.settings, self.client, self.gateway, self.process = settings, client, gateway, process
        self._count = 0
        self._opened: list[Any] = []  # what `open` made, and `close` therefore closes

    @classmethod
    def open(
        cls,
        settings: ServiceSettings,
        upstreams: Callable[[], Sequence[str]],
        engine: str,
        *,
        options: Sequence[str] = (),
    ) -> RolloutService:
        """Open the clients; start a gateway in front of `upstreams()` (asked only then) unless `gateway_url` names one.

        `options` are further words of the command line of ``agentcore-rl gateway serve``.
        Raises: GatewayError when the gateway does not start in time; the message holds the end of its log.
        """
        from ..client import RolloutClient
        from ..gateway import GatewayClient

        client = RolloutClient(
            settings.agent_runtime_arn,
            settings.s3_bucket,
            settings.exp_id,
            tps_limit=settings.tps_limit,
            max_pool_connections=settings.max_pool_connections,
            model_id=settings.model_id,
            endpoint_url=settings.endpoint_url,
        )
        if settings.gateway_url is not None:
            public = settings.gateway_public_url or settings.gateway_url
            gateway = GatewayClient(settings.gateway_url, admin_key=settings.gateway_admin_key, public_url=public)
            made = cls(settings, client, gateway)
            made._opened = [client, gateway]
            return made
        admin_key = settings.gateway_admin_key or secrets.token_urlsafe(24)
        process, url = _start_gateway(settings, upstreams(), [*options, "--engine", engine], admin_key)
        gateway = GatewayClient(url, admin_key=admin_key, public_url=settings.public_url(url))
        made = cls(settings, client, gateway, process)
        made._opened = [client, gateway]
        atexit.register(made.close)
        return made

    async def roll(self, payload: Mapping[str, Any], params: Mapping[str, Any] | None = None) -> CollectedRollout:
        """One rollout of one payload."""
        self._count += 1
        input_id = f"{payload_id(payload)}-{os.getpid()}-{self._count:07d}"
        group = await self.group(GroupRequest(input_id=input_id, payload=payload, sampling_params=params))
        return group.rollouts[0]

    async def group(self, request: GroupRequest, *, weight_version: int | None = None) -> Group:
        """All rollouts of one input."""
        (group,) = await collect_async(
            [request],
            client=self.client,
            gateway=self.gateway,
            config=self.settings.collect_config(),
            weight_version=weight_version,
        )
        return group

    def close(self) -> None:
        """Close the clients and stop the gateway that `open` made; what was already there is left alone."""
        while self._opened:
            self._opened.pop(0).close()
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=GATEWAY_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def own_address() -> str:
    """The address this machine would use towards others; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737): never routed to anybody
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def _start_gateway(
    settings: ServiceSettings, upstreams: Sequence[str], options: Sequence[str], admin_key: str
) -> tuple[subprocess.Popen[bytes], str]:
    folder = Path(tempfile.mkdtemp(prefix="agentcore-rl-gateway-"))
    ready, log_path = folder / "ready.json", folder / "gateway.log"
    command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "gateway", "serve", *options]
    for upstream in upstreams:
        command += ["--upstream", upstream]
    command += ["--model", settings.gateway_model] if settings.gateway_model else []
    window = settings.gateway_context_tokens
    command += ["--context-tokens", str(window)] if settings.gateway_model and window else []
    command += ["--host", settings.gateway_host, "--port", str(settings.gateway_port)]
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
    return process, str(json.loads(ready.read_text())["url"]).replace("0.0.0.0", "127.0.0.1")
