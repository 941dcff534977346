"""Clients, and model gateways unless they already run, for the rollouts of a trainer's process.

A gateway is a child process of the trainer's and ends with it (`--parent-pid`), also when the trainer is killed. A gateway
that ends by itself is started again at the same address.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import socket
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import Field

from .._servers.host_check import is_loopback
from ..client.data import payload_id
from ..contract import Outcome, new_session_id
from ..errors import ConfigError, ContractError
from ..gateway.client.client import gateway_urls, public_urls
from ._gateway_process import GatewayProcess
from .collection.collect import collect_async
from .collection.groups import CollectedRollout, Group, GroupRequest
from .collection.judge import lost
from .collection.recording import Recording, open_recording
from .collection.sessions import Places
from .collection.settings import RolloutSettings
from .collection.teacher import teacher_at
from .settings import Count, NotNegative, Port, SettingsGroup

if TYPE_CHECKING:
    from ..client import RolloutClient
    from ..gateway import GatewayClient


class AgentSettings(SettingsGroup):
    """The agent, its records, and the run. ``model_id`` is the name under which agents ask for the model.

    ``record_dir`` is the folder that keeps the rollouts for `agentcore-rl view`. None keeps none.
    """

    agent_runtime_arn: str
    s3_bucket: str
    exp_id: str
    model_id: str | None = "policy"
    endpoint_url: str | None = None
    record_dir: str | None = None


class GatewaySettings(SettingsGroup):
    """The gateways: those that run already (``gateway_url``), or those that we start.

    ``gateway_host`` is where ours listen. Agents on AWS must reach it, so it is not loopback by default. Beyond loopback,
    a gateway needs keys. ``gateways`` of them are started, on ``gateway_port`` and the ports after it, and sessions are spread
    over them; a gateway uses one core. ``gateway_public_url`` is the agents' address of the gateway; None takes this machine's
    address. Several URLs are a list, or one text with commas between; the public ones have the same order. ``gateway_store`` is a
    folder for captured turns, None a temporary one. ``gateway_model`` is a folder with tokenizer and chat template, of a model
    with a window of ``gateway_context_tokens``: ours then render prompts and speak token ids to the engine. Rollouts
    wait up to ``gateway_patience_s`` for a gateway that cannot be reached.
    """

    gateway_url: str | tuple[str, ...] | None = None
    gateway_public_url: str | tuple[str, ...] | None = None
    gateway_admin_key: str | None = Field(default=None, repr=False)
    gateway_host: str = "0.0.0.0"
    gateway_port: Port = 0
    gateways: Count = 1
    gateway_store: str | None = None
    gateway_model: str | None = None
    gateway_context_tokens: Count | None = None
    gateway_patience_s: NotNegative = 120.0

    def public_urls(self, urls: Sequence[str]) -> tuple[str, ...]:
        """Return the agents' URLs of the gateways, given the URLs on which they listen. Raises: ConfigError."""
        if self.gateway_public_url:
            return public_urls(urls, self.gateway_public_url)
        if is_loopback(self.gateway_host):
            return tuple(urls)
        return tuple(f"http://{own_address()}:{url.rstrip('/').rsplit(':', 1)[1]}" for url in urls)


class ServiceSettings(RolloutSettings):
    """The settings that all trainers share. With a teacher (`Credit`), ``gateway_model`` is needed."""

    agent: AgentSettings
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)


@dataclass(eq=False)
class _Shared:
    """A group whose rollouts are requested one by one. ``left`` are not requested yet, ``waiting`` are."""

    task: asyncio.Future[Group]
    left: int
    waiting: int = 0


