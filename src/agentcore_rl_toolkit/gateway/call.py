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
from collections.abc import Mapping
from contextlib import aclosing

from aiohttp import web

from ..errors import CaptureError, UpstreamError
from ..messages.dialects import Delta
from ..messages.errors import RequestError
from .capture.record import CallRecord, Captured
from .context import Context
from .engine import Engine
from .engines.errors import upstream_error
from .failover import sample
from .http.messages import error_response, passed
from .record import AGENT_GONE, store_failure, store_reply
from .router import ServerLostError, StatusError, Worker, too_large
from .sessions.session import RecordedReply, Session
from .wire.request import CallRequest
from .wire.writers import Writer

log = logging.getLogger(__name__)


class Call:
    """A model call: its request, its reply so far, and its connections.

    ``reply`` is the buffer for the agent, and ``ended`` tells that it is complete. ``error`` is why the agent gets no reply, or
    no more of it; ``cut``: it did not end by itself. ``recorded`` is the stored reply, as the session remembers it.
    """

    def __init__(self, context: Context, session: Session, request: CallRequest, writer: Writer) -> None:
        self._context = context
        self.session = session
        self.request = request
        self.writer = writer
        self.call_id = ""
        self.index = -1
        self.started_s = time.time()
        self.first_token_s: float | None = None
        self.state = "rendering"
        self.worker: Worker | None = None
        self.versions: tuple[int | None, int | None] = (None, None)
        self.changed = False  # whether weights may have been changed while it was sampled
        self.stored = False
        self._engine: Engine | None = None
        self._task: asyncio.Task[None] | None = None
        self._limit: asyncio.Timeout | None = None
        self._aborted: RequestError | None = None
        self._end: list[bytes] | None = None  # of a stream, from its final delta on
        self.reply = bytearray()
        self.ended = False
        self.error: RequestError | None = None
        self.error_event = b""
        self.cut = False
        self.error_headers: Mapping[str, str] | None = None
        self.recorded: RecordedReply | None = None
        self.connections = 0
        self.woken_s = time.monotonic()
        self._waiting: list[asyncio.Future[None]] = []
        self._orphaned: asyncio.TimerHandle | None = None

    @classmethod
    def replayed(
        cls,
        context: Context,
        session: Session,
        request: CallRequest,
        writer: Writer,
        found: tuple[RecordedReply, CallRecord],
    ) -> Call:
        """A call that was recorded earlier. Raises: UpstreamError when its reply cannot be written again."""
        call = cls(context, session, request, writer)
        call.recorded, record = found
        call.reply += writer.replayed(record)
        call.ended = True
        return call

    def start(self, engine: Engine) -> None:
        """Make this one of the session's running calls."""
        context, session = self._context, self.session
        self.call_id, self.index = next(context.call_ids), session.next_index
        session.next_index += 1
        session.started_turns += 1
        session.inflight.add(self)
        context.running.add(self)
        self._engine = engine
        self._task = asyncio.get_running_loop().create_task(self._run(engine))

    async def _run(self, engine: Engine) -> None:
        try:
            await self.run(engine)
        except asyncio.CancelledError:
            if self._aborted is None:
                raise
            self._fail(self._aborted, kind=self._aborted.code if self._aborted.code == AGENT_GONE else None)
        except TimeoutError:
            self._fail(self._too_late())
        except StatusError as e:
            error = upstream_error(e.code, e.body)
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
            self._engine = self._task = None
            self.ended = True
            self._wake()

    async def run(self, engine: Engine) -> None:
        """Make the prompt, sample the reply, record it, and give the agent its end."""
        if self._aborted is not None:
            raise self._aborted
        async with asyncio.timeout(self._context.limits.call_s) as self._limit, engine.prompt(self):
            async with aclosing(sample(self, engine, self._context)) as blocks:
                async for deltas in blocks:
                    self._add(deltas)
            self.enter("recording", None)
            self._complete(*await store_reply(self, engine, self._context))

    def _complete(self, record: CallRecord, captured: Captured) -> None:
        """Give the agent the end of a recorded reply."""
        broken = self.writer.broken(captured, begun=bool(self.reply))
        if broken is not None:
            self._end_with(broken)
        elif self.request.stream:
            self.reply += b"".join(self._end or ()) + self.writer.finish(record)
        else:
            self.reply += self.writer.whole(record, captured)
        self.ended = True
        self._wake()

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
        if self.first_token_s is None:
            self.first_token_s = time.time()
        out: list[bytes] = []
        for delta in deltas:
            if delta.final and self._end is None:
                self._end = []
            (out if self._end is None else self._end).append(self.writer.write(delta))
        if data := b"".join(out):
            self.reply += data
            if len(self.reply) > self._context.limits.reply_bytes:
                raise too_large(self._context.limits.reply_bytes)
            self._wake()

    def reset(self) -> None:
        """Drop the part of a reply that was read, none of which is in the buffer: another one comes."""
        self._end = self.first_token_s = None
        self.writer.reset()
        if self._engine is not None:
            self._engine.reset()

    # -- failures

    def abort(self, error: RequestError) -> None:
        """Cancel the call: its session is closed, weights are published, its agent is gone. A recorded reply goes out."""
        if self._task is not None and self._aborted is None and self.state != "recording":
            self._aborted = error
            if self._limit is not None:  # else the task has not begun
                self._task.cancel()

    def _too_late(self) -> RequestError:
        self._context.counters["deadlines"] += 1
        if self.state == "held":
            return RequestError("the policy is still being updated; try again", kind="rate_limit")
        return RequestError(f"the call took longer than {self._context.limits.call_s:g} s", kind="timeout")

    def _unexpected(self, error: BaseException) -> RequestError:
        """An error of the gateway itself."""
        if isinstance(error, RecursionError) and self.state == "rendering":
            return RequestError("the request is nested too deeply")
        log.error("call %s of session %s broke", self.call_id, self.session.id, exc_info=error)
        why = f"the gateway could not handle this call ({type(error).__name__}); see its log"
        return RequestError(why, kind="internal")

    def _fail(self, error: RequestError, headers: Mapping[str, str] | None = None, *, kind: str | None = None) -> None:
        """The reply cannot be completed. ``kind`` is how the record names the error, if not by the error's kind."""
        if self.reply and error.code != AGENT_GONE:
            error = RequestError(str(error), kind="upstream")
        if not self.stored:
            store_failure(self, error, kind or error.kind, self._context)
        self.error_headers = headers
        self._end_with(error)
        self.cut = True

    def _end_with(self, error: RequestError) -> None:
        """Let the agent have an error in place of the reply, or of its rest."""
        self.error = error
        self.error_event = self.writer.error(error) if self.request.stream else b""

    # -- connections

    def _wake(self) -> None:
        """Let the connections write what is new."""
        self.woken_s = time.monotonic()
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def ping(self, now: float) -> None:
        """Let silent streams show that they are alive. The gateway calls this often."""
        if self.request.stream and now - self.woken_s > self._context.limits.keep_alive_s:
            self._wake()

    async def change(self) -> None:
        """Return when there is something to write."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    @property
    def pings(self) -> bool:
        """Whether a silent stream gets a ping: it has begun, or its engine answers in one piece."""
        return self.request.stream and (bool(self.reply) or (self._engine is not None and self._engine.pings))

    def connect(self) -> None:
        """Another connection waits for the reply."""
        self.connections += 1
        if self._orphaned is not None:
            self._orphaned.cancel()
            self._orphaned = None
        if self.recorded is not None:
            self.recorded.connections += 1

    def disconnect(self, *, whole: bool) -> None:
        """A connection has ended. ``whole``: the reply was written on it to the end."""
        self.connections -= 1
        if self.recorded is not None:
            self.recorded.sent(whole=whole)
        elif not self.connections and not self.ended:
            gone = RequestError(
                "the agent closed the connection before the reply was whole", status=499, code=AGENT_GONE
            )
            delay_s = self._context.limits.orphan_s
            self._orphaned = asyncio.get_running_loop().call_later(delay_s, self.abort, gone)


async def answer(call: Call, request: web.BaseRequest) -> web.StreamResponse:
    """Write a call's reply on one connection. The task of this coroutine is cancelled when the client goes away."""
    whole = False
    call.connect()
    try:
        while not (call.ended or call.reply) or (not call.request.stream and not call.ended):
            await call.change()
            if call.pings and not call.reply and not call.ended:
                break
        if call.error is not None and not call.reply:
            return error_response(call.request.dialect, call.error, call.error_headers)
        if not call.request.stream:
            response: web.StreamResponse = web.Response(body=bytes(call.reply), headers=call.writer.headers())
            await response.prepare(request)
        else:
            response = web.StreamResponse(headers=call.writer.headers())
            await response.prepare(request)
            if not (call.reply or call.ended):
                await response.write(call.writer.ping())
            await _write_stream(call, response)
            if call.error_event:
                await response.write(call.error_event)
        if call.cut and request.transport is not None:
            request.transport.close()  # without the mark of HTTP that the reply has ended
            return response
        await response.write_eof()
        whole = call.error is None and request.transport is not None and not request.transport.is_closing()
        return response
    finally:
        call.disconnect(whole=whole)


async def _write_stream(call: Call, response: web.StreamResponse) -> None:
    """Write the buffer as it grows, and pings while it does not."""
    written = 0
    while written < len(call.reply) or not call.ended:
        if written < len(call.reply):
            data = bytes(memoryview(call.reply)[written:]) if written else bytes(call.reply)
            written += len(data)
            await response.write(data)
        else:
            await call.change()
            if written == len(call.reply) and call.pings and not call.ended:
                await response.write(call.writer.ping())
