"""`agentcore-rl serve`: serve a trained model at a plain endpoint, for a developer's own client."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..._servers.host_check import is_loopback
from ..._servers.process import parent_gone, write_ready
from ...errors import ConfigError
from ..models import Model
from ..options import engine_option, from_environment, with_server

if TYPE_CHECKING:
    from aiohttp import web

    from ...gateway import Gateway, GatewayConfig

KEY_ENV = "AGENTCORE_RL_SERVE_KEY"
MODEL_ROUTES = ("/v1/", "/v1beta/", "/bedrock/")
_ROUTES = (
    "/v1/chat/completions, /v1/responses, /v1/messages, /v1/models, /v1beta/models/MODEL:generateContent and "
    "/bedrock/model/MODEL/converse"
)


@click.command()
@click.argument("model", type=Model(), metavar="[RUN|MODEL]", required=False)
@engine_option
@with_server
@from_environment("--key", KEY_ENV)
def command(
    model: Path | None,
    engine: Any,
    ready_file: Path | None,
    parent_pid: int | None,
    key: str | None,
    **listening: Any,
) -> None:
    """Serve a model to your own clients: chat completions, Responses, Anthropic Messages, Bedrock and Gemini.

    RUN is the folder of a training run; MODEL is a folder, a name on the hub, or a GGUF file. The default is the built-in policy.
    Nothing is recorded, no request needs a session, and the address has no routes for weights or administration.

    An address beyond this machine needs a key: export AGENTCORE_RL_SERVE_KEY, and give it to the clients as their API key.

    \b
    Example:
        agentcore-rl serve runs/quickstart --port 8100
        curl http://127.0.0.1:8100/v1/chat/completions -H 'content-type: application/json' \\
            -d '{"messages": [{"role": "user", "content": "What is 3 + 4?"}]}'
    """
    if key is None and not is_loopback(listening["host"]):
        raise ConfigError(
            f"--host {listening['host']} can be reached from other machines: export {KEY_ENV}, the key of its clients"
        )
    from ...gateway import GatewayConfig, UpstreamConfig
    from ...policy.model import WEIGHTS_DIR
    from ..training.services import READY_DEADLINE_S, Services
    from ..training.stack import QUIET, VLLM_READY_S, launch_engine
    from .vllm import context_of

    engine, folder = engine or "policy", model or WEIGHTS_DIR
    with (
        contextlib.suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory(prefix="agentcore-rl-serve-", ignore_cleanup_errors=True) as logs,
        Services(Path(logs), env=QUIET) as services,
    ):
        server = launch_engine(services, model, engine, None)
        services.wait_ready(server, VLLM_READY_S if engine == "vllm" else READY_DEADLINE_S)
        config = GatewayConfig(
            upstreams=(UpstreamConfig(url=server.url, engine=engine),),
            admin_key=secrets.token_urlsafe(24),
            session_keys=False,
            model_dir=str(folder),
            context_tokens=context_of(folder),
            **listening,
        )
        with services.watched():
            asyncio.run(_serve(config, key, model_name(model), ready_file, parent_pid))


def model_name(model: Path | None) -> str:
    """Return the name of a model for people: its folder's, and of a run the run's."""
    if model is None:
        return "the built-in policy"
    return model.parent.name if model.name == "policy" else model.name


async def _serve(
    config: GatewayConfig, key: str | None, name: str, ready_file: Path | None, parent_pid: int | None
) -> None:
    from ...gateway import Gateway

    gateway = Gateway(config)
    gateway.handle = Front(gateway, key).handle
    await gateway.start()
    url = gateway.url
    if ready_file is not None:
        write_ready(ready_file, {"url": url, "pid": os.getpid()})
    click.echo(f"{name} is served at {url}/v1 (Bedrock: {url}/bedrock, Gemini: {url}). Ctrl-C ends it.")
    try:
        await (parent_gone(parent_pid) if parent_pid is not None else asyncio.Event().wait())
    finally:
        await gateway.stop(grace_s=1.0)


class Front:
    """Takes the requests of a gateway that are without a session. Each gets a new session, which is then deleted.

    Only models are served, and only with the ``key``, if there is one. The gateway is without session keys.
    """

    def __init__(self, gateway: Gateway, key: str | None) -> None:
        self._handle, self._delete = gateway.handle, gateway.admin.delete_sessions
        self._key = None if key is None else key.encode()
        self._numbers = itertools.count(1)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. A client that disconnects cancels it, and the model call with it."""
        from yarl import URL

        from ...gateway.dispatch import shows_key
        from ...gateway.http.responses import error_response
        from ...messages.errors import RequestError

        path, key_in_path = request.raw_path, ""
        if path.startswith("/bedrock/") and not path.startswith("/bedrock/model/"):
            key_in_path, _, rest = path.removeprefix("/bedrock/").partition("/")
            path = f"/bedrock/{rest}"  # botocore sends its bearer tokens over HTTPS only, so the key is in the path
        if self._key is not None and not shows_key(request.headers, self._key, key_in_path):
            why = f"the API key is missing or wrong: it is the server's {KEY_ENV}"
            return error_response("chat", RequestError(why, kind="authentication"))
        if not path.startswith(MODEL_ROUTES):
            why = f"there is no route {path[:100]}; the model's are {_ROUTES}"
            return error_response("chat", RequestError(why, kind="not_found"))
        session = f"serve-{next(self._numbers)}"
        try:
            return await self._handle(request.clone(rel_url=URL(f"/sessions/{session}{path}", encoded=True)))
        finally:
            await asyncio.shield(self._delete([session]))  # also after the client has disconnected
