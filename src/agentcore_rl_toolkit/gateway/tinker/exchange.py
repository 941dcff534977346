"""A call's way to Tinker's sampling service and back: a `calls.engine.Transport`.

While such a call is routed and sent (`calls.states`) it has steps of its own::

    opening     no sampler yet: the service's session is being opened
    asking      `asample` is with the service, which answers with the id of a request
    waiting     `retrieve_future` hangs there; it answers after half a minute if nothing is ready, and is sent again

Asking twice with the same number is one request for the service, and waiting twice changes nothing, so a broken
connection or a 5xx is simply tried again, for `Limits.patience_s`; as long as that, a 429 (the service has too much to
do) is waited out. Nothing of an answer reaches the agent before it is whole. An agent that streams gets comment lines
meanwhile, which every client of server-sent events skips, so that nothing in between takes the connection for dead.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

from ...errors import CaptureError
from ...messages.dialects import RequestError
from ..calls.agent import TranslatingAgent
from ..calls.call import Call
from ..calls.context import Context
from ..calls.engine import Owner
from ..calls.exchange import MAX_TRIES, Route, try_again
from ..calls.states import State
from ..engines import Piece
from ..engines import tinker as wire
from ..engines.errors import upstream_error
from ..http.connection import AgentConnection
from ..sessions.session import Session
from ..token_calls.mode import TokenMode
from ..token_calls.sampling import TokenSampling
from ..upstreams.pool import UpstreamConnection
from ..upstreams.router import Worker
from .reply import cut
from .service import FIRST_PAUSE_S, LONGEST_PAUSE_S, Sampler, TinkerService, TinkerServices

ANSWER_S = 60.0  # the service answers a waiting request after half a minute, ready or not
BACKPRESSURE_S = 1.0  # after a 429 no call of the gateway begins for so long; this and the next two are the SDK's own
LARGE_BACKPRESSURE_S = 5.0
LARGE_BYTES = 128 * 1024
QUIET_SPREAD_S = 0.5  # so that those who waited do not all come at once
BILLING_S = 5.0  # a service that waits for its bill to be paid is asked again that often; the SDK's own
COMMENT = b": waiting for the model\n\n"


class Patience:
    """How long the same is tried again. ``count``: tries since something went well."""

    __slots__ = ("count", "since_s")

    def __init__(self) -> None:
        self.count = 0
        self.since_s: float | None = None

    def renew(self) -> None:
        self.count, self.since_s = 0, None

    def lost(self, now: float, limit_s: float) -> bool:
        """Whether it has not gone well for too long."""
        if self.since_s is None:
            self.since_s = now
        return now - self.since_s >= limit_s

    def pause_s(self) -> float:
        """How long to wait before the next try."""
        self.count += 1
        return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self.count - 1)))


class TinkerExchange:
    """See the module. It is the `Reader` of its upstream connection."""

    def __init__(
        self,
        owner: Owner,
        engine: TokenSampling,
        context: Context,
        session: Session,
        stream: bool,
        *,
        services: TinkerServices,
    ) -> None:
        self._owner = owner
        self._engine = engine
        self._context = context
        self._services = services
        self._route = Route(engine, context.router, session)
        self._service: TinkerService | None = None
        self._sampler: Sampler | None = None
        self._place = -1
        self._request_id: str | None = None
        self._renewals = 0  # of the service's session, or of our token
        self._patience = Patience()
        self._asked_s = 0.0
        self._size = 0  # bytes of the request
        self._up: UpstreamConnection | None = None
        self._call_off: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._comments: asyncio.TimerHandle | None = None
        engine.adjust = self._adjust
        if stream:
            self._comment_later()

    # -- asking and waiting

    def route(self) -> None:
        self._request_id, self._sampler, self._place = None, None, -1
        self._patience.renew()
        try:
            worker = self._route.enter()
        except RequestError as e:
            self._owner.fail(e)
            return
        self._service = self._services.of(worker)
        self._connect(worker)

    def _connect(self, worker: Worker) -> None:
        connection = worker.pool.take()
        if connection is not None:
            self._send(connection)
        else:
            self._call_off = worker.pool.connect(self._connected)

    def _connected(self, connection: UpstreamConnection | None, error: OSError | None) -> None:
        self._call_off = None
        try:
            if connection is not None:
                self._send(connection)
            elif self._route.worker is not None:
                self._trouble("the inference server cannot be reached", detail=f"it cannot be reached: {error}")
        except Exception as e:
            self._owner.broke(e)

    def _send(self, connection: UpstreamConnection) -> None:
        worker, service = self._route.worker, self._service
        if worker is None or service is None:  # pragma: no cover  (a connection is only asked for with both)
            return
        sampler = service.sampler
        if self._request_id is None and sampler is None:
            self._give_back(worker, connection)
            service.opening().add_done_callback(self._opened)
            return
        rest_s = service.quiet_until - time.monotonic()
        if self._request_id is None and rest_s > 0:
            self._give_back(worker, connection)
            self._after(rest_s + random.uniform(0.0, QUIET_SPREAD_S), self._go)
            return
        try:
            _, pieces = self._engine.request_for(worker)
        except RequestError as e:
            self._give_back(worker, connection)
            self._refused(e)
            return
        self._up = connection
        self._engine.incoming.clear()
        self._owner.become(State.SENT)
        self._asked_s = time.monotonic()
        self._after(ANSWER_S, self._silent)
        if self._request_id is not None:
            body = wire.retrieve(self._request_id)
            head = service.head(wire.RETRIEVE, len(body), b"accept: " + wire.PROTOBUF, b"x-tinker-request-type: Sample")
        else:
            if sampler is not None and sampler is not self._sampler:
                self._sampler, self._place = sampler, next(sampler.places)
                # However long the call waited: no other weights have a part in its answer.
                self._engine.incoming.span.fix(sampler.version)
            request = b"".join(pieces)
            self._size = len(request)
            body = wire.addressed(request, self._sampler.id if self._sampler else "", self._place)
            head = service.head(
                wire.SAMPLE, len(body), b"accept: application/json", b"x-tinker-sampling-backpressure: 1"
            )
        connection.send(self, head, body)

    @staticmethod
    def _give_back(worker: Worker, connection: UpstreamConnection) -> None:
        # Not at once: the pool hands it to the next call that waits, which may give it back from inside this one.
        asyncio.get_running_loop().call_soon(worker.pool.give, connection)

    def _opened(self, opening: asyncio.Task[None]) -> None:
        if self._owner.ended or self._route.worker is None:
            return
        error = None if opening.cancelled() else opening.exception()
        if error is None and not opening.cancelled():
            self._go()
            return
        known = error if isinstance(error, RequestError) else RequestError(f"no sampler: {error!r}", kind="upstream")
        worker = self._leave()
        if worker is not None and known.kind == "upstream":
            worker.failed(time.monotonic(), unreachable=True, why=str(known))
        self._owner.fail(known)

    def _go(self) -> None:
        """Send what is due on any connection."""
        worker = self._route.worker
        if worker is None or self._owner.ended:
            return
        try:
            self._owner.become(State.ROUTED)
            self._connect(worker)
        except Exception as e:
            self._owner.broke(e)

    def _leave(self) -> Worker | None:
        self._up = None
        return self._route.leave()

    # -- the service's answers

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._engine.incoming.status, self._engine.incoming.headers = status, headers

    def on_data(self, pieces: list[bytes]) -> None:
        incoming = self._engine.incoming
        incoming.parts += pieces
        incoming.received += sum(map(len, pieces))
        limit = self._context.limits.reply_bytes
        if incoming.received > limit:
            self.stop()
            self._owner.fail(RequestError(f"the service's reply is larger than {limit} bytes", kind="upstream"))

    def on_lost(self, error: Exception | None, *, reused: bool, began: bool) -> None:
        if self._route.worker is None:
            return
        self._up = None
        try:
            if reused and not began:
                self._context.counters["stale_connections"] += 1
                self._go()
                return
            self._trouble("the inference server closed the connection before its reply was whole")
        except Exception as e:
            self._owner.broke(e)

    def _silent(self) -> None:
        up, self._up = self._up, None
        if up is not None:
            up.abort()
        self._trouble(f"the service sent nothing for {ANSWER_S:g} s")

    def on_complete(self) -> None:
        if self._route.worker is None:
            return
        self._up = None
        self._calm()
        try:
            if self._request_id is None:
                self._accepted()
            else:
                self._answered()
        except CaptureError as e:
            self.stop()
            self._owner.fail(RequestError(str(e), kind="upstream"))
        except Exception as e:
            self._owner.broke(e)

    def _accepted(self) -> None:
        """`asample` was answered."""
        incoming = self._engine.incoming
        status = incoming.status
        if status == 200:
            self._request_id = wire.read_answer(incoming.body()).request_id
            if self._request_id is None:
                raise CaptureError("the service accepted a request and gave it no id")
            self._patience.renew()
            self._go()
        elif status in (404, 410) and self._service is not None and self._sampler is not None:
            self._session_lost(self._service, self._sampler)
        else:
            self._not_good(status)

    def _session_lost(self, service: TinkerService, sampler: Sampler) -> None:
        """The service does not know the sampler: ask another one, of a session that is opened anew."""
        service.lost(sampler)
        self._renewals += 1
        if self._renewals < MAX_TRIES:
            self._go()
        else:  # the service's 404 would say to the agent that its own request was wrong
            self._refused(RequestError("the service loses every session that is opened there", kind="upstream"))

    def _answered(self) -> None:
        """`retrieve_future` was answered."""
        incoming = self._engine.incoming
        status = incoming.status
        if status == 408:
            self._wait_on()
            return
        if status == 410:  # the service forgot the request
            self._resubmit(RequestError("the service lost the request", kind="upstream"))
            return
        if status != 200:
            self._not_good(status)
            return
        if any(name == b"content-type" and wire.PROTOBUF in value for name, value in incoming.headers):
            self._request_id = None  # nothing left to cancel
            incoming.first_token_s = time.time()
            worker = self._leave()
            if worker is not None:
                worker.succeeded()
            self._owner.complete()
            return
        answer = wire.read_answer(incoming.body())
        if answer.type == "try_again":
            self._wait_on()
        elif answer.error is not None and answer.category == "user":
            self._refused(upstream_error(400, incoming.body()))
        elif answer.error is not None:
            self._resubmit(RequestError(f"sampling failed: {answer.error}", kind="upstream"))
        else:
            raise CaptureError("the service's answer is neither tokens nor an error")

    def _wait_on(self) -> None:
        self._patience.renew()
        # A service that does not hold the request open would be asked without end.
        pause_s = 0.0 if time.monotonic() - self._asked_s > 0.25 else 0.25
        self._after(pause_s, self._go)

    def _not_good(self, status: int) -> None:
        body = self._engine.incoming.body()
        if status == 401 and self._renewals < MAX_TRIES and self._service is not None:
            self._renewals += 1
            self._service.renewing().add_done_callback(self._token_renewed)
        elif status == 429:
            self._context.counters["backpressure"] += 1
            quiet_s = BACKPRESSURE_S if self._size <= LARGE_BYTES else LARGE_BACKPRESSURE_S
            if self._service is not None:
                self._service.quiet_until = time.monotonic() + quiet_s
            self._trouble(upstream_error(status, body), pause_s=quiet_s)
        elif status in (400, 408, 409) and self._request_id is not None and self._patience.count < 3:
            self._trouble(upstream_error(status, body))  # a proxy on the way says this now and then, as the SDK knows
        elif status in (408, 409) or status >= 500 or (status == 400 and not body):  # an empty 400 is a proxy's
            self._trouble(upstream_error(status, body))
        elif status == 402:
            self._trouble(upstream_error(status, body), pause_s=BILLING_S)
        else:
            self._refused(upstream_error(status, body))

    def _token_renewed(self, renewing: asyncio.Task[None]) -> None:
        if self._owner.ended or renewing.cancelled():
            return
        error = renewing.exception()
        if error is None:
            self._go()
        else:
            self._refused(error if isinstance(error, RequestError) else RequestError(repr(error), kind="upstream"))

    def _trouble(self, why: str | RequestError, *, pause_s: float | None = None, detail: str = "") -> None:
        """Try the same again after a pause, unless it has gone on for too long; ``detail`` is for the log alone."""
        if self._route.worker is None or self._owner.ended:
            return
        self._calm()
        now = time.monotonic()
        if self._patience.lost(now, self._context.limits.patience_s):
            worker = self._leave()
            if worker is not None:
                worker.failed(now, unreachable=isinstance(why, str), why=detail or str(why))
                if isinstance(why, str):
                    try_again(self._owner, self._context, self._route, worker, why, once_more=False)
                else:
                    self._owner.fail(why)
            return
        self._context.counters["retries"] += 1
        longer_s = self._patience.pause_s()
        self._after(longer_s if pause_s is None else pause_s, self._go)

    def _resubmit(self, error: RequestError) -> None:
        """The request is lost at the service: ask anew."""
        route = self._route
        if len(route.tried) + 1 >= MAX_TRIES or route.worker is None or self._sampler is None:
            self._refused(error)
            return
        route.tried = (*route.tried, route.worker)
        self._context.counters["retries"] += 1
        self._request_id, self._place = None, next(self._sampler.places)
        self._go()

    def _refused(self, error: RequestError) -> None:
        self._leave()
        self._owner.fail(error)

    def _after(self, pause_s: float, do: Callable[[], None]) -> None:
        self._calm()
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._guarded, do)

    def _guarded(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as e:
            self._owner.broke(e)

    def _calm(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _adjust(self, piece: Piece, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        """Put in what the service does not say: the weights, and where a stop string ends the answer."""
        piece.weight_version = self._sampler.version if self._sampler is not None else None
        cut(piece, stops, decode)

    # -- from the call

    def stop(self) -> None:
        self._calm()
        if self._request_id is not None and self._service is not None:
            self._service.cancel(self._request_id)
        up = self._up
        call_off, self._call_off = self._call_off, None
        self._leave()
        if call_off is not None:
            call_off()
        if up is not None:
            up.abort()

    def close(self) -> None:
        self._calm()
        if self._comments is not None:
            self._comments.cancel()
        self._engine.adjust = None

    def weights_change(self, *, slow: bool) -> None:
        """A call's weights are its sampler's."""

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def _comment_later(self) -> None:
        pause_s = self._context.limits.keep_alive_s
        self._comments = asyncio.get_running_loop().call_later(pause_s, self._comment)

    def _comment(self) -> None:
        if self._owner.comment(COMMENT):
            self._comment_later()


def tinker_call(
    context: Context, conn: AgentConnection, session: Session, dialect: str, mode: TokenMode, services: TinkerServices
) -> Call:
    """A call over Tinker, in any dialect."""
    agent = TranslatingAgent(conn, dialect)
    engine = TokenSampling(context, session, agent, mode, whole=True)
    return Call(
        context,
        session,
        agent,
        engine,
        lambda owner, stream: TinkerExchange(owner, engine, context, session, stream, services=services),
    )
