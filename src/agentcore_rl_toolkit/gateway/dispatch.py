"""The requests of agents: model calls and the few other routes of a session. All others are administration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from urllib.parse import unquote, unquote_to_bytes

import msgspec
from aiohttp import HttpVersion11, web

from .._servers.host_check import HostCheck, is_loopback
from ..contract import check_tag
from ..errors import ConfigError, ContractError
from ..messages.errors import RequestError
from ..messages.wire import passthrough
from .admin.answers import respond
from .admin.routes import Admin
from .call import Call, RecordedCall, answer
from .capture.record import TAG
from .config import GatewayConfig
from .context import Context
from .engine import Engine
from .http.connection import read_body
from .http.messages import Request, error_response
from .record import Recorder
from .retries import recorded_reply, running_call
from .sessions.session import Session
from .sessions.settings import SessionSettings
from .wire.bodies import LARGE_BYTES, BodyParser
from .wire.request import CallRequest, read_large_request, read_request
from .writers import writer_of

log = logging.getLogger(__name__)

_CALLS = {b"chat/completions": "chat", b"responses": "responses", b"messages": "anthropic"}
MakeEngine = Callable[[Session, CallRequest], Engine]


class Dispatch:
    """The handler of a gateway's requests. ``relayed``: the servers take chats, and get an agent's messages as they are."""

    def __init__(
        self, config: GatewayConfig, context: Context, admin: Admin, make_engine: MakeEngine, *, relayed: bool
    ) -> None:
        self._config = config
        self._context = context
        self._sessions = context.sessions
        self._counters = context.counters
        self._admin = admin
        self._make_engine = make_engine
        self._relayed = relayed
        self._bodies = BodyParser()
        self._hosts = HostCheck((config.host,), config.allowed_hosts)
        self._admin_key = config.admin_key.encode() if config.admin_key is not None else None

    async def close(self) -> None:
        await self._bodies.close()

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer a request. Its body is read after its key was checked, so that strangers cannot send much."""
        raw, _, query = http.raw_path.encode("utf-8", "surrogateescape").partition(b"?")
        request = Request(http.method.encode(), raw, query, http.headers)
        dialect = "anthropic" if b"/v1/messages" in raw else "chat"
        try:
            self._check_host(http)
            if http.method == "HEAD":
                return _head(raw)
            if http.method == "CONNECT":
                response = error_response(dialect, RequestError("this server is no proxy", kind="method_not_allowed"))
                response.force_close()
                return response
            encoding = http.headers.get("content-encoding", "identity")
            if encoding.lower() != "identity":
                why = "send the request body as it is: this server takes no content-encoding"
                raise RequestError(why, status=415)
            name, slash, rest = raw[10:].partition(b"/v1/")
            if slash and raw.startswith(b"/sessions/"):
                return await self._agent(http, request, name, rest)
            known = self._is_admin(request)
            if known:
                request.body = await read_body(http, self._config.limits)
            return await self._admin.respond(http, request, known=known)
        except RequestError as e:
            return error_response(dialect, e)

    def _check_host(self, http: web.BaseRequest) -> None:
        """Raises: RequestError for another server's name, and for web pages."""
        host, origin = http.headers.get("host"), http.headers.get("origin")
        refusal = self._hosts.refusal(
            None if host is None else host.encode("latin-1", "replace"),
            None if origin is None else origin.encode("latin-1", "replace"),
        )
        if refusal is not None:
            raise RequestError(refusal.message, kind="permission", status=refusal.status)

    def _is_admin(self, request: Request) -> bool:
        if self._admin_key is None:
            return is_loopback(self._config.host)
        return request.shows_admin(self._admin_key)

    # -- agents

    async def _agent(self, http: web.BaseRequest, request: Request, name: bytes, rest: bytes) -> web.StreamResponse:
        tag = request.headers.get("x-agentcore-rl-tag")
        if rest.startswith(b"tag/"):
            path_tag, _, rest = rest[4:].partition(b"/")
            tag = path_tag.decode("utf-8", "replace")
            rest = rest.removeprefix(b"v1/")  # Anthropic's clients put it behind any base URL
        if rest not in _CALLS:
            rest = rest.rstrip(b"/")
        dialect = _CALLS.get(rest, "anthropic" if rest.startswith((b"messages", b"v1/messages")) else "chat")
        try:
            session = self._session(name, request)
            if rest not in _CALLS:
                return await self._other_route(http, request, session, rest)
            if request.method != b"POST":
                raise RequestError("use POST", kind="method_not_allowed")
            if tag is not None:
                tag = _checked(tag)
            request.body = await read_body(http, self._config.limits)
            if session.closed:
                raise _closed(session)
        except RequestError as e:
            self._counters["refused"] += 1
            headers = {"allow": "POST"} if e.kind == "method_not_allowed" else None
            return error_response(dialect, e, headers)
        self._counters["calls"] += 1
        wanted = CallRequest(dialect)
        try:
            wanted = await self._read(request, session, dialect, tag)
            if session.closed:
                raise _closed(session)
            call = self._find_or_start(wanted, session, tag, chunks=http.version >= HttpVersion11)
        except RequestError as e:
            return self._refused(session, wanted, e)
        except RecursionError:
            return self._refused(session, wanted, RequestError("the request is nested too deeply"))
        except Exception as e:
            log.exception("a call of session %s broke", session.id)
            why = f"the gateway could not handle this call ({type(e).__name__}); see its log"
            return self._refused(session, wanted, RequestError(why, kind="internal"))
        return await answer(call, http)

    def _refused(self, session: Session, wanted: CallRequest, error: RequestError) -> web.StreamResponse:
        self._counters["refused"] += 1
        Recorder(self._context, session, wanted).store_refusal(error)
        return error_response(wanted.dialect, error)

    async def _read(self, request: Request, session: Session, dialect: str, tag: str | None) -> CallRequest:
        """Decode a request, a large one in another process. Raises: RequestError."""
        body, headers = request.body, request.headers
        if len(body) <= LARGE_BYTES:
            return read_request(body, headers, dialect, tag=tag)
        recorded = session.replies.all(self._sessions.store, session.number) if b'"item_reference"' in body else {}
        unchanged = self._relayed and dialect == "chat"
        return await read_large_request(
            self._bodies, body, headers, dialect, tag=tag, as_they_are=unchanged, recorded=recorded
        )

    def _find_or_start(
        self, wanted: CallRequest, session: Session, tag: str | None, *, chunks: bool
    ) -> Call | RecordedCall:
        """The call that answers a request. ``chunks``: the client understands a stream. Raises: RequestError."""
        context = self._context
        if wanted.stream and not chunks:
            raise RequestError("a streamed reply needs HTTP/1.1", param="stream")
        engine = self._make_engine(session, wanted)
        fields = engine.understand()
        # A repetition uses up no turn, so it comes before the session's limits.
        if (running := running_call(session, wanted)) is not None:
            self._counters["turns_joined"] += 1
            joined: Call = running
            return joined
        if (found := recorded_reply(context, session, wanted)) is not None:
            self._counters["turns_joined"] += 1
            return RecordedCall(wanted, writer_of(wanted, engine), found)
        session.hold_to_settings(fields)
        if "n" in session.overrides:
            wanted.n = passthrough.number(fields["n"]) or 1
        wanted.fields = wanted.recorded_fields(fields)
        if tag is not None:
            wanted.fields[TAG] = msgspec.Raw(b'"%b"' % tag.encode())
        engine.compose(fields)
        return Call(context, session, wanted, engine, writer_of(wanted, engine))

    def _session(self, name: bytes, request: Request) -> Session:
        """The session of a request that shows its key. Raises: RequestError."""
        session = self._sessions.find(name) or self._opened(name)
        if self._config.session_keys and not request.shows(session.key):
            raise RequestError(
                "the api key is not this session's; use the api_key of the rollout's `_rollout` block",
                kind="authentication",
            )
        if session.closed:
            raise _closed(session)
        return session

    def _opened(self, name: bytes) -> Session:
        """Open a session for agents without keys. Raises: RequestError."""
        plain = unquote_to_bytes(name)
        if self._config.session_keys or self._sessions.deleted_before(plain):
            raise _no_session(name)
        try:
            return self._sessions.create(plain.decode(), SessionSettings())
        except (ContractError, UnicodeDecodeError) as e:
            raise RequestError(str(e)) from e

    async def _other_route(
        self, http: web.BaseRequest, request: Request, session: Session, rest: bytes
    ) -> web.StreamResponse:
        models, _, wanted = rest.partition(b"/")
        routes = self._admin.models
        if models == b"models" and request.method == b"GET":
            name = unquote(wanted.decode("latin-1")) if wanted else None
            dialect = "anthropic" if "anthropic-version" in request.headers else "chat"
            return await respond(routes.models(session, name), http, dialect=dialect)
        if rest == b"messages/count_tokens" and request.method == b"POST":
            request.body = await read_body(http, self._config.limits)
            return await respond(routes.count_tokens(request, session), http, dialect="anthropic")
        shown = rest.decode("utf-8", "replace")[:80]
        hint = " (Anthropic's clients want the base URL without its /v1)" if rest.startswith(b"v1/") else ""
        raise RequestError(
            f"/v1/{shown} is not served here; there are chat/completions, responses, messages and models{hint}",
            kind="not_found",
        )


def _head(path: bytes) -> web.Response:
    """The response to a HEAD has no body; only a probe of our health has a use for one."""
    return web.Response(status=200 if path in (b"/healthz", b"/health") else 405, headers={"allow": "GET, POST"})


def _checked(tag: str) -> str:
    """Raises: RequestError."""
    try:
        return check_tag(tag)
    except ConfigError as e:
        raise RequestError(str(e)) from e


def _closed(session: Session) -> RequestError:
    return RequestError(f"session {session.id} is closed", kind="permission")


def _no_session(name: bytes) -> RequestError:
    shown = name.decode("utf-8", "replace")[:120]
    return RequestError(f"there is no session {shown!r} here: never opened, or deleted", kind="not_found")
