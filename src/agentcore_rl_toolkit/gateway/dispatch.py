"""The requests of agents: model calls and the few other routes of a session. All other requests are administration."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from urllib.parse import unquote, unquote_to_bytes

from aiohttp import HttpVersion11, web

from .._servers.host_check import HostCheck, is_loopback
from ..contract import check_tag
from ..errors import ConfigError, ContractError
from ..messages.errors import RequestError
from ..messages.wire import DIALECTS, ModelRequest, anthropic, bedrock, gemini
from ..messages.wire.fields import Route, with_path
from .admin import Admin, Request
from .call import Call
from .context import Context
from .http.request import CallRequest
from .http.responses import error_response, respond
from .http.server import read_body
from .record import Recorder
from .retries import recorded_call, running_call
from .sessions import Session, SessionSettings

log = logging.getLogger(__name__)

_CALLS = {dialect.path.encode(): name for name, dialect in DIALECTS.items()}
# The routes that count tokens: their dialect, the reader of their requests, and the member with the number.
_COUNTS: dict[bytes, tuple[str, Callable[[bytes], ModelRequest], str]] = {
    b"messages/count_tokens": ("anthropic", partial(anthropic.parse_request, counting=True), "input_tokens"),
    bedrock.COUNT: ("bedrock", bedrock.parse_count, "inputTokens"),
}
_SIGNED = "AWS4-HMAC-SHA256 Credential="


class Dispatch:
    """The handler of a gateway's requests."""

    def __init__(self, context: Context, admin: Admin) -> None:
        config = context.config
        self._context = context
        self._session_keys = config.session_keys
        self._admin = admin
        self._refusal = lru_cache(1000)(HostCheck((config.host,), config.allowed_hosts).refusal)
        self._loopback = is_loopback(config.host)
        self._admin_key = config.admin_key.encode() if config.admin_key is not None else None

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer a request. Its body is read after its key was checked, so that strangers cannot send much."""
        raw, _, query = http.raw_path.encode("utf-8", "surrogateescape").partition(b"?")
        name, slash, rest = raw[10:].partition(b"/v1/")
        if not slash:  # Google's clients write their own version into the path
            name, slash, rest = raw[10:].partition(b"/v1beta/")
        if not slash:  # Amazon's clients have no version
            name, slash, rest = raw[10:].rpartition(b"/bedrock/")
            rest = b"bedrock/" + rest if slash else rest
        dialect = "gemini" if b"/v1beta/" in raw else "anthropic" if b"messages" in rest else "chat"
        dialect = "bedrock" if b"bedrock/" in rest else dialect  # errors have this dialect until the route is known
        host, origin = http.headers.get("host"), http.headers.get("origin")
        refusal = self._refusal(
            None if host is None else host.encode("latin-1", "replace"),
            None if origin is None else origin.encode("latin-1", "replace"),
        )
        try:
            if refusal is not None:
                raise RequestError(refusal.message, kind="permission", status=refusal.status)
            if slash and raw.startswith(b"/sessions/"):
                return await self._agent(http, name, rest, dialect)
            known = self._loopback
            if self._admin_key is not None:
                shown = http.headers.get("x-admin-key")
                known = shows_key(http.headers, self._admin_key) if shown is None else _equal(shown, self._admin_key)
            body = await read_body(http, self._context.limits) if known else b""
            return await respond(self._admin.answer(Request(http.method.encode(), raw, query, body), known=known), http)
        except RequestError as e:
            return error_response(dialect, e)

    # -- agents

    async def _agent(self, http: web.BaseRequest, name: bytes, rest: bytes, dialect: str) -> web.StreamResponse:
        context, tag = self._context, http.headers.get("x-agentcore-rl-tag")
        if rest.startswith(b"tag/"):
            path_tag, _, rest = rest[4:].partition(b"/")
            tag = path_tag.decode("utf-8", "replace")
            rest = rest.removeprefix(b"v1/")  # Anthropic's clients append it to any base URL
        # A key in the path: botocore sends bearer tokens over HTTPS only.
        path_key = rest.split(b"/")[1].decode("latin-1") if rest.startswith(b"bedrock/") else ""
        api = bedrock if rest.startswith(b"bedrock/") else gemini
        route = None if rest in _CALLS else api.route_of(rest)
        if route is not None:
            rest = route.pattern
        elif rest not in _CALLS:
            rest = rest.rstrip(b"/")
        dialect = _CALLS.get(rest, dialect)
        try:
            session = context.sessions.by_id.get(unquote_to_bytes(name)) or self._opened(name)
            if self._session_keys and not shows_key(http.headers, session.key, path_key):
                raise RequestError(
                    "the api key is not this session's; use the api_key of the rollout's `_rollout` block",
                    kind="authentication",
                )
            if session.closed_s is not None:
                raise _closed(session)
            if rest not in _CALLS:
                return await self._other_route(http, session, rest)
            if http.method != "POST":
                raise RequestError("use POST", kind="method_not_allowed")
            if tag is not None:
                check_tag(tag)
            call = await self._call(http, session, dialect, tag, route)
        except (RequestError, ConfigError) as e:
            context.counters["refused"] += 1
            error = e if isinstance(e, RequestError) else RequestError(str(e))
            return error_response(dialect, error, {"allow": "POST"} if error.kind == "method_not_allowed" else None)
        return await call.answer(http)

    async def _call(
        self, http: web.BaseRequest, session: Session, dialect: str, tag: str | None, route: Route | None
    ) -> Call:
        """Return the call that a request repeats, or start one. Raises: RequestError, which is recorded."""
        context = self._context
        body = await read_body(http, context.limits)
        request = CallRequest(dialect, body if route is None else with_path(body, route), http.headers, tag=tag)
        context.counters["calls"] += 1
        try:
            if request.dialect == "responses" and b'"item_reference"' in request.body:
                await session.replies.update(context.store, session.number)
            passes = request.dialect == "chat" and context.token_mode is None
            await request.read(session.replies.find, passes=passes, allowed=context.allow_fields)
            if session.closed_s is not None:
                raise _closed(session)
            if request.stream and http.version < HttpVersion11:
                raise RequestError("a streamed reply needs HTTP/1.1", param="stream")
            # A repetition uses no turn, so it comes before the session's limits.
            call = running_call(session, request) or recorded_call(context, session, request)
            if call is not None:
                context.counters["turns_joined"] += 1
                return call
            engine = context.new_engine(session, request)
            engine.compose()
            recorder = Recorder(context, session, request)
            call = Call(engine, recorder.reply)
            call.start(recorder)
            return call
        except RequestError as e:
            error = e
        except RecursionError:
            error = RequestError("the request is nested too deeply")
        except Exception as e:
            log.exception("a call of session %s failed with an unexpected error", session.id)
            why = f"the gateway could not handle this call ({type(e).__name__}); see its log"
            error = RequestError(why, kind="internal")
        request.fields = {}  # perhaps they cannot be written
        Recorder(context, session, request).store_refusal(error)
        raise error

    def _opened(self, name: bytes) -> Session:
        """Open a session for agents without keys. Raises: RequestError."""
        plain, sessions = unquote_to_bytes(name), self._context.sessions
        if self._session_keys or plain in sessions.deleted:
            shown = name.decode("utf-8", "replace")[:120]
            raise RequestError(
                f"there is no session {shown!r} here: it was never opened, or was deleted", kind="not_found"
            )
        try:
            return sessions.create(plain.decode(), SessionSettings())
        except (ContractError, UnicodeDecodeError) as e:
            raise RequestError(str(e)) from e

    async def _other_route(self, http: web.BaseRequest, session: Session, rest: bytes) -> web.StreamResponse:
        models, _, wanted = rest.partition(b"/")
        if models == b"models" and http.method == "GET":
            name = unquote(wanted.decode("latin-1")) if wanted else None
            dialect = "anthropic" if "anthropic-version" in http.headers else "chat"
            return await respond(self._admin.models(session, name), http, dialect=dialect)
        if http.method == "POST" and rest in (*_COUNTS, b"embeddings"):
            body = await read_body(http, self._context.limits)
            if rest == b"embeddings":
                return await respond(self._admin.embeddings(body, session), http)
            return await respond(self._count(body, session, rest), http, dialect=_COUNTS[rest][0])
        shown = rest.decode("utf-8", "replace")[:80]
        hint = " (Anthropic's clients need the base URL without its /v1)" if rest.startswith(b"v1/") else ""
        raise RequestError(
            f"/v1/{shown} is not served here; there are chat/completions, responses, messages, "
            f"models/{{model}}:generateContent, bedrock, embeddings and models{hint}",
            kind="not_found",
        )

    async def _count(self, body: bytes, session: Session, route: bytes) -> dict[str, int]:
        _, parse, member = _COUNTS[route]
        return {member: await self._admin.count_tokens(parse(body), session)}


def shows_key(headers: Mapping[str, str], key: bytes, path_key: str = "") -> bool:
    """Return True if one of the credentials is this key. Anthropic's client sends two if its environment has another key.

    A request that is signed for AWS has the key as its access key id. The signature is not read.
    """
    bearer = headers.get("authorization", "")
    if bearer.startswith(_SIGNED):
        bearer = bearer.removeprefix(_SIGNED).partition("/")[0]
    elif bearer[:7].lower() == "bearer ":
        bearer = bearer[7:]
    if _equal(bearer, key):
        return True
    return any(
        _equal(each, key) for each in (headers.get("x-api-key"), headers.get("x-goog-api-key"), path_key) if each
    )


def _equal(shown: str, key: bytes) -> bool:
    return hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), key)


def _closed(session: Session) -> RequestError:
    return RequestError(f"session {session.id} is closed", kind="permission")
