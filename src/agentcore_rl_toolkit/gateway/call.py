"""One model call. Two coroutines are its life: `Call.run` and `answer`.

`Call.run` is a task of the session. It makes the prompt, samples the reply, and records it. All that the agent is to get is in
one buffer. `answer` runs once per connection: it writes the buffer from its beginning, and waits for more. So a slow agent holds
up its own connection only, and an agent that hung up and asks again gets a new `answer` on the call that still runs. A call
without a connection is cancelled after `Limits.orphan_s`.

A reply that is not streamed, and the end of a stream, wait until the record is in the store: an agent that has read the finish
reason has a complete reply.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from aiohttp import web

from ..errors import CaptureError, UpstreamError
from ..messages.errors import RequestError
from ..messages.wire import Delta
from .capture.record import CallRecord, Captured
from .context import Context
from .engine import Engine
from .engines.errors import upstream_error
from .http.messages import error_response, passed
from .record import AGENT_GONE, Recorder
from .reply import Reply
from .routing.router import ServerLostError, StatusError, Worker, too_large
from .sessions.session import RecordedReply, Session
from .wire.request import CallRequest
from .writers import Writer

log = logging.getLogger(__name__)

MAX_TRIES = 4
_TRY_ELSEWHERE = frozenset({429, 502, 503, 504})


class Call:
    """A running model call of a session."""

    def __init__(
        self, context: Context, session: Session, request: CallRequest, engine: Engine, writer: Writer
    ) -> None:
        self._context = context
        self.session = session
        self.request = request
        self._engine = engine
        self.writer = writer
        self.recorder = Recorder(context, session, request)
        self.reply = Reply(self._orphaned, context.limits.orphan_s)
        self.state = "rendering"
        self._limit: asyncio.Timeout | None = None
        self._aborted: RequestError | None = None
        self._end: list[bytes] | None = None  # of a stream, from its final delta on
        session.started_turns += 1
        session.inflight.add(self)
        context.running.calls.add(self)
        self._task: asyncio.Task[None] | None = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            await self.run()
        except asyncio.CancelledError:
            if self._aborted is None:
                raise
            self._fail(self._aborted, kind=AGENT_GONE if self._aborted.code == AGENT_GONE else None)
        except TimeoutError:
            self._fail(self._too_late())
        except StatusError as e:
            error = upstream_error(e.http_status, e.body)
            headers = {name: value for name, value in passed(e.headers).items() if name != "content-type"}
            self._fail(error, headers, kind=error.code or error.kind)
        except RequestError as e:
            self._fail(e)
        except (CaptureError, UpstreamError, ServerLostError) as e:
            self._fail(RequestError(str(e), kind="upstream"))
        except BaseException as e:  # a panic in the tokenizer's Rust code is no `Exception`
            self._fail(self._unexpected(e))
        finally:
            self.session.inflight.discard(self)
            self._context.running.discard(self)
            self._task = None
            self.reply.end()

    async def run(self) -> None:
        """Make the prompt, sample the reply, record it, and give the agent its end."""
        if self._aborted is not None:
            raise self._aborted
        engine = self._engine
        async with asyncio.timeout(self._context.limits.call_s) as self._limit, engine.prompt(self.recorder.call_id):
            async with aclosing(self._sampled(engine)) as blocks:
                async for deltas in blocks:
                    self._add(deltas)
            self.enter("recording", None)
            self._complete(*await self.recorder.store_reply(engine, self.reply))

    async def _sampled(self, engine: Engine) -> AsyncGenerator[list[Delta], None]:
        """The deltas of the reply. While nothing of it has reached the agent, another server may take the call.

        Raises: ServerLostError, StatusError, RequestError, CaptureError, UpstreamError.
        """
        context, session, recorder = self._context, self.session, self.recorder
        running, router, outage, call_s = context.running, context.router, context.outage, context.limits.call_s
        tried: tuple[Worker, ...] = ()
        second = False  # whether the only server has been given a second chance
        until: float | None = None  # when the call has waited long enough for a server to come up
        self.state = "sampling"
        while True:
            await running.resumed(self)
            worker = session.worker = recorder.worker = router.pick(session.worker, tried)
            if worker is None:
                why = "the gateway has no inference server; add one with POST /admin/workers"
                raise RequestError(why, kind="overloaded")
            begun, changes = running.weight_version, running.changes
            try:
                with worker.serving():
                    async with aclosing(engine.sample(worker)) as blocks:
                        async for deltas in blocks:
                            yield deltas
                recorder.versions = engine.versions(begun, running.weight_version)
                recorder.changed = running.changes != changes
                return
            except StatusError as e:
                tried = (*tried, worker)
                if e.http_status not in _TRY_ELSEWHERE or len(tried) >= MAX_TRIES or router.pick(None, tried) is None:
                    raise
            except ServerLostError as e:
                if self.reply.buffer:
                    raise
                tried = (*tried, worker)
                other = router.pick(None, tried)
                if other is None and not (second or e.refused or worker.draining):
                    second, tried = True, tried[:-1]
                elif other is None or len(tried) >= MAX_TRIES:
                    if not outage.waits():
                        raise
                    now = asyncio.get_running_loop().time()
                    until = until or now + context.limits.outage_s
                    if now >= until:
                        raise
                    self.enter("held", None)
                    await outage.over(until)
                    self.enter("sampling", call_s)
                    second, tried = False, ()
            context.counters["retries"] += 1
            self._end = recorder.first_token_s = None
            self.writer.reset()
            engine.reset()

    def enter(self, stage: str, limit_s: float | None) -> None:
        """Begin a stage of the call, which has its own deadline."""
        self.state = stage
        if self._limit is not None:
            self._limit.reschedule(None if limit_s is None else asyncio.get_running_loop().time() + limit_s)

    @property
    def deadline(self) -> float | None:
        """When the call's stage must have ended, on the event loop's clock."""
        return None if self._limit is None else self._limit.when()

    def _add(self, deltas: list[Delta]) -> None:
        """Put a part of a stream into the reply. From the final delta on it waits for the record."""
        if not deltas or not self.request.stream:
            return
        if self.recorder.first_token_s is None:
            self.recorder.first_token_s = time.time()
        out: list[bytes] = []
        for delta in deltas:
            if delta.final and self._end is None:
                self._end = []
            (out if self._end is None else self._end).append(self.writer.write(delta))
        self.reply.add(b"".join(out))
        if len(self.reply.buffer) > self._context.limits.reply_bytes:
            raise too_large(self._context.limits.reply_bytes)

    def _complete(self, record: CallRecord, captured: Captured) -> None:
        """Give the agent the end of a recorded reply."""
        broken = self.writer.broken(captured, begun=bool(self.reply.buffer))
        if broken is not None:
            self._end_with(broken)
        elif self.request.stream:
            self.reply.add(b"".join(self._end or ()) + self.writer.finish(record))
        else:
            self.reply.add(self.writer.whole(record, captured))
        self.reply.end()

    # -- failures

    def abort(self, error: RequestError) -> None:
        """Cancel the call: its session is closed, weights are published, its agent is gone. A recorded reply goes out."""
        if self._task is not None and self._aborted is None and self.state != "recording":
            self._aborted = error
            if self._limit is not None:  # else the task has not begun
                self._task.cancel()

    def _orphaned(self) -> None:
        why = "the agent closed the connection before the reply was whole"
        self.abort(RequestError(why, status=499, code=AGENT_GONE))

    def _too_late(self) -> RequestError:
        self._context.counters["deadlines"] += 1
        if self.state == "held":
            return RequestError("the policy is still being updated; try again", kind="rate_limit")
        return RequestError(f"the call took longer than {self._context.limits.call_s:g} s", kind="timeout")

    def _unexpected(self, error: BaseException) -> RequestError:
        """An error of the gateway itself."""
        if isinstance(error, RecursionError) and self.state == "rendering":
            return RequestError("the request is nested too deeply")
        log.error("call %s of session %s broke", self.recorder.call_id, self.session.id, exc_info=error)
        why = f"the gateway could not handle this call ({type(error).__name__}); see its log"
        return RequestError(why, kind="internal")

    def _fail(self, error: RequestError, headers: Mapping[str, str] | None = None, *, kind: str | None = None) -> None:
        """The reply cannot be completed. ``kind`` is how the record names the error, if not by the error's kind."""
        begun = bool(self.reply.buffer)
        if begun and error.code != AGENT_GONE:
            error = RequestError(str(error), kind="upstream")
        self.recorder.store_failure(error, kind or error.kind, begun=begun)
        self.reply.error_headers = headers
        self.reply.cut = True
        self._end_with(error)

    def _end_with(self, error: RequestError) -> None:
        """Let the agent have an error in place of the reply, or of its rest."""
        self.reply.error = error
        self.reply.error_event = self.writer.error(error) if self.request.stream else b""

    # -- silent streams

    def ping(self, now: float) -> None:
        """Let a silent stream show that it is alive. The gateway calls this often."""
        silent_s = now - self.reply.changed_s
        if self.request.stream and silent_s > self._context.limits.keep_alive_s:
            self.reply.wake()

    @property
    def pings(self) -> bool:
        """Whether a silent stream gets a ping: it has begun, or its engine answers in one piece."""
        return not self.reply.ended and (bool(self.reply.buffer) or self._engine.pings)


