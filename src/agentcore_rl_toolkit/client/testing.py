"""A scripted AgentCore data plane for tests: real HTTP, real wire shapes, agents that do what their payload says.

It runs on a thread of this process and answers `InvokeAgentRuntime` and `StopRuntimeSession` of unmodified AWS clients.
Instead of starting processes it plays agents: an invoke is accepted, signs of life and a record appear in the store of
the `_rollout` block at the times that ``payload["script"]`` asks for. Use it to test code that drives rollouts; use the
local runtime to run real agents.

`GET /_local/records` tells when each record was stored (seconds of the machine's monotonic clock).

    with ScriptedRuntime() as runtime, RolloutClient(runtime.arn, url, "exp", endpoint_url=runtime.url) as client:
        assert client.invoke({"script": {"run_s": 0.1, "result": {"rewards": 1.0}}}).result()["rewards"] == 1.0
"""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from .._servers.process import stop_listening
from ..contract import INFO_FIELD, ROLLOUT_FIELD, RUNS_ONCE_FIELD, alive_key, redact_payload, result_key
from ..errors import ObjectExistsError
from ..proof import PROOF_KEY_FIELD, REPLY_FIELD, SCHEME, seal
from ..store import ObjectStore, open_store
from ._scripted_answers import REFUSALS, error_answer, post, response_bytes

SESSION_HEADER = "x-amzn-bedrock-agentcore-runtime-session-id"
ARN = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/scripted-0123456789"
TEST_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-west-2"}


