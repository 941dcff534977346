"""A scripted AgentCore data plane: real HTTP, real wire shapes, agents that do what ``payload["script"]`` says.

It runs on a thread of this process and answers `InvokeAgentRuntime` and `StopRuntimeSession` of unmodified AWS clients.

    with ScriptedRuntime() as runtime, RolloutClient(runtime.arn, url, "exp", endpoint_url=runtime.url) as client:
        assert client.invoke({"script": {"run_s": 0.1, "result": {"rewards": 1.0}}}).result()["rewards"] == 1.0
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from agentcore_rl_toolkit._portal import Portal
from agentcore_rl_toolkit.contract import (
    INFO_FIELD,
    ROLLOUT_FIELD,
    RUNS_ONCE_FIELD,
    alive_key,
    redact_payload,
    result_key,
)
from agentcore_rl_toolkit.errors import ObjectExistsError
from agentcore_rl_toolkit.proof import PROOF_KEY_FIELD, REPLY_FIELD, SCHEME, seal
from agentcore_rl_toolkit.store import ObjectStore, open_store

SESSION_HEADER = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"
ARN = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/scripted-0123456789"
TEST_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-west-2"}
REFUSALS: dict[str | None, tuple[int, str, str]] = {
    "429": (429, "ThrottlingException", "Rate exceeded"),
    "402": (402, "ServiceQuotaExceededException", "maxVms limit exceeded"),
    "409": (409, "RetryableConflictException", "Session operation in progress, please retry"),
    "500": (500, "InternalServerException", "internal error"),
    "503": (503, "ServiceUnavailableException", "service unavailable"),
    "424": (424, "RuntimeClientError", "Received error (500) from runtime. Please check your CloudWatch logs."),
    "off": (424, "RuntimeClientError", "Received error (403) from runtime. Please check your CloudWatch logs."),
    "403": (403, "AccessDeniedException", "User is not authorized"),
    "404": (404, "ResourceNotFoundException", "No endpoint or agent found"),
    "expired": (403, "ExpiredTokenException", "The security token included in the request is expired"),
}
# status, error name, body of an answer; None: the connection is closed without one
Answer = tuple[int, str, bytes] | None


@dataclass(kw_only=True)
class Script:
    """The behaviour of one agent. Units: seconds.

    Attributes:
        cold_start_s: time until the invoke is answered.
        run_s: time from then to the record.
        result: members of the record.
        fail: the agent raises: a record with ``status_code`` 500.
        cause, failure: whose failure that record says it is (None: nothing, as the published toolkit's), and of what.
        raw: bytes to store instead of a record (text).
        die_at_s: the session dies this long after its start, without a record.
        heartbeat, proves, runs_once: whether the agent writes signs of life, proves its records, and says that a session's
            payload runs once (agents of the published toolkit do none of it).
        reply: answer to the invoke instead of the usual one.
        hang: never finishes, but shows signs of life.
    """

    cold_start_s: float = 0.0
    run_s: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)
    fail: str | None = None
    cause: str | None = None
    failure: str | None = None
    raw: str | None = None
    die_at_s: float | None = None
    heartbeat: bool = True
    proves: bool = True
    runs_once: bool = True
    reply: Any = None
    hang: bool = False


@dataclass
class Session:
    """One session as the runtime saw it. ``runs`` counts how often the agent was started in it."""

    session_id: str
    payload: dict[str, Any]
    runs: int = 0
    stopped: bool = False
    record_at_s: float | None = None  # monotonic time at which the record was stored
    agent: concurrent.futures.Future[None] | None = None


class ScriptedRuntime:
    """The data plane, to use with `with`.

    Attributes:
        sessions: by session id, all that were ever started.
        requests: counts by operation: invoke, stop, and "unknown" for everything else.
        faults: what to do with the next invokes, in order: a name in `REFUSALS` (answer so and start nothing), "500_after"
            (start the agent, then answer 500), "drop" (close the connection without an answer and without starting anything),
            "drop_after" (start the agent, then close), "hang" (never answer), None (nothing special).
        stop_faults: the same for stops.
        stops_end: while it is not set, stops wait for it.
        max_sessions: live sessions before 402.
        agent_url: pass invokes on to a running agent (its ``/invocations``) instead of playing scripts.
    """

    def __init__(self, *, faults: Iterable[str | None] = (), max_sessions: int | None = None) -> None:
        self.arn = ARN
        self.sessions: dict[str, Session] = {}
        self.requests: Counter[str] = Counter()
        self.faults: deque[str | None] = deque(faults)
        self.stop_faults: deque[str | None] = deque()
        self.stops_end = threading.Event()
        self.stops_end.set()
        self.max_sessions = max_sessions
        self.agent_url: str | None = None
        self.store_for: Callable[[str], ObjectStore] = functools.cache(open_store)
        self._lock = threading.Lock()  # of the sessions
        self._closed = threading.Event()
        self._portal = Portal("scripted-runtime", owner="scripted runtime")  # agents play there
        self._server = _Server(self)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def live(self) -> list[str]:
        """Sessions started and not stopped."""
        return [s.session_id for s in list(self.sessions.values()) if s.runs and not s.stopped]

    @property
    def runs(self) -> int:
        """How many times an agent was started, over all sessions."""
        return sum(s.runs for s in list(self.sessions.values()))

    def __enter__(self) -> ScriptedRuntime:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self.stops_end.set()
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._server.connections):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                connection.shutdown(socket.SHUT_RDWR)
        self._portal.close()

    def _answer(self, path: str, session_id: str, body: bytes) -> Answer:
        if path == "/_local/records":
            found = list(self.sessions.values())
            return _json({s.session_id: s.record_at_s for s in found if s.record_at_s is not None})
        pieces = path.strip("/").split("/")
        if len(pieces) == 3 and pieces[0] == "runtimes" and unquote(pieces[1]) == self.arn:
            if pieces[2] == "invocations":
                return self._invoke(session_id, body)
            if pieces[2] == "stopruntimesession":
                return self._stop(session_id)
        self.requests["unknown"] += 1
        return _error(404, "ResourceNotFoundException", f"no agent at {path}")

    def _invoke(self, session_id: str, body: bytes) -> Answer:
        with self._lock:
            self.requests["invoke"] += 1
            fault = self.faults.popleft() if self.faults else None
            full = self.max_sessions is not None and len(self.live) >= self.max_sessions
            if fault is None and full and session_id not in self.sessions:
                fault = "402"
        if fault in REFUSALS:
            return _error(*REFUSALS[fault])
        if fault == "drop":
            return None
        answer = self._forward(self.agent_url, session_id, body) if self.agent_url else self._begin(session_id, body)
        if fault == "hang":
            self._closed.wait()
        if fault in ("drop_after", "hang"):
            return None
        return _error(*REFUSALS["500"]) if fault == "500_after" else answer

    def _forward(self, agent_url: str, session_id: str, body: bytes) -> Answer:
        session = self.sessions.setdefault(session_id, Session(session_id, json.loads(body)))
        session.runs, session.stopped = session.runs + 1, False
        headers = {SESSION_HEADER: session_id, "Content-Type": "application/json"}
        try:
            request = urllib.request.Request(f"{agent_url}/invocations", body, headers)
            with urllib.request.urlopen(request, timeout=30) as response:
                return 200, "", response.read()
        except urllib.error.URLError:  # an answer of 400 and above included
            return _error(*REFUSALS["424"])

    def _begin(self, session_id: str, body: bytes) -> Answer:
        payload = json.loads(body)
        script = Script(**payload.get("script", {}))
        config = payload.get(ROLLOUT_FIELD, {})
        self._closed.wait(script.cold_start_s)
        with self._lock:
            session = self.sessions.setdefault(session_id, Session(session_id, payload))
            if not session.runs or session.stopped:
                session.runs += 1
                session.stopped = False
                if config.get("s3_bucket"):
                    session.agent = self._portal.submit(self._play(session, payload, script))
        if script.reply is not None:
            return _json(script.reply)
        if not config.get("s3_bucket"):
            return _json({"status": "processing"})
        key = result_key(config["exp_id"], config["input_id"], session_id)
        reply = {"status": "processing", "s3_bucket": config["s3_bucket"], "result_key": key}
        if script.heartbeat:
            reply["heartbeat_s"] = float(config.get("heartbeat_s") or 30.0)
        if script.proves and script.raw is None and config.get(PROOF_KEY_FIELD):
            reply[REPLY_FIELD] = SCHEME
        if script.runs_once:
            reply[RUNS_ONCE_FIELD] = True
        return _json(reply)

    async def _play(self, session: Session, payload: dict[str, Any], script: Script) -> None:
        config = payload[ROLLOUT_FIELD]
        store = self.store_for(config["s3_bucket"])
        key = result_key(config["exp_id"], config["input_id"], session.session_id)
        ends_s = [script.run_s] if script.die_at_s is None else [script.run_s, script.die_at_s]
        end_s = float("inf") if script.hang and script.die_at_s is None else min(ends_s)
        await self._live(store, alive_key(key), script, end_s, float(config.get("heartbeat_s") or 30.0))
        if script.die_at_s is not None:
            return
        if script.raw is not None:
            content = script.raw.encode()
        else:
            record: dict[str, Any] = {**script.result, "status_code": 200, "stop_reason": "end_turn"}
            if script.fail is not None:
                record = {"status_code": 500, "stop_reason": script.fail, "traceback": f"RuntimeError: {script.fail}"}
                if script.cause is not None:
                    block = {"outcome": "agent_error", "cause": script.cause, "failure": script.failure}
                    record[INFO_FIELD] = block
                if script.failure is not None:
                    record |= script.result
            record |= {"input_id": config["input_id"], "s3_bucket": config["s3_bucket"], "result_key": key}
            content = json.dumps(record | {"payload": redact_payload(payload)}).encode()
            if script.proves and config.get(PROOF_KEY_FIELD):
                content = seal(content, key, config[PROOF_KEY_FIELD])
        try:
            await store.put_async(key, content, create_only=True, durable=False)
        except ObjectExistsError:
            return
        session.record_at_s = time.monotonic()
        if script.heartbeat:
            await store.delete_async(alive_key(key))

    @staticmethod
    async def _live(store: ObjectStore, key: str, script: Script, end_s: float, heartbeat_s: float) -> None:
        began_s = time.monotonic()
        while True:
            if script.heartbeat and end_s > 0:
                beat = json.dumps({"beat_s": time.time()}).encode()
                await store.put_async(key, beat, durable=False)
            left_s = end_s - (time.monotonic() - began_s)
            if left_s <= 0:
                return
            await asyncio.sleep(min(left_s, heartbeat_s))

    def _stop(self, session_id: str) -> Answer:
        with self._lock:
            self.requests["stop"] += 1
        self.stops_end.wait()
        with self._lock:
            fault = self.stop_faults.popleft() if self.stop_faults else None
            if fault in REFUSALS:
                return _error(*REFUSALS[fault])
            session = self.sessions.get(session_id)
            if session is None or session.stopped:
                return _error(404, "ResourceNotFoundException", f"no session {session_id}")
            session.stopped = True
            if session.agent is not None:
                session.agent.cancel()
        return _json({})


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 4096

    def __init__(self, runtime: ScriptedRuntime) -> None:
        self.connections: set[socket.socket] = set()
        self.runtime = runtime
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        session_id = self.headers.get(SESSION_HEADER, "")
        answer = self.server.runtime._answer(urlsplit(self.path).path, session_id, body)
        if answer is None:
            self.close_connection = True
            return
        status, error, content = answer
        headers = {"Content-Type": "application/json", "Content-Length": str(len(content)), SESSION_HEADER: session_id}
        self.send_response(status)
        for name, value in {**headers, "x-amzn-ErrorType": error}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # the client left, or the test is over
            return

    def log_message(self, *_: object) -> None:
        pass


def _json(content: Any) -> Answer:
    return 200, "", json.dumps(content).encode()


def _error(status: int, name: str, message: str) -> Answer:
    """An error of the service."""
    return status, name, json.dumps({"message": message}).encode()
