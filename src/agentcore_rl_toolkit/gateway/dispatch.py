"""The two kinds of requests: a session's model call, or administration."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from urllib.parse import unquote, unquote_to_bytes

from .._servers.host_check import is_loopback
from ..contract import check_tag
from ..errors import ConfigError, ContractError
from ..messages.errors import RequestError
from .admin.routes import Admin
from .calls.agent import RelayingAgent, TranslatingAgent
from .calls.call import Call
from .calls.context import Context
from .calls.relayed_chat import RelayedChat
from .config import GatewayConfig
from .http.connection import AgentConnection
from .http.messages import Request, error_reply, retry_after
from .sessions.session import Session
from .sessions.settings import SessionSettings

_CALLS = {b"chat/completions": "chat", b"responses": "responses", b"messages": "anthropic"}
MakeCall = Callable[[AgentConnection, Session, str], Call]


class Dispatch:
    """The `Handler` of every client connection. ``token_call`` makes the calls where the gateway does the tokenising."""

    def __init__(self, config: GatewayConfig, calls: Context, admin: Admin, token_call: MakeCall | None) -> None:
        self._config = config
        self._calls = calls
        self._sessions = calls.sessions
        self._counters = calls.counters
        self._admin = admin
        self._token_call = token_call
        self._admin_key = config.admin_key.encode() if config.admin_key is not None else None

    def dispatch(self, conn: AgentConnection, request: Request) -> None:
        path = request.path
        if path[:10] == b"/sessions/":
            name, slash, rest = path[10:].partition(b"/v1/")
            if slash:
                self._agent_request(conn, request, name, rest)
                return
        self._admin.dispatch(conn, request, known=self._is_admin(request))

    def admit(self, request: Request) -> None:
        """Check who sends a request before its body is read, so that strangers cannot send much.

        Raises: RequestError.
        """
        name, slash, _ = request.path[10:].partition(b"/v1/")
        if slash and request.path[:10] == b"/sessions/":
            session = self._sessions.find(name)
            if session is not None:
                self._check_key(session, request)
            elif self._config.session_keys:
                raise _no_session(name)
        elif not self._is_admin(request):
            raise RequestError("the admin key is missing or wrong", kind="authentication")

    def _is_admin(self, request: Request) -> bool:
        if self._admin_key is None:
            return is_loopback(self._config.host)
        given = request.headers.get(b"x-admin-key")
        return request.shows(self._admin_key) if given is None else hmac.compare_digest(given, self._admin_key)

    def _check_key(self, session: Session, request: Request) -> None:
        if self._config.session_keys and not request.shows(session.key):
            raise RequestError(
                "the api key is not this session's; use the api_key of the rollout's `_rollout` block",
                kind="authentication",
            )

    # -- agents

    def _agent_request(self, conn: AgentConnection, request: Request, name: bytes, rest: bytes) -> None:
        tag = request.headers.get(b"x-agentcore-rl-tag")
        if rest.startswith(b"tag/"):
            tag, _, rest = rest[4:].partition(b"/")
            rest = rest.removeprefix(b"v1/")  # Anthropic's clients put it behind any base URL
        if rest not in _CALLS:
            rest = rest.rstrip(b"/")
        dialect = _CALLS.get(rest, "anthropic" if rest.startswith((b"messages", b"v1/messages")) else "chat")
        session = self._sessions.by_id.get(name)
        try:
            if session is None:
                session = self._unknown_session(name)
            self._check_key(session, request)
            if session.closed:
                raise RequestError(f"session {session.id} is closed", kind="permission")
            if rest not in _CALLS:
                self._other_route(conn, request, session, rest)
                return
            if request.method != b"POST":
                raise RequestError("use POST", kind="method_not_allowed")
            call = self._call(conn, session, dialect)
            call.tag = None if tag is None else _checked(tag)
        except RequestError as e:
            self._counters["refused"] += 1
            headers = ((b"allow", b"POST"),) if e.kind == "method_not_allowed" else retry_after(e)
            conn.write(error_reply(dialect, e, headers=headers, keep_alive=request.keep_alive))
            conn.done(keep_alive=request.keep_alive)
            return
        self._counters["calls"] += 1
        call.begin(request)

    def _call(self, conn: AgentConnection, session: Session, dialect: str) -> Call:
        """A call, its agent side and its engine side."""
        calls = self._calls
        if self._token_call is not None:
            return self._token_call(conn, session, dialect)
        agent = RelayingAgent(conn, dialect) if dialect == "chat" else TranslatingAgent(conn, dialect)
        return Call(calls, session, agent, RelayedChat(calls, session, agent))

    def _unknown_session(self, name: bytes) -> Session:
        session = self._sessions.find(name)
        if session is not None:
            return session
        if not self._config.session_keys and not self._sessions.deleted_before(unquote_to_bytes(name)):
            try:
                return self._sessions.create(unquote_to_bytes(name).decode(), SessionSettings())
            except (ContractError, UnicodeDecodeError) as e:
                raise RequestError(str(e)) from e
        raise _no_session(name)

    def _other_route(self, conn: AgentConnection, request: Request, session: Session, rest: bytes) -> None:
        models, _, wanted = rest.partition(b"/")
        routes = self._admin.models
        if models == b"models" and request.method == b"GET":
            name = unquote(wanted.decode("latin-1")) if wanted else None
            dialect = "anthropic" if b"anthropic-version" in request.headers else "chat"
            self._admin.answers.start(routes.models(session, name), conn, request, dialect=dialect)
            return
        if rest == b"messages/count_tokens" and request.method == b"POST":
            self._admin.answers.start(routes.count_tokens(request, session), conn, request, dialect="anthropic")
            return
        shown = rest.decode("utf-8", "replace")[:80]
        hint = " (Anthropic's clients want the base URL without its /v1)" if rest.startswith(b"v1/") else ""
        raise RequestError(
            f"/v1/{shown} is not served here; there are chat/completions, responses, messages and models{hint}",
            kind="not_found",
        )


def _checked(tag: bytes) -> str:
    try:
        return check_tag(tag.decode("utf-8", "replace"))
    except ConfigError as e:
        raise RequestError(str(e)) from e


def _no_session(name: bytes) -> RequestError:
    shown = name.decode("utf-8", "replace")[:120]
    return RequestError(f"there is no session {shown!r} here: never opened, or deleted", kind="not_found")