@dataclass(kw_only=True)
class Script:
    """What one agent does. Units: seconds.

    Attributes:
        cold_start_s: time until the invoke is answered.
        run_s: time from then to the record.
        result: members of the record.
        fail: the agent raises: a record with ``status_code`` 500.
        cause: whose failure that record says it is, as `contract.Cause`; None: it says nothing, as the published toolkit's.
        failure: what the policy failed at, where it is the cause. The record then has the rewards of `result`.
        raw: bytes to store instead of a record (text).
        die_at_s: the session dies this long after its start, without a record.
        heartbeat: whether the agent writes signs of life (agents of the published toolkit do not).
        proves: whether records prove where they come from (those of the published toolkit do not, nor does a raw one).
        runs_once: whether its answer says that a session's payload runs once however often it is delivered; None: where it
            writes signs of life and the runtime's `dedupe` makes it true.
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
    runs_once: bool | None = None
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
    task: asyncio.Task[None] | None = None


class ScriptedRuntime:
    """The data plane. Start it with `with`, or `start` and `close`.

    Attributes:
        sessions: by session id, all that were ever started.
        requests: counts by operation: invoke, stop, and "unknown" for everything else.
        faults: what to do with the next invokes, in order: "429", "402", "409", "500", "503", "424" (answer so and start
            nothing), "500_after" (start the agent, then answer 500), "drop" (close the connection without an answer and
            without starting anything), "drop_after" (start the agent, then close), "hang" (never answer), None (nothing
            special).
        stop_faults: the same for stops.
        max_sessions: live sessions before 402.
        agent_url: pass invokes on to a running agent (its ``/invocations``) instead of playing scripts.
        dedupe: a second invoke of a live session does not start its agent again.
    """

    def __init__(
        self,
        *,
        faults: Iterable[str | None] = (),
        max_sessions: int | None = None,
        dedupe: bool = True,
        tps: float | None = None,
    ) -> None:
        self.arn = ARN
        self.sessions: dict[str, Session] = {}
        self.requests: Counter[str] = Counter()
        self.faults: deque[str | None] = deque(faults)
        self.stop_faults: deque[str | None] = deque()
        self.max_sessions = max_sessions
        self.dedupe = dedupe
        self.tps = tps
        self.agent_url: str | None = None
        self.store_for: Callable[[str], ObjectStore] = functools.cache(open_store)
        self._tokens, self._filled_s = tps or 0.0, time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._port = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._connections: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """Endpoint URL for the client."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def live(self) -> list[str]:
        """Sessions started and not stopped."""
        return [s.session_id for s in self.sessions.values() if s.runs and not s.stopped]

    @property
    def runs(self) -> int:
        """How many times an agent was started, over all sessions."""
        return sum(s.runs for s in self.sessions.values())

    def start(self) -> ScriptedRuntime:
        """Begin to listen on a free loopback port."""
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="scripted-runtime", daemon=True)
        self._thread.start()
        ready.wait()
        return self

    def close(self) -> None:
        """Stop listening and end all agents."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop = None

    def __enter__(self) -> ScriptedRuntime:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, ready: threading.Event) -> None:
        loop = self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        server = loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=4096))
        self._port = server.sockets[0].getsockname()[1]
        ready.set()
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(stop_listening(server))
            tasks, writers = asyncio.all_tasks(loop), set(self._connections)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            for writer in writers | self._connections:  # just closed, one with bytes left would wait for its reader
                writer.transport.abort()
            for _ in range(3):  # turns in which aborted connections are closed
                loop.run_until_complete(asyncio.sleep(0))
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)  # at once: a task cancelled before its first step closes nothing
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")
                _, target, _ = lines[0].split(" ", 2)
                headers = {
                    k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)
                }
                if headers.get("expect") == "100-continue":
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                answer = await self._route(urlsplit(target).path, headers, body)
                if answer is None:
                    writer.transport.abort()
                    return
                status, name, content, session_id = answer
                writer.write(response_bytes(status, name, content, session_id))
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            return  # the client left, or the test is over
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _route(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes, str] | None:
        if path == "/_local/records":
            times_s = {s.session_id: s.record_at_s for s in self.sessions.values() if s.record_at_s is not None}
            return 200, "", json.dumps(times_s).encode(), ""
        pieces = path.strip("/").split("/")
        session_id = headers.get(SESSION_HEADER, "")
        if len(pieces) != 3 or pieces[0] != "runtimes" or unquote(pieces[1]) != self.arn:
            self.requests["unknown"] += 1
            return error_answer(404, "ResourceNotFoundException", f"no agent at {path}", session_id)
        if pieces[2] == "invocations":
            return await self._invoke(session_id, body)
        if pieces[2] == "stopruntimesession":
            return self._stop(session_id)
        return error_answer(404, "ResourceNotFoundException", path, session_id)

    async def _invoke(self, session_id: str, body: bytes) -> tuple[int, str, bytes, str] | None:
        self.requests["invoke"] += 1
        fault = self.faults.popleft() if self.faults else None
        if fault is None and self._over_rate():
            fault = "429"
        alive = sum(1 for s in self.sessions.values() if s.runs and not s.stopped)
        if (
            fault is None
            and self.max_sessions is not None
            and alive >= self.max_sessions
            and session_id not in self.sessions
        ):
            fault = "402"
        if fault in REFUSALS:
            status, name, message = REFUSALS[fault]
            return error_answer(status, name, message, session_id)
        if fault == "drop":
            return None
        if self.agent_url is not None:
            answer = await self._forward(self.agent_url, session_id, body)
            if fault == "drop_after":
                return None
            return error_answer(*REFUSALS["500"], session_id) if fault == "500_after" else answer
        payload = json.loads(body)
        script = Script(**payload.get("script", {}))
        if script.cold_start_s:
            await asyncio.sleep(script.cold_start_s)
        reply = await self._begin(session_id, payload, script)
        if fault == "drop_after":
            return None
        if fault == "500_after":
            return error_answer(*REFUSALS["500"], session_id)
        if fault == "hang":
            await asyncio.Event().wait()
        return 200, "", json.dumps(reply).encode(), session_id

    async def _forward(self, agent_url: str, session_id: str, body: bytes) -> tuple[int, str, bytes, str]:
        session = self.sessions.setdefault(session_id, Session(session_id, json.loads(body)))
        session.runs, session.stopped = session.runs + 1, False
        header = {"X-Amzn-Bedrock-AgentCore-Runtime-Session-Id": session_id, "Content-Type": "application/json"}
        status, content = await asyncio.to_thread(post, agent_url + "/invocations", body, header)
        if status >= 400:
            return error_answer(*REFUSALS["424"], session_id)
        return 200, "", content, session_id

    def _over_rate(self) -> bool:
        if self.tps is None:
            return False
        now = time.monotonic()
        self._tokens = min(self.tps, self._tokens + (now - self._filled_s) * self.tps)
        self._filled_s = now
        if self._tokens < 1:
            return True
        self._tokens -= 1
        return False

    async def _begin(self, session_id: str, payload: dict[str, Any], script: Script) -> Any:
        session = self.sessions.setdefault(session_id, Session(session_id, payload))
        config = payload.get(ROLLOUT_FIELD, {})
        if not (self.dedupe and session.runs and not session.stopped):
            session.runs += 1
            session.stopped = False
            task = asyncio.create_task(self._play(session, payload, script))
            session.task = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if script.reply is not None:
            return script.reply
        if not config.get("s3_bucket"):
            return {"status": "processing"}
        key = result_key(config["exp_id"], config["input_id"], session_id)
        reply = {"status": "processing", "s3_bucket": config["s3_bucket"], "result_key": key}
        if script.heartbeat:
            reply["heartbeat_s"] = float(config.get("heartbeat_s") or 30.0)
        if script.proves and script.raw is None and config.get(PROOF_KEY_FIELD):
            reply[REPLY_FIELD] = SCHEME
        if script.runs_once or (script.runs_once is None and script.heartbeat and self.dedupe):
            reply[RUNS_ONCE_FIELD] = True
        return reply

    async def _play(self, session: Session, payload: dict[str, Any], script: Script) -> None:
        config = payload.get(ROLLOUT_FIELD, {})
        if not config.get("s3_bucket"):
            return
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

    def _stop(self, session_id: str) -> tuple[int, str, bytes, str] | None:
        self.requests["stop"] += 1
        fault = self.stop_faults.popleft() if self.stop_faults else None
        if fault in REFUSALS:
            status, name, message = REFUSALS[fault]
            return error_answer(status, name, message, session_id)
        if fault == "drop":
            return None
        session = self.sessions.get(session_id)
        if session is None or session.stopped:
            return error_answer(404, "ResourceNotFoundException", f"no session {session_id}", session_id)
        session.stopped = True
        if session.task is not None:
            session.task.cancel()
        return 200, "", b"{}", session_id