class RolloutService:
    """The clients of one process, and the gateways that it started. All its rollouts share `max_concurrent` places."""

    def __init__(
        self,
        settings: ServiceSettings,
        client: RolloutClient,
        gateway: GatewayClient,
        children: Sequence[GatewayProcess] = (),
    ) -> None:
        self.settings, self.client, self.gateway, self._children = settings, client, gateway, children
        self.places = Places(settings.max_concurrent)
        self.recording: Recording | None = None
        if settings.record_dir is not None:
            folder = Path(settings.record_dir)
            self.recording = open_recording(folder, settings.shown(), tokenizer=settings.gateway_model)
        self._count = 0
        self._begun = False
        self._shared: dict[Hashable, _Shared] = {}
        self._owned = ExitStack()  # closes what `open` made

    @classmethod
    def open(
        cls,
        settings: ServiceSettings,
        upstreams: Callable[[], Sequence[str]],
        engine: str,
        *,
        upstream_key: str | None = None,
    ) -> RolloutService:
        """Open the clients. Without `gateway_url`, start `gateways` in front of `upstreams()`, which is called only then.

        `upstream_key` is the engines' key.
        Raises: GatewayError when the gateway does not start in time; the message holds the end of its log. ConfigError where the
        teacher cannot teach this model.
        """
        if settings.teacher_url is not None:
            teacher_at(settings.teacher_url).check(settings.gateway_model)
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
        with ExitStack() as stack:
            children: list[GatewayProcess] = []
            if settings.gateway_url is not None:
                public = settings.gateway_public_url or settings.gateway_url
                gateway = GatewayClient(settings.gateway_url, admin_key=settings.gateway_admin_key, public_url=public)
            else:
                keys = {"ADMIN": settings.gateway_admin_key or secrets.token_urlsafe(24)}
                keys |= {} if upstream_key is None else {"UPSTREAM": upstream_key}
                for number in range(settings.gateways):
                    children.append(_start(settings, number, engine, upstreams(), keys))
                    stack.callback(children[-1].close)
                urls = [child.url for child in children]
                gateway = GatewayClient(urls, admin_key=keys["ADMIN"], public_url=settings.gateway.public_urls(urls))
            stack.callback(client.close)  # the first to be closed; the gateway's client keeps nothing open
            made = cls(settings, client, gateway, children)
            made._owned = stack.pop_all()
        atexit.register(made.close)
        return made

    async def roll(
        self,
        payload: Mapping[str, Any],
        params: Mapping[str, Any] | None = None,
        *,
        phase: str = "train",
        step: int | None = None,
        group: Hashable = None,
        n: int = 1,
    ) -> CollectedRollout:
        """Run one rollout of one payload. A payload that cannot be sent ends as `invalid`, like any failed rollout.

        With ``group`` it is one of that group's ``n`` rollouts, which its first call starts: a judge reads whole groups.
        """
        self._count += 1
        serial = f"{os.getpid()}-{self._count:07d}"
        try:
            name = payload_id(payload)
            request = GroupRequest(
                input_id=f"{name}-{serial}", payload=payload, n=n, sampling_params=params, group=name
            )
        except (ConfigError, ContractError) as e:
            unsent = CollectedRollout(session_id=new_session_id(), input_id=serial, index=0, outcome=Outcome.INVALID)
            return replace(lost(unsent, e), outcome=Outcome.INVALID)  # agent and policy never saw it
        if group is None:
            return (await self.group(request, phase=phase, step=step)).chosen(1)[0]
        if group not in self._shared:
            self._shared[group] = _Shared(asyncio.ensure_future(self.group(request, phase=phase, step=step)), left=n)
        shared = self._shared[group]
        shared.left, shared.waiting = shared.left - 1, shared.waiting + 1
        place = shared.left
        try:
            return (await asyncio.shield(shared.task)).chosen(n)[place]
        finally:
            shared.waiting -= 1
            if not shared.waiting and not (shared.left and shared.task.done()):  # the last one, or the trainer aborts
                del self._shared[group]
                shared.task.cancel()

    async def group(
        self,
        request: GroupRequest,
        *,
        weight_version: int | None = None,
        phase: str = "train",
        step: int | None = None,
    ) -> Group:
        """Collect the rollouts of one input. ``phase`` and ``step`` are their place in a run's folder."""
        (group,) = await collect_async(
            [request],
            client=self.client,
            gateway=self.gateway,
            config=self.settings.collect_config().replace(evaluation=phase != "train"),
            weight_version=weight_version,
            places=self.places,
            recording=self.recording.at(phase, step) if self.recording is not None else None,
        )
        if self.recording is not None and group.judge_usage:
            self.recording.run.event("judged", {"phase": phase, "step": step, **group.judge_usage})
        return group

    def begins(self, step: int, *, evaluations_from: int) -> None:
        """Begin with the first step that this process trains. Later calls do nothing.

        Delete from the run's folder what an earlier process left of this and later steps, and of the evaluations from
        ``evaluations_from`` on.
        """
        if self.recording is not None and not self._begun:
            self.recording.forget(from_step=step, evaluations_from=evaluations_from)
        self._begun = True

    def close(self) -> None:
        """Close the clients and stop the gateways that `open` made. Others are not touched."""
        if self.recording is not None:
            self.recording.run.close()
        self._owned.close()


def _start(
    settings: ServiceSettings, number: int, engine: str, upstreams: Sequence[str], keys: Mapping[str, str]
) -> GatewayProcess:
    """Start one of the gateways: its port and store are its own. Raises: GatewayError."""
    words = ["--engine", engine, *(word for url in upstreams for word in ("--upstream", url))]
    words += ["--model-id", settings.model_id] if settings.model_id else []  # agents as they are name another model
    if settings.gateway_model:
        words += ["--model", settings.gateway_model]
        window = settings.gateway_context_tokens
        words += ["--set", f"context_tokens={window}"] if window else []
    for url in gateway_urls(settings.gateway_public_url) if settings.gateway_public_url else ():
        words += ["--allowed-host", urlsplit(url).hostname or "*"]
    store = settings.gateway_store
    if store is not None and settings.gateways > 1:
        store = os.path.join(store, f"gateway-{number}")
    port = settings.gateway_port and settings.gateway_port + number
    environment = {f"AGENTCORE_RL_GATEWAY_{name}_KEY": key for name, key in keys.items()}
    return GatewayProcess(words, host=settings.gateway_host, port=port, store=store, environment=environment)


def own_address() -> str:
    """Return the address that this machine uses towards others. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737): never routed
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())