class RecordedCall:
    """A call that was recorded earlier, for a request that repeats it. Raises: UpstreamError when its reply cannot be written."""

    pings = False

    def __init__(self, request: CallRequest, writer: Writer, found: tuple[RecordedReply, CallRecord]) -> None:
        self.request = request
        self.writer = writer
        self.reply = Reply()
        self.reply.recorded, record = found
        self.reply.add(writer.replayed(record))
        self.reply.end()


async def answer(call: Call | RecordedCall, request: web.BaseRequest) -> web.StreamResponse:
    """Write a call's reply on one connection. The task of this coroutine is cancelled when the client goes away."""
    reply, stream, whole = call.reply, call.request.stream, False
    reply.connect()
    try:
        while not (reply.ended or (stream and reply.buffer)):
            await reply.change()
            if stream and call.pings:
                break
        if reply.error is not None and not reply.buffer:
            return error_response(call.request.dialect, reply.error, reply.error_headers)
        if not stream:
            response: web.StreamResponse = web.Response(body=bytes(reply.buffer), headers=call.writer.headers())
            await response.prepare(request)
        else:
            response = web.StreamResponse(headers=call.writer.headers())
            await response.prepare(request)
            if not (reply.buffer or reply.ended):
                await response.write(call.writer.ping())
            await _write_stream(call, response)
            if reply.error_event:
                await response.write(reply.error_event)
        if reply.cut and request.transport is not None:
            request.transport.close()  # without the mark of HTTP that the reply has ended
            return response
        await response.write_eof()
        whole = reply.error is None and request.transport is not None and not request.transport.is_closing()
        return response
    finally:
        reply.disconnect(whole=whole)


async def _write_stream(call: Call | RecordedCall, response: web.StreamResponse) -> None:
    """Write the buffer as it grows, and pings while it does not."""
    reply, written = call.reply, 0
    while written < len(reply.buffer) or not reply.ended:
        if written < len(reply.buffer):
            data = bytes(memoryview(reply.buffer)[written:])
            written += len(data)
            await response.write(data)
        else:
            await reply.change()
            if call.pings and written == len(reply.buffer):
                await response.write(call.writer.ping())
