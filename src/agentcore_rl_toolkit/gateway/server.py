"""The gateway: one event loop, one listening socket, sessions, router and journal put together."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, unquote_to_bytes

from .._connection_room import ConnectionRoom, default_limit
from .._host_check import HostCheck
from ..errors import ConfigError, ContractError
from .admin.health import StateFile
from .admin.routes import Admin
from .calls.attempt import Exchange
from .calls.call import Call
from .calls.translated import TranslatedCall
from .calls.work_slices import Slices
from .config import GatewayConfig, is_loopback
from .errors import RequestError
from .http.accept import Acceptor, listen
from .http.connection import SCRATCH, AgentConnection
from .http.messages import Request, error_reply, retry_after
from .sessions.registry import Session, Sessions, store_secret
from .sessions.settings import SessionSettings, check_sampling
from .store import temporary
from .store.journal import Journal
from .store.retention import Retention, moments
from .upstreams.read_pacing import Pacer
from .upstreams.router import Router, Worker

if TYPE_CHECKING:
    from .calls.token_mode import TokenMode
    from .tinker.service import TinkerServices

log = logging.getLogger(__name__)

TICK_S = 0.25
_CALLS = {
    b"chat/completions": "chat",
    b"completions": "completions",
    b"responses": "responses",
    b"messages": "anthropic",
}


_ROUTED = ("sglang", "sglang-experts")


class Gateway:
    """A running gateway. Make it, then `await start()`; `url` is where it listens.

    Raises: ConfigError from `start` when the port is in use or the store is somebody else's.
    """

    token_call: Callable[[AgentConnection, Session, str], Call]

    def __init__(self, config: GatewayConfig) -> None:
        try:
            check_sampling(config.sampling_params)
        except RequestError as e:
            raise ConfigError(str(e)) from e
        self.config = config
        self.limits = config.limits
        self.counters: Counter[str] = Counter()
        self.hosts = HostCheck((config.host,), config.allowed_hosts)
        self.connections: set[AgentConnection] = set()
        self.room = ConnectionRoom(config.limits.connections or default_limit())
        self.running: set[Call] = set()
        self.scratch = memoryview(bytearray(SCRATCH))  # what every client connection reads into
        self.receiving = 0  # bytes of larger request bodies that are on their way in
        self.waiting: list[Exchange] = []
        self.paused: str | None = None  # None, "hold" or "reject"
        self.weight_version = config.weight_version
        self.changing = False  # whether weights may be changed under running calls
        self.changes = 0  # how often that began or ended, or other weights were published
        self.call_ended: set[asyncio.Event] = set()  # set whenever a call ends, for those who wait for that
        self.lag_s = 0.0
        self.lag_max_s = 0.0
        self.started_s = time.time()
        self.url = ""
        self._temporary: str | None = None
        directory = config.store_dir
        if directory is None:
            directory = self._temporary = temporary.make()
        path = Path(directory)
        if (path / "processes").exists():
            raise ConfigError(
                f"{path} was written by several processes of version 0.3.0 (--workers); `agentcore-rl gateway export` reads "
                "it; serve from a new --store"
            )
        try:
            self.journal = Journal(path, fsync=config.fsync)
            self.journal.dated = lambda written_s: moments(written_s, config.retention_s)
            self.sessions = Sessions(
                self.journal,
                secret=store_secret(path),
                limit=self.limits.sessions,
                defaults=SessionSettings(sampling_params=dict(config.sampling_params), model_id=config.model_id),
            )
            self.recovered = self.sessions.restore()
        except OSError as e:
            raise ConfigError(f"the store {directory} cannot be used: {e.strerror or e}") from e
        prefix = secrets.token_hex(5)  # ids of one run of the gateway must not meet those of the last one
        self.call_ids = (f"{prefix}-{n:x}" for n in itertools.count())
        self.router = Router(config.upstreams, connect_s=self.limits.connect_s, pacer=Pacer())
        self.slices = Slices()
        self.retention = Retention(self)
        self.admin = Admin(self)
        self.token_mode: TokenMode | None = None
        self.tinker: TinkerServices | None = None
        if config.model_dir is not None:
            self._load_model(config.model_dir)
        self.state = StateFile(None if self._temporary is not None else path)
        self.state.take_up(self)
        self._admin_key = config.admin_key.encode() if config.admin_key is not None else None
        self._server: Acceptor | None = None
        self._ticker: asyncio.Task[None] | None = None

    def _load_model(self, directory: str) -> None:
        """Get the tokenizer and template. Raises: ConfigError, MissingExtraError."""
        from .calls.token_call import TokenCall
        from .calls.token_mode import load

        mode = self.token_mode = load(directory, self.config, self.sessions)
        kind: type[TokenCall] = TokenCall
        if any(u.engine == "tinker" for u in self.config.upstreams):
            from .tinker.call import TinkerCall
            from .tinker.service import TinkerServices

            kind, self.tinker = TinkerCall, TinkerServices(self)
        self.token_call = lambda conn, session, dialect: kind(self, conn, session, dialect, mode)

    # -- life

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.journal.start(loop)
        try:
            listening = listen(self.config.host, self.config.port)
        except ConfigError:
            self.journal.close()
            raise
        self._server = Acceptor(listening, lambda: AgentConnection(self))
        self.url = self._server.url
        self._ticker = loop.create_task(self._tick())

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """Stop listening, let running calls finish for `grace_s`, close the store. A second call does nothing."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for conn in list(self.connections):
            conn.finish()
        await self._until(lambda: not self.running, grace_s)
        for call in list(self.running):
            call.abort(RequestError("the gateway is stopping", kind="overloaded"))
        for conn in list(self.connections):
            conn.transport.close()
        await asyncio.sleep(0)
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        self.admin.close()
        if self.tinker is not None:
            await self.tinker.close()
        if self.token_mode is not None:
            self.token_mode.executor.shutdown(wait=False, cancel_futures=True)
        self.router.close()
        self.journal.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    async def _tick(self) -> None:
        """Deadlines, idle connections, loop lag, retention: everything that is looked at now and then, in one place."""
        due = time.monotonic() + TICK_S
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            self.lag_s = max(0.0, now - due)
            self.lag_max_s = max(self.lag_max_s, self.lag_s)
            due = now + TICK_S
            for call in [c for c in self.running if c.deadline is not None and now > c.deadline]:
                self.counters["deadlines"] += 1
                if call in self.waiting:
                    call.abort(RequestError("the policy is still being updated; try again", kind="rate_limit"))
                else:
                    call.abort(RequestError(f"the call took longer than {self.limits.call_s:g} s", kind="timeout"))
            for conn in list(self.connections):
                if conn.paused_since is not None and now - conn.paused_since > self.limits.stalled_write_s:
                    self.counters["stalled_agents"] += 1
                    conn.transport.abort()
                elif not conn.busy and conn.head_since is not None and now - conn.head_since > self.limits.head_s:
                    conn.refuse("the headers of the request did not come in time", kind="timeout", status=408)
                elif not conn.busy and now - conn.last_s > self.limits.idle_connection_s:
                    conn.transport.close()
            self.router.sweep(now)
            self.journal.tend()
            self.retention.tend()

    # -- connections

    def adopt(self, conn: AgentConnection) -> None:
        """Take a new connection in, and close idle ones where there are too many."""
        conn.address = (conn.transport.get_extra_info("peername") or ("",))[0]
        self.connections.add(conn)
        if self.room.opened(conn.address) or len(self.connections) > self.room.limit:
            for each in self.room.make_room(conn, self.connections, time.monotonic()):
                each.transport.abort()

    def forget(self, conn: AgentConnection) -> None:
        self.connections.discard(conn)
        self.room.closed(conn.address)

    # -- requests

    def dispatch(self, conn: AgentConnection, request: Request) -> None:
        """Give a request to whom it belongs: a session's model call, or administration."""
        path = request.path
        if path[:10] == b"/sessions/":
            name, slash, rest = path[10:].partition(b"/v1/")
            if slash:
                self._agent_request(conn, request, name, rest)
                return
        self.counters["admin_requests"] += 1
        self.admin.dispatch(conn, request)

    def admit(self, request: Request) -> None:
        """Check who sends a request before its body is read, so that strangers cannot send much.

        Raises: RequestError.
        """
        name, slash, _ = request.path[10:].partition(b"/v1/")
        if slash and request.path[:10] == b"/sessions/":
            session = self.sessions.find(name)
            if session is not None:
                self._check_key(session, request)
            elif not self.config.implicit_sessions:
                raise _no_session(name)
        elif not self.is_admin(request):
            raise RequestError("the admin key is missing or wrong", kind="authentication")

    def _check_key(self, session: Session, request: Request) -> None:
        if self.config.session_keys and not request.shows(session.key):
            raise RequestError(
                "the api key is not this session's; use the api_key of the rollout's `_rollout` block",
                kind="authentication",
            )

    def _agent_request(self, conn: AgentConnection, request: Request, name: bytes, rest: bytes) -> None:
        if rest not in _CALLS:
            rest = rest.rstrip(b"/")
        dialect = _CALLS.get(rest, "anthropic" if rest.startswith((b"messages", b"v1/messages")) else "chat")
        session = self.sessions.by_id.get(name)
        try:
            if session is None:
                session = self._unknown_session(name, request)
            self._check_key(session, request)
            if session.closed:
                raise RequestError(f"session {session.id} is closed", kind="permission")
            if rest not in _CALLS:
                self._other_route(conn, request, session, rest)
                return
            if request.method != b"POST":
                raise RequestError("use POST", kind="method_not_allowed")
        except RequestError as e:
            self.counters["refused"] += 1
            headers = ((b"allow", b"POST"),) if e.kind == "method_not_allowed" else retry_after(e)
            conn.write(error_reply(dialect, e, headers=headers, keep_alive=request.keep_alive))
            conn.done(keep_alive=request.keep_alive)
            return
        self.counters["calls"] += 1
        call: Call
        if self.token_mode is not None:
            call = self.token_call(conn, session, dialect)
        elif dialect in ("chat", "completions"):
            call = Call(self, conn, session, dialect)
        else:
            call = TranslatedCall(self, conn, session, dialect)
        try:
            call.begin(request, rest)
        except Exception as e:
            call.broke(e)

    def _unknown_session(self, name: bytes, request: Request) -> Session:
        session = self.sessions.find(name)
        if session is not None:
            return session
        if self.config.implicit_sessions and not self.sessions.deleted_before(unquote_to_bytes(name)):
            try:
                return self.sessions.create(unquote_to_bytes(name).decode(), SessionSettings())
            except (ContractError, UnicodeDecodeError) as e:
                raise RequestError(str(e)) from e
        raise _no_session(name)

    def _other_route(self, conn: AgentConnection, request: Request, session: Session, rest: bytes) -> None:
        models, _, wanted = rest.partition(b"/")
        if models == b"models" and request.method == b"GET":
            name = unquote(wanted.decode("latin-1")) if wanted else None
            self.admin.start(self.admin.models.models(conn, request, session, name), conn)
            return
        if rest == b"messages/count_tokens" and request.method == b"POST":
            self.admin.start(self.admin.models.count_tokens(conn, request, session), conn)
            return
        shown = rest.decode("utf-8", "replace")[:80]
        hint = " (Anthropic's clients want the base URL without its /v1)" if rest.startswith(b"v1/") else ""
        raise RequestError(
            f"/v1/{shown} is not served here; there are chat/completions, completions, responses, messages and models{hint}",
            kind="not_found",
        )

    def is_admin(self, request: Request) -> bool:
        if self._admin_key is None:
            return is_loopback(self.config.host)
        given = request.headers.get(b"x-admin-key")
        return request.shows(self._admin_key) if given is None else hmac.compare_digest(given, self._admin_key)

    def head(self, worker: Worker, path: bytes, size: int, session: bytes) -> bytes:
        """Head of a request to a server, all but the length and the session kept ready.

        SGLang's router keeps calls of one routing key on one server, where the session's prefix is in the cache.
        """
        known = worker.heads.get(path)
        if known is None:
            config = worker.config
            lines = [
                b"POST %b HTTP/1.1" % config.path(path),
                b"host: " + worker.host_header,
                b"content-type: application/json",
                b"accept: application/json, text/event-stream",
            ]
            if config.api_key is not None:
                lines.append(b"authorization: Bearer " + config.api_key.encode())
            known = worker.heads[path] = b"\r\n".join(lines) + b"\r\ncontent-length: "
        if worker.config.engine in _ROUTED:
            return b"%b%d\r\nx-smg-routing-key: %b\r\n\r\n" % (known, size, session)
        return b"%b%d\r\n\r\n" % (known, size)

    # -- weights, pausing

    @property
    def sampling(self) -> int | None:
        """The version of the tokens that arrive now; None: not known."""
        return None if self.changing else self.weight_version

    def publish(self, version: int) -> None:
        """Other weights answer from now on."""
        self._weights_change(changing=False)
        self.weight_version = version

    def _weights_change(self, *, changing: bool) -> None:
        self.changing = changing
        self.changes += 1
        for call in self.running:
            call.weights_change()

    def hold(self, call: Exchange) -> None:
        """A call that arrives during a pause: wait, or 429 with Retry-After."""
        if self.paused == "reject":
            call.abort(RequestError("the policy is being updated; try again", kind="rate_limit"))
        else:
            call.deadline = min(call.deadline or float("inf"), time.monotonic() + self.limits.hold_s)
            self.waiting.append(call)

    async def pause(
        self, *, arriving: str = "hold", in_flight: str = "finish", timeout_s: float = 60.0
    ) -> dict[str, Any]:
        """Start no further calls. `in_flight`: "finish" waits for the running ones, "abort" ends them, "continue"
        lets them be.

        Returns how many were left running when the wait was over.
        """
        self.paused = arriving
        if in_flight == "abort":
            for call in [c for c in self.running if c not in self.waiting]:
                call.abort(RequestError("the policy is being updated; try again", kind="overloaded"))
        if in_flight != "continue":  # of aborted ones those are left whose record the disk is about to take
            await self._until(lambda: not self._active() or self.paused is None, timeout_s)
        if self._active() and self.paused is not None:
            self._weights_change(changing=True)
        return {"paused": True, "in_flight": self._active()}

    async def _until(self, reached: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `reached()`, looked at whenever a call ends."""
        changed = asyncio.Event()
        self.call_ended.add(changed)
        try:
            async with asyncio.timeout(timeout_s):
                while not reached():
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            pass
        finally:
            self.call_ended.discard(changed)

    def _active(self) -> int:
        return len(self.running) - sum(not call.ended for call in self.waiting)

    def resume(self) -> dict[str, Any]:
        self.paused = None
        if self.changing:
            self._weights_change(changing=False)
        for changed in self.call_ended:
            changed.set()
        waiting, self.waiting = self.waiting, []
        started = 0
        for call in waiting:
            if not call.ended:
                call.deadline = None if self.limits.call_s is None else time.monotonic() + self.limits.call_s
                call.route()
                started += 1
        return {"paused": False, "started": started}


def _no_session(name: bytes) -> RequestError:
    shown = name.decode("utf-8", "replace")[:120]
    return RequestError(f"there is no session {shown!r} here: never opened, or deleted", kind="not_found")
