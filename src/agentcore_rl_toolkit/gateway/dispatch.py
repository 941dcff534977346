"""The requests of agents: model calls and the few other routes of a session. All others are administration."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

import msgspec
from aiohttp import HttpVersion11, web

from .._servers.host_check import HostCheck, is_loopback
from ..contract import check_tag
from ..errors import ConfigError, ContractError
from ..messages.errors import RequestError
from ..messages.wire import DIALECTS, anthropic, bedrock, gemini, passthrough
from .admin import Admin
from .call import Call, answer, answer_again
from .capture.record import TAG
from .context import Context
from .http.responses import error_response, respond
from .http.server import Request, read_body
from .record import Recorder
from .retries import recorded_reply, running_call
from .sessions import Session, SessionSettings
from .wire.request import CallRequest, read_request
from .writers import writer_of

log = logging.getLogger(__name__)

_CALLS = {dialect.path.encode(): name for name, dialect in DIALECTS.items()}
_COUNTS = {b"messages/count_tokens": "anthropic", gemini.COUNT: "gemini", bedrock.COUNT: "bedrock"}
_HEALTH = (b"/healthz", b"/health")


class Dispatch:
    """The handler of a gateway's requests."""

    def __init__(self, context: Context, admin: Admin) -> None:
        config = context.config
        self._context = context
        self._sessions = context.sessions
        self._session_keys = config.session_keys
        self._admin = admin
        self._hosts = HostCheck((config.host,), config.allowed_hosts)
        self._loopback = is_loopback(config.host)
        self._admin_key = config.admin_key.encode() if config.admin_key is not None else None

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer a request. Its body is read after its key was checked, so that strangers cannot send much."""
        raw, _, query = http.raw_path.encode("utf-8", "surrogateescape").partition(b"?")
        request = Request(http.method.encode(), raw, query, http.headers)
        name, slash, rest = raw[10:].partition(b"/v1/")
        if not slash:  # Google's clients have their own version in the path
            name, slash, rest = raw[10:].partition(b"/v1beta/")
        if not slash:  # Amazon's clients have no version
            name, slash, rest = raw[10:].rpartition(b"/bedrock/")
            rest = b"bedrock/" + rest if slash else rest
        dialect = _dialect_of_errors(raw, rest)
        try:
            self._check(http)
            if (
                http.method == "HEAD"
            ):  # its response has no body; only a probe of the gateway's health has a use for one
                return web.Response(status=200 if raw in _HEALTH else 405, headers={"allow": "GET, POST"})
            if slash and raw.startswith(b"/sessions/"):
                return await self._agent(http, request, name, rest, dialect)
            known = self._loopback if self._admin_key is None else request.has_admin_key(self._admin_key)
            if known:
                request.body = await read_body(http, self._context.limits)
            return await respond(self._admin.answer(request, known=known), http)
        except RequestError as e:
            response = error_response(dialect, e)
            if http.method == "CONNECT":
                response.force_close()
            return response

    def _check(self, http: web.BaseRequest) -> None:
        """Raises: RequestError for another server's name, for web pages, and for requests that no route here takes."""
        host, origin = http.headers.get("host"), http.headers.get("origin")
        refusal = self._hosts.refusal(
            None if host is None else host.encode("latin-1", "replace"),
            None if origin is None else origin.encode("latin-1", "replace"),
        )
        if refusal is not None:
            raise RequestError(refusal.message, kind="permission", status=refusal.status)
        if http.method == "CONNECT":
            raise RequestError("this server is no proxy", kind="method_not_allowed")

    # -- agents

    async def _agent(
        self, http: web.BaseRequest, request: Request, name: bytes, rest: bytes, dialect: str
    ) -> web.StreamResponse:
        tag = request.headers.get("x-agentcore-rl-tag")
        if rest.startswith(b"tag/"):
            path_tag, _, rest = rest[4:].partition(b"/")
            tag = path_tag.decode("utf-8", "replace")
            rest = rest.removeprefix(b"v1/")  # Anthropic's clients put it behind any base URL
        if rest.startswith(b"bedrock/"):
            request.path_key = rest.split(b"/")[1]
        api = bedrock if rest.startswith(b"bedrock/") else gemini
        route = api.route_of(rest)
        if route is not None:
            rest = route.pattern
        elif rest not in _CALLS:
            rest = rest.rstrip(b"/")
        dialect = _CALLS.get(rest, dialect)
        counters = self._context.counters
        try:
            session = self._session(name, request)
            if rest not in _CALLS:
                return await self._other_route(http, request, session, rest)
            if request.method != b"POST":
                raise RequestError("use POST", kind="method_not_allowed")
            if tag is not None:
                tag = _checked(tag)
            request.body = await read_body(http, self._context.limits)
            if route is not None:
                request.body = api.with_members(request.body, route, request.query)
        except RequestError as e:
            counters["refused"] += 1
            return error_response(dialect, e, {"allow": "POST"} if e.kind == "method_not_allowed" else None)
        counters["calls"] += 1
        wanted = CallRequest(dialect)
        try:
            wanted = await read_request(request.body, request.headers, dialect, tag=tag)
            _check_open(session)
            writing = self._find_or_start(wanted, session, tag, http)
        except RequestError as e:
            error = e
        except RecursionError:
            error = RequestError("the request is nested too deeply")
        except Exception as e:
            log.exception("a call of session %s broke", session.id)
            why = f"the gateway could not handle this call ({type(e).__name__}); see its log"
            error = RequestError(why, kind="internal")
        else:
            return await writing
        counters["refused"] += 1
        Recorder(self._context, session, wanted).store_refusal(error)
        return error_response(dialect, error)

    def _find_or_start(
        self, wanted: CallRequest, session: Session, tag: str | None, http: web.BaseRequest
    ) -> Coroutine[Any, Any, web.StreamResponse]:
        """Return the coroutine that writes the reply, of a running call, a recorded one, or a new one.

        Raises: RequestError, UpstreamError.
        """
        context = self._context
        if wanted.stream and http.version < HttpVersion11:
            raise RequestError("a streamed reply needs HTTP/1.1", param="stream")
        engine = context.new_engine(session, wanted)
        fields = engine.understand()
        # A repetition uses up no turn, so it comes before the session's limits.
        if (running := running_call(session, wanted)) is not None:
            context.counters["turns_joined"] += 1
            return answer(running, http)
        if (found := recorded_reply(session, wanted)) is not None:
            context.counters["turns_joined"] += 1
            (reply, record), writer = found, writer_of(wanted, engine)
            return answer_again(reply, writer.replayed(record), writer.headers(), http)
        session.hold_to_settings(fields)
        if "n" in fields:
            wanted.n = passthrough.number(fields["n"]) or 1
        wanted.fields = wanted.recorded_fields(fields)
        if tag is not None:
            wanted.fields[TAG] = msgspec.Raw(b'"%b"' % tag.encode())
        engine.compose(fields)
        return answer(Call(context, session, wanted, engine, writer_of(wanted, engine)), http)

    def _session(self, name: bytes, request: Request) -> Session:
        """Return the session of a request that shows its key. Raises: RequestError."""
        session = self._sessions.find(name) or self._opened(name)
        if self._session_keys and not request.has_key(session.key):
            raise RequestError(
                "the api key is not this session's; use the api_key of the rollout's `_rollout` block",
                kind="authentication",
            )
        _check_open(session)
        return session

    def _opened(self, name: bytes) -> Session:
        """Open a session for agents without keys. Raises: RequestError."""
        plain = unquote_to_bytes(name)
        if self._session_keys or self._sessions.deleted_before(plain):
            shown = name.decode("utf-8", "replace")[:120]
            raise RequestError(f"there is no session {shown!r} here: never opened, or deleted", kind="not_found")
        try:
            return self._sessions.create(plain.decode(), SessionSettings())
        except (ContractError, UnicodeDecodeError) as e:
            raise RequestError(str(e)) from e

    async def _other_route(
        self, http: web.BaseRequest, request: Request, session: Session, rest: bytes
    ) -> web.StreamResponse:
        models, _, wanted = rest.partition(b"/")
        if models == b"models" and request.method == b"GET":
            name = unquote(wanted.decode("latin-1")) if wanted else None
            dialect = "anthropic" if "anthropic-version" in request.headers else "chat"
            return await respond(self._admin.models(session, name), http, dialect=dialect)
        if request.method == b"POST" and rest in (*_COUNTS, b"embeddings"):
            body = await read_body(http, self._context.limits)
            if rest == b"embeddings":
                return await respond(self._admin.embeddings(body, session), http)
            return await respond(self._count(body, session, rest), http, dialect=_COUNTS[rest])
        shown = rest.decode("utf-8", "replace")[:80]
        hint = " (Anthropic's clients want the base URL without its /v1)" if rest.startswith(b"v1/") else ""
        raise RequestError(
            f"/v1/{shown} is not served here; there are chat/completions, responses, messages, "
            f"models/{{model}}:generateContent, bedrock, embeddings and models{hint}",
            kind="not_found",
        )

    async def _count(self, body: bytes, session: Session, route: bytes) -> dict[str, int]:
        if route == gemini.COUNT:
            return {"totalTokens": await self._admin.count_tokens(gemini.parse_request(body), session)}
        if route == bedrock.COUNT:
            return {"inputTokens": await self._admin.count_tokens(bedrock.parse_count(body), session)}
        asked = anthropic.parse_request(body, counting=True)
        return {"input_tokens": await self._admin.count_tokens(asked, session)}


def _dialect_of_errors(raw: bytes, rest: bytes) -> str:
    """The dialect of an error before the route is known."""
    if b"bedrock/" in rest:
        return "bedrock"
    if b"/v1beta/" in raw:
        return "gemini"
    return "anthropic" if b"messages" in rest else "chat"


def _checked(tag: str) -> str:
    """Raises: RequestError."""
    try:
        return check_tag(tag)
    except ConfigError as e:
        raise RequestError(str(e)) from e


def _check_open(session: Session) -> None:
    """Raises: RequestError."""
    if session.closed:
        raise RequestError(f"session {session.id} is closed", kind="permission")
