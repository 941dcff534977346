"""`agentcore-rl serve`: serve a trained model at a plain endpoint, for a developer's own client."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import os
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..._servers.host_check import HostCheck, is_loopback
from ..._servers.process import listen, parent_gone, terminated_as_interrupted, url_of, write_ready
from ...errors import ConfigError
from ..models import Model
from ..options import engine_option, from_environment, with_server

if TYPE_CHECKING:
    from aiohttp import ClientSession, web

KEY_ENV = "AGENTCORE_RL_SERVE_KEY"
MODEL_ROUTES = ("/v1/", "/v1beta/", "/bedrock/")
# Headers that are not passed on: of the connection, of the body's form, and of the client's credentials for this server.
_NOT_PASSED = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "expect", "origin"}
_NOT_RETURNED = {"connection", "keep-alive", "transfer-encoding", "date", "server"}
_CREDENTIALS = {"authorization", "x-api-key", "x-goog-api-key"}


@click.command()
@click.argument("model", type=Model(), metavar="[RUN|MODEL]", required=False)
@engine_option
@with_server
@from_environment("--key", KEY_ENV)
def command(
    model: Path | None,
    engine: str | None,
    host: str,
    port: int,
    allowed_hosts: tuple[str, ...],
    ready_file: Path | None,
    parent_pid: int | None,
    key: str | None,
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
    if key is None and not is_loopback(host):
        raise ConfigError(f"--host {host} can be reached from other machines: export {KEY_ENV}, the key of its clients")
    from ..training.services import READY_DEADLINE_S, Services
    from ..training.stack import QUIET, VLLM_READY_S, Upstream, gateway_words, launch_engine

    engine, admin_key = engine or "policy", secrets.token_urlsafe(24)
    with (
        contextlib.suppress(KeyboardInterrupt),
        terminated_as_interrupted(),
        tempfile.TemporaryDirectory(prefix="agentcore-rl-serve-", ignore_cleanup_errors=True) as folder,
        Services(Path(folder) / "logs", env={**QUIET, "AGENTCORE_RL_GATEWAY_ADMIN_KEY": admin_key}) as services,
    ):
        server = launch_engine(services, model, engine, None)
        services.wait_ready(server, VLLM_READY_S if engine == "vllm" else READY_DEADLINE_S)
        upstream = Upstream(url=server.url, engine=engine)
        gateway = services.launch("gateway", gateway_words(upstream, Path(folder) / "turns", model))
        services.wait_ready(gateway)
        front = Front(gateway.url, admin_key, key=key, hosts=HostCheck((host,), allowed_hosts), name=model_name(model))
        with services.watched():
            asyncio.run(_serve(front, host, port, ready_file, parent_pid))


def model_name(model: Path | None) -> str:
    """Return the name of a model for people: its folder's, and of a run the run's."""
    if model is None:
        return "the built-in policy"
    return model.parent.name if model.name == "policy" else model.name


async def _serve(front: Front, host: str, port: int, ready_file: Path | None, parent_pid: int | None) -> None:
    from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, web

    timeout, connector = ClientTimeout(total=None, sock_connect=10), TCPConnector(limit=0)
    async with ClientSession(
        connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=DummyCookieJar()
    ) as client:
        front.client = client
        runner = web.ServerRunner(web.Server(front.handle, access_log=None, handler_cancellation=True))
        await runner.setup()
        sock = listen(host, port)
        await web.SockSite(runner, sock).start()
        url = url_of(sock)
        if ready_file is not None:
            write_ready(ready_file, {"url": url, "pid": os.getpid()})
        click.echo(f"{front.name} is served at {url}/v1 (Bedrock: {url}/bedrock, Gemini: {url}). Ctrl-C ends it.")
        try:
            await (parent_gone(parent_pid) if parent_pid is not None else asyncio.Event().wait())
        finally:
            await runner.cleanup()


class Front:
    """Takes requests without a session and passes each to the gateway in a new session, which it then deletes.

    ``client`` is set before the first call.
    """

    def __init__(self, gateway_url: str, admin_key: str, *, key: str | None, hosts: HostCheck, name: str) -> None:
        self.name = name
        self.client: ClientSession
        self._gateway, self._admin = gateway_url, {"x-admin-key": admin_key}
        self._key, self._hosts = key, hosts
        self._numbers = itertools.count(1)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. A client that disconnects cancels it, and the model call with it."""
        from aiohttp import ClientError, web

        path = request.raw_path
        if path.startswith("/bedrock/") and not path.startswith("/bedrock/model/"):
            in_path, _, rest = path.removeprefix("/bedrock/").partition("/")
            path = f"/bedrock/{rest}"  # botocore sends its bearer tokens over HTTPS only, so the key is in the path
        else:
            in_path = ""
        status, message = self._refusal(request, path, in_path)
        if status:
            return _error(status, message, "invalid_request_error")
        if path == "/health":
            return web.json_response({"status": "ok", "model": self.name})
        session = f"serve-{next(self._numbers)}"
        try:
            (opened,) = (await self._administer("sessions", session))["sessions"]
            return await self._pass_on(request, f"{self._gateway}/sessions/{session}{path}", opened["api_key"])
        except (ClientError, TimeoutError) as e:
            if request.writer.output_size:
                raise  # a part of the reply was sent, so the connection ends
            return _error(502, f"the model's gateway cannot be reached: {e}", "server_error")
        finally:
            with contextlib.suppress(ClientError, TimeoutError):  # a gateway that has ended has no sessions
                await asyncio.shield(self._administer("delete", session))  # also after the client has disconnected

    def _refusal(self, request: web.BaseRequest, path: str, in_path: str) -> tuple[int, str]:
        """Return status and message of a refused request, or 0. ``in_path`` is a key in its path."""
        given = [request.headers.get(name) for name in ("host", "origin")]
        refusal = self._hosts.refusal(*(None if each is None else each.encode("latin-1", "replace") for each in given))
        if refusal is not None:
            return refusal.status, refusal.message
        shown = {in_path, *(_plain(request.headers.get(name, "")) for name in _CREDENTIALS)}
        if self._key is not None and not any(
            hmac.compare_digest(each.encode("utf-8", "surrogateescape"), self._key.encode()) for each in shown
        ):
            return 401, f"the API key is missing or wrong: it is the server's {KEY_ENV}"
        if path == "/health" or path.startswith(MODEL_ROUTES):
            return 0, ""
        routes = "/v1/chat/completions, /v1/responses, /v1/messages, /v1/models, /v1beta/models/MODEL:generateContent"
        return 404, f"there is no route {path[:100]}; the model's are {routes} and /bedrock/model/MODEL/converse"

    async def _pass_on(self, request: web.BaseRequest, url: str, key: str) -> web.StreamResponse:
        from aiohttp import web
        from yarl import URL

        headers = [(n, v) for n, v in request.headers.items() if n.lower() not in _NOT_PASSED | _CREDENTIALS]
        headers.append(("authorization", f"Bearer {key}"))
        body = request.content if request.body_exists else None  # the gateway bounds its size
        async with self.client.request(request.method, URL(url, encoded=True), data=body, headers=headers) as reply:
            passed = {n: v for n, v in reply.headers.items() if n.lower() not in _NOT_RETURNED}
            response = web.StreamResponse(status=reply.status, headers=passed)
            await response.prepare(request)
            async for chunk in reply.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    async def _administer(self, route: str, session: str) -> Any:
        url, body = f"{self._gateway}/admin/{route}", {"session_ids": [session]}
        async with self.client.post(url, json=body, headers=self._admin) as reply:
            reply.raise_for_status()
            return await reply.json()


def _error(status: int, message: str, kind: str) -> web.Response:
    from aiohttp import web

    return web.json_response({"error": {"message": message, "type": kind}}, status=status)


def _plain(credential: str) -> str:
    """Return the key of a header: that of a bearer, or of a request that is signed for AWS, the access key id."""
    kind, _, rest = credential.partition(" ")
    if kind == "AWS4-HMAC-SHA256":
        return rest.removeprefix("Credential=").partition("/")[0]
    return rest if kind.lower() == "bearer" else credential
