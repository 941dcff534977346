"""A model call: the coroutines `Call.run` and `Call.answer`.

`Call.run` is a task of the session. It makes the prompt, samples the reply into one buffer, and records it. `answer` runs once
per connection: it writes the buffer from its beginning, and waits for more. So a slow agent delays only its own connection. An
agent that disconnected and sends its request again gets a new `answer` on the running call. A call without a connection is
cancelled after `Limits.orphan_s`.

A reply that is not streamed, and the end of a stream, wait until the record is in the store: an agent that has read the finish
reason has a complete reply.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

import aiohttp
from aiohttp import web

from ..errors import CaptureError, UpstreamError
from ..messages.errors import RequestError
from ..messages.wire import DIALECTS, Delta, StreamEncoder
from .context import Attempt, Engine
from .engines.errors import upstream_error
from .http.responses import JSON, error_response, passed
from .record import AGENT_GONE, Recorder
from .router import ServerLostError, StatusError, Worker
from .sessions import RecordedReply

log = logging.getLogger(__name__)

MAX_TRIES = 4
_TRY_ELSEWHERE = frozenset({429, 502, 503, 504})


class Call:
    """A running model call of a session.

    ``buffer`` is the reply. Nothing is added once it has ``ended``. ``error`` is why the agent gets no reply, or no more of it;
    ``cut``: the reply did not end by itself.
    """

    def __init__(self, engine: Engine, reply: RecordedReply) -> None:
        self._context, self.session, self.request = engine.context, engine.session, engine.request
        self._engine = engine
        self.reply = reply
        self.state = "starting"
        self.buffer = bytearray()
        self.headers: Mapping[str, str] | None = None  # those of the engine's reply that the agent gets
        self.ended = False
        self.error: RequestError | None = None
        self.cut = False
        self._encoder: StreamEncoder | None = None
        self._end: list[bytes] | None = None  # the end of a stream, from its final delta
        self._changed = asyncio.Event()  # set when connections can write more
        self._orphan_timer: asyncio.TimerHandle | None = None
        self._deadline = asyncio.timeout(None)  # the stage ends then
        self._aborted: RequestError | None = None

    def start(self, recorder: Recorder) -> None:
        """Start the task of the call. A repeated call has no task, because `add` gives it the recorded reply."""
        self._recorder, self.record = recorder, recorder.record
        self.session.started_turns += 1
        self.session.inflight.add(self)
        self._context.running.calls.add(self)
        self._task = asyncio.create_task(self.run())

    async def run(self) -> None:
        """Make the prompt, sample the reply, record it, and give the agent its end."""
        engine, record, stored = self._engine, self.record, False
        try:
            if self._aborted is not None:
                raise self._aborted
            try:
                captured = (await self._sampled()).captured()
                broken = await self._recorder.store_reply(captured, begun=bool(self.buffer))
                if broken is not None:
                    self._end_with(broken)
                elif self._encoder is not None:
                    self.add(b"".join(self._end or ()) + self._encoder.finish(), ended=True)
                else:
                    self.add(engine.whole(record), ended=True)
                stored = True
            finally:
                await engine.release(stored=stored)
        except asyncio.CancelledError:
            if self._aborted is None:
                raise
            self._fail(self._aborted)
        except StatusError as e:
            self._fail(upstream_error(e.http_status, e.body), passed(e.headers))
        except RequestError as e:
            self._fail(e)
        except (CaptureError, UpstreamError, ServerLostError) as e:
            self._fail(RequestError(str(e), kind="upstream"))
        except BaseException as e:  # a panic in the tokenizer's Rust code is not an `Exception`
            log.error("call %s of session %s failed unexpectedly", record.call_id, self.session.id, exc_info=e)
            why = f"the gateway could not handle this call ({type(e).__name__}); see its log"
            self._fail(RequestError(why, kind="internal"))
        finally:
            if not self.ended:
                self.add(b"", ended=True)
            self.session.inflight.discard(self)
            self._context.running.discard(self)

    async def _sampled(self) -> Attempt:
        """Make the prompt and sample the reply, each stage within its deadline."""
        limits = self._context.limits
        try:
            async with self._deadline:
                self.enter("rendering", limits.call_s)
                await self._engine.prepare(self.record.call_id)
                return await self._sample()
        except TimeoutError as e:
            self._context.counters["deadlines"] += 1
            if self.state == "held":
                raise RequestError("the policy is still being updated; try again", kind="rate_limit") from e
            raise RequestError(f"the call took longer than {limits.call_s:g} s", kind="timeout") from e
        finally:
            self.state = "recording"  # an abort does not end a call in this state

    async def _sample(self) -> Attempt:
        """Sample the reply. While nothing of it has reached the agent, another server may take the call."""
        context, router, running = self._context, self._context.router, self._context.running
        tried: list[Worker] = []
        second = False  # True if the only server was tried twice
        until: float | None = None  # the end of the wait for a server
        self.state = "sampling"
        while True:
            while running.paused:
                await running.resumed(self)
            try:
                return await self._exchange(tried)
            except StatusError as e:
                if e.http_status not in _TRY_ELSEWHERE or len(tried) >= MAX_TRIES or router.pick(None, tried) is None:
                    raise
            except ServerLostError as e:
                if self.buffer:
                    raise
                other = router.pick(None, tried)
                if other is None and not (second or e.refused or tried[-1].draining):
                    second = True
                    tried.pop()
                elif other is None or len(tried) >= MAX_TRIES:
                    if not router.is_down or (until is not None and time.monotonic() >= until):
                        raise
                    until = until or time.monotonic() + context.limits.outage_s
                    with running.held(self, None):
                        await router.wait_until_up(until)
                    second, tried = False, []
            context.counters["retries"] += 1
            self._end, self.record.first_token_s, self._encoder = None, None, None

    async def _exchange(self, tried: list[Worker]) -> Attempt:
        """Send the request to a server that was not ``tried``, which then is, and read its reply."""
        running, session, recorder = self._context.running, self.session, self._recorder
        reply, begun = self._engine.attempt(), running.weight_version
        worker = session.worker = self._context.router.pick(session.worker, tried)
        if worker is None:
            raise RequestError("the gateway has no engine; add one with POST /admin/workers", kind="overloaded")
        self.record.upstream = worker.id
        tried.append(worker)
        with worker.counted():
            try:
                if reply.path:
                    stream = self.request.stream
                    response = await worker.post(reply.path, reply.body, session=session.id, stream=stream)
                    await self._read(response, reply)
                else:
                    self._forward(await self._engine.sample(worker))
            except aiohttp.ClientError as e:
                raise worker.error_of(e) from e
            except BaseException as e:
                if not isinstance(e, StatusError):
                    self._engine.cancel(worker)
                raise
            if reply.reported is not None:
                worker.report_weights(reply.reported)
            if worker.failures:  # perhaps it was restarted
                await worker.ask_weights()
        recorder.lost_weights = worker.forgot
        recorder.published = self._engine.versions or (begun, running.weight_version)
        return reply

    async def _read(self, response: aiohttp.ClientResponse, reply: Attempt) -> None:
        """Read a server's reply. Raises: StatusError, RequestError, CaptureError, UpstreamError, aiohttp.ClientError."""
        parts, received, most = list[bytes](), 0, self._context.limits.reply_bytes
        try:
            if self._engine.passes:
                self.headers = passed(response.headers)
            streaming = self.request.stream and response.status == 200
            while not response.content.at_eof():
                data = await response.content.readany()
                received += len(data)
                if received > most:
                    raise RequestError(f"the reply is larger than {most} bytes (setting reply_bytes)", kind="upstream")
                if streaming:
                    self._forward(reply.feed(data))
                else:
                    parts.append(data)
        finally:
            response.release()
        if response.status != 200:
            raise StatusError(response.status, response.headers, b"".join(parts))
        if not streaming:
            reply.read(b"".join(parts))

    def enter(self, stage: str, limit_s: float | None) -> None:
        """Begin a stage of the call, which has its own deadline."""
        self.state = stage
        self._deadline.reschedule(None if limit_s is None else asyncio.get_running_loop().time() + limit_s)

    @property
    def ending(self) -> bool:
        """Return True if the call has ended or can only fail: it was aborted, or its deadline has passed."""
        return self.ended or self._aborted is not None or self._deadline.expired()

    @property
    def deadline(self) -> float | None:
        """Return the deadline of the call's stage, on the event loop's clock."""
        return None if self.state == "recording" else self._deadline.when()

    def _forward(self, deltas: list[Delta]) -> None:
        """Put a part of a stream into the reply. From the final delta on it waits for the record."""
        if not deltas or not self.request.stream:
            return
        if self.record.first_token_s is None:
            self.record.first_token_s = time.time()
        out: list[bytes] = []
        for delta in deltas:
            if delta.final and self._end is None:
                self._end = []
            parts = out if self._end is None else self._end
            if self._encoder is None:
                self._encoder = self._engine.encoder()
                parts.append(self._encoder.start())
            parts.append(self._encoder.feed(delta))
        self.add(b"".join(out))

    def ping(self) -> bytes:
        """Return the sign of a stream that more is coming."""
        return DIALECTS[self.request.dialect].idle if self._encoder is None else self._encoder.ping()

    def error_event(self, error: RequestError) -> bytes:
        """Return the end of a stream that cannot be completed."""
        return (self._encoder or self._engine.encoder()).error(error)

    def abort(self, error: RequestError) -> None:
        """Cancel the call, unless its reply or its failure is being recorded."""
        if not self.ending and self.state != "recording":
            self._aborted = error
            if self.state != "starting":  # else the task has not begun
                self._deadline.reschedule(None)  # a second cancellation would end the wait for a rendering thread
                self._task.cancel()

    def _fail(self, error: RequestError, headers: Mapping[str, str] | None = None) -> None:
        """End the call with an error."""
        begun = bool(self.buffer)
        if begun and error.code != AGENT_GONE:
            error = RequestError(str(error), kind="upstream")
        self._recorder.store_failure(error, begun=begun)
        self.cut = True
        self._end_with(error, headers)

    def _end_with(self, error: RequestError, headers: Mapping[str, str] | None = None) -> None:
        """Give the agent an error in place of the reply, or of its end."""
        self.error, self.headers = error, headers
        self.add(self.error_event(error) if self.buffer and self.request.stream else b"", ended=True)

    def add(self, data: bytes, *, ended: bool = False) -> None:
        """Let the connections write more."""
        self.buffer += data
        self.ended = self.ended or ended
        if data or ended:
            self._changed.set()
            self._changed.clear()

    async def more(self) -> bool:
        """Wait until there is something to write. Return False after a silence in which a stream gets a ping."""
        if not (self.request.stream and (self.buffer or self._engine.pings)):
            return await self._changed.wait()
        try:
            async with asyncio.timeout(self._context.limits.keep_alive_s):
                return await self._changed.wait()
        except TimeoutError:
            return False

    async def answer(self, http: web.BaseRequest) -> web.StreamResponse:
        """Write a call's reply on one connection. The task of this coroutine is cancelled when the client disconnects."""
        stream, whole, written = self.request.stream, False, 0
        self.reply.connections += 1
        if self._orphan_timer is not None:
            self._orphan_timer.cancel()
        try:
            while not (self.ended or (stream and self.buffer)) and await self.more():
                pass
            if self.error is not None and not self.buffer:
                return error_response(self.request.dialect, self.error, self.headers)
            own = {"content-type": JSON}
            if stream:
                own = {"content-type": DIALECTS[self.request.dialect].stream_type, "cache-control": "no-cache"}
            headers = {**own, **(self.headers or {})}
            if self.ended and self.error is None:
                reply = web.Response(body=bytes(self.buffer), headers=headers)
                await reply.prepare(http)
                await reply.write_eof()
                whole = True
                return reply
            response = web.StreamResponse(headers=headers)
            await response.prepare(http)
            if not (self.buffer or self.ended):
                await response.write(self.ping())
            while True:
                rest = bytes(memoryview(self.buffer)[written:])
                written += len(rest)
                if self.ended:
                    break
                if rest:
                    await response.write(rest)
                elif not await self.more():
                    await response.write(self.ping())
            if self.error is not None and not self.buffer:
                rest = self.error_event(self.error)
            if self.cut and http.transport is not None:
                await response.write(rest)
                http.transport.close()  # without the mark of HTTP that the reply has ended
                return response
            await response.write_eof(rest)
            whole = self.error is None
            return response
        finally:
            is_open = http.transport is not None and not http.transport.is_closing()
            self.reply.sent(whole=whole and is_open)
            if not (self.reply.connections or self.ended):
                why = "the agent closed the connection before the reply was whole"
                gone, loop = RequestError(why, status=499, code=AGENT_GONE), asyncio.get_running_loop()
                self._orphan_timer = loop.call_later(self._context.limits.orphan_s, self.abort, gone)
