"""Clients and, where none is running yet, a model gateway: what a trainer's process needs to roll out agents.

The gateway is a child process of whoever starts it and ends with it (`--parent-pid`), also when that process is killed. One
that ends by itself is started again where it was.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from ..contract import Cause, Outcome, new_session_id
from ..errors import ConfigError, ContractError
from ._gateway_process import GatewayProcess
from .collection.collect import Client, CollectConfig, CollectedRollout, Gateway, Group, GroupRequest, collect_async
from .collection.groups import PolicyFailures
from .collection.places import Places
from .data import payload_id

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Where agents, records and the gateway are: the settings whose names and meanings all trainers share.

    `gateway_host` is where a gateway that we start listens. Agents on AWS must reach it, so it is not loopback by
    default. `gateway_public_url` is the gateway as agents see it; None takes this machine's own address. `gateway_url` uses a
    gateway that already runs. `gateway_store` is a folder for captured turns, None a temporary one. `gateway_model` is a
    folder with tokenizer and chat template: the gateway that we start then renders prompts itself and speaks token ids to
    the engine. `policy_failures` is `CollectConfig`'s: "score" trains rollouts whose policy failed with the reward that their
    agent declares, "mask" leaves them out.
    """

    agent_runtime_arn: str
    s3_bucket: str
    endpoint_url: str | None = None
    gateway_host: str = "0.0.0.0"
    gateway_port: int = 0
    gateway_public_url: str | None = None
    gateway_url: str | None = None
    gateway_store: str | None = None
    gateway_model: str | None = None
    max_turns: int | None = None
    policy_failures: PolicyFailures = "score"

    def service_settings(self, **others: Any) -> ServiceSettings:
        """These settings and ``others``, which go by other names here, under the names of `ServiceSettings`."""
        shared = {f.name: getattr(self, f.name) for f in fields(RolloutSettings)}
        return ServiceSettings(**{**shared, **others})


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(RolloutSettings):
    """What rollouts inside a trainer's process need.

    Beyond loopback the gateway asks for keys, and one is made up unless `gateway_admin_key` is given.
    `gateway_context_tokens` is the window of the model in `gateway_model`.
    Units: seconds.
    """

    exp_id: str
    model_id: str
    rollout_timeout_s: float = 900.0
    submit_timeout_s: float = 120.0
    tps_limit: int = 25
    max_concurrent: int = 128
    max_pool_connections: int = 100
    gateway_admin_key: str | None = field(default=None, repr=False)
    gateway_patience_s: float = 120.0
    gateway_context_tokens: int | None = None
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
            submit_timeout_s=self.submit_timeout_s,
            rollout_timeout_s=self.rollout_timeout_s,
            gateway_patience_s=self.gateway_patience_s,
            model_id=self.model_id,
            max_turns=self.max_turns,
            policy_failures=self.policy_failures,
        )


class RolloutService:
    """The clients of one process, and the gateway it started, if it did. All its rollouts share `max_concurrent` places."""

    def __init__(
        self, settings: ServiceSettings, client: Client, gateway: Gateway, child: GatewayProcess | None = None
    ) -> None:
        self.settings, self.client, self.gateway, self._child = settings, client, gateway, child
        self.places = Places(settings.max_concurrent)
        self._count = 0
        self._opened: list[Any] = []  # what `open` made, and `close` therefore closes

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The gateway's process, as it runs now."""
        return self._child.process if self._child is not None else None

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
        from ._announcing import AnnouncingClient

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
        words = [*options, "--engine", engine]
        for upstream in upstreams():
            words += ["--upstream", upstream]
        words += ["--model", settings.gateway_model] if settings.gateway_model else []
        window = settings.gateway_context_tokens
        words += ["--context-tokens", str(window)] if settings.gateway_model and window else []
        if settings.gateway_public_url:
            words += ["--allowed-host", urlsplit(settings.gateway_public_url).hostname or "*"]
        child = GatewayProcess(
            words,
            host=settings.gateway_host,
            port=settings.gateway_port,
            store=settings.gateway_store,
            admin_key=admin_key,
        )
        ours = AnnouncingClient(child.url, admin_key=admin_key, public_url=settings.public_url(child.url))
        child.restarted = ours.announce_again
        made = cls(settings, client, ours, child)
        made._opened = [client, ours]
        atexit.register(made.close)
        return made

    async def roll(self, payload: Mapping[str, Any], params: Mapping[str, Any] | None = None) -> CollectedRollout:
        """One rollout of one payload. A payload that no agent could be sent ends as `invalid`, like any failed rollout."""
        self._count += 1
        serial = f"{os.getpid()}-{self._count:07d}"
        try:
            request = GroupRequest(input_id=f"{payload_id(payload)}-{serial}", payload=payload, sampling_params=params)
        except (ConfigError, ContractError) as e:
            return CollectedRollout(
                session_id=new_session_id(),
                input_id=serial,
                index=0,
                outcome=Outcome.INVALID,
                cause=Cause.INFRASTRUCTURE,  # the row's, which agent and policy never saw
                error=e,
                mask_reason="outcome",
            )
        return (await self.group(request)).rollouts[0]

    async def group(self, request: GroupRequest, *, weight_version: int | None = None) -> Group:
        """All rollouts of one input."""
        (group,) = await collect_async(
            [request],
            client=self.client,
            gateway=self.gateway,
            config=self.settings.collect_config(),
            weight_version=weight_version,
            places=self.places,
        )
        return group

    def close(self) -> None:
        """Close the clients and stop the gateway that `open` made; what was already there is left alone."""
        while self._opened:
            self._opened.pop(0).close()
        if self._child is not None:
            self._child.close()


def own_address() -> str:
    """The address this machine would use towards others; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737): never routed to anybody
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())
