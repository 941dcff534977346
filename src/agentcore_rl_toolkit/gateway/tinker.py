"""Calls that Tinker's SDK samples: the weights in use, and the `Transport` of a call to them.

A `tinker.SamplingClient` stands for fixed weights, so a turn has its client's version. New weights are a new client; running
calls end on the old one. The SDK waits for its service and tries again by itself. An answer reaches the agent when it is whole.
An agent that streams gets comment lines meanwhile, which every client of server-sent events skips, so that no proxy takes the
connection for dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from .._installation import missing_extra
from ..messages.dialects.canonical import STOP
from ..messages.errors import RequestError
from .calls.agent import TranslatingAgent
from .calls.call import Call
from .calls.context import Context
from .calls.exchange import Transport
from .calls.running import RunningCall
from .calls.states import State
from .config import UpstreamConfig
from .engines import Piece
from .engines.errors import upstream_error
from .engines.tinker import pieces_of
from .http.connection import AgentConnection
from .sessions.session import Session
from .token_calls.mode import TokenMode
from .token_calls.sampling import TokenSampling
from .upstreams.router import Worker

log = logging.getLogger(__name__)

CLOSE_S = 5.0
COMMENT = b": waiting for the model\n\n"


class Samplers:
    """The weights that are sampled. ``wanted`` is a ``tinker://`` path or a base model, and its version.

    ``connect`` makes a `tinker.ServiceClient`, or an object with its methods; another one where the service lost its session.
    """

    def __init__(self, connect: Callable[[], Any], wanted: tuple[str, int | None] | None) -> None:
        self.wanted = wanted
        self._connect = connect
        self._service = connect()
        self._open: asyncio.Task[Any] | None = None  # the client of what is wanted

    def models(self) -> list[str]:
        """The weights that are sampled now."""
        return [self.wanted[0]] if self.wanted is not None else []

    async def current(self) -> tuple[Any, int | None]:
        """The sampling client of what is wanted now, and its version. Raises: RequestError."""
        while self.wanted is not None:
            opening = self._open = self._open or asyncio.ensure_future(self._client(self.wanted[0]))
            try:
                client = await asyncio.shield(opening)
            except Exception as e:
                if self._open is opening:
                    self._open = None
                log.warning("no sampler for %s: %s", self.wanted[0], e)
                raise RequestError("the inference server has no weights to sample from", kind="upstream") from e
            if self._open is opening:  # or others were published meanwhile
                return client, self.wanted[1]
        raise RequestError(
            "the gateway has no weights to sample from yet: give --sampler, or publish some (set_weight_version)",
            kind="overloaded",
        )

    async def use(self, model: str | None, version: int) -> None:
        """Let all further calls sample ``model`` as ``version``; None keeps the weights and renames their version.

        Raises: RequestError; calls then go on with what they had.
        """
        if model is None:
            self.wanted = None if self.wanted is None else (self.wanted[0], version)
            return
        opening = asyncio.ensure_future(self._client(model))
        try:
            await opening
        except Exception as e:
            raise RequestError(f"{model} cannot be sampled: {e}", kind="upstream") from e
        self._open, self.wanted = opening, (model, version)

    def lost(self, client: Any) -> None:
        """The service does not know a client's session any more: the next call opens another."""
        if self._open is not None and self._open.done() and self._open.result() is client:
            self._open, self._service = None, self._connect()

    async def _client(self, model: str) -> Any:
        named = {"model_path" if model.startswith("tinker://") else "base_model": model}
        # In a thread: the SDK opens its session where it is called.
        return await asyncio.to_thread(lambda: self._service.create_sampling_client(**named).result())

    async def close(self) -> None:
        """End the SDK's session, so that the service keeps nothing for us."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.to_thread(lambda: self._service.close("success").result(CLOSE_S))


class TinkerExchange(Transport):
    """A call's way through the SDK. ``finish`` completes each choice of the answer."""

    def __init__(
        self,
        owner: RunningCall,
        engine: TokenSampling,
        context: Context,
        session: Session,
        samplers: Samplers,
        *,
        stream: bool,
        finish: Callable[[Piece], None],
    ) -> None:
        super().__init__(owner, engine, context, session)
        self._sampling = engine
        self._samplers = samplers
        self._finish = finish
        self._task: asyncio.Task[None] | None = None
        self._comments: asyncio.TimerHandle | None = None
        if stream:
            self._comment_later()

    def route(self) -> None:
        if (worker := self._enter()) is not None:
            self._task = asyncio.ensure_future(self._ask(worker))

    async def _ask(self, worker: Worker) -> None:
        try:
            self._sampling.whole = await self._sampled(worker, again=True)
            self._leave()
            worker.succeeded()
        except Exception as e:
            self._failed(worker, e)
            return
        self._incoming.status, self._incoming.first_token_s = 200, time.time()
        try:
            self._owner.complete()
        except Exception as e:
            self._owner.broke(e)

    async def _sampled(self, worker: Worker, *, again: bool) -> list[Piece]:
        import tinker

        client, version = await self._samplers.current()
        asked = msgspec.json.decode(self._engine.request_for(worker)[1][0])
        # However long the call waits: no other weights have a part in its answer.
        self._incoming.span.fix(version)
        self._owner.become(State.SENT)
        prompt, params = tinker.ModelInput.from_ints(asked["prompt"]), tinker.SamplingParams(**asked["sampling_params"])
        try:
            pieces = pieces_of(await client.sample(prompt, asked["num_samples"], params), version)
        except tinker.APIStatusError as e:
            if e.status_code not in (404, 410) or not again:
                raise
        else:
            for piece in pieces:
                self._finish(piece)
            return pieces
        self._samplers.lost(client)
        self._owner.become(State.ROUTED)
        return await self._sampled(worker, again=False)

    def _failed(self, worker: Worker, error: Exception) -> None:
        self._leave()
        found = _for_agent(error)
        if found.kind == "upstream":
            worker.failed(time.monotonic(), unreachable=False, why=repr(error))
            log.warning("sampling failed: %r", error)
        self._owner.fail(found)

    # -- from the call

    def stop(self) -> None:
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()  # the SDK cancels the sampling at its service
        self._leave()

    def close(self) -> None:
        if self._comments is not None:
            self._comments.cancel()

    def _comment_later(self) -> None:
        self._comments = asyncio.get_running_loop().call_later(self._context.limits.keep_alive_s, self._comment)

    def _comment(self) -> None:
        if self._owner.comment(COMMENT):
            self._comment_later()


def _for_agent(error: Exception) -> RequestError:
    """An agent does not learn where the service is, nor what it says of weights and sessions."""
    import tinker

    if isinstance(error, RequestError):
        return error
    if isinstance(error, tinker.RequestFailedError):
        if error.category is tinker.types.RequestErrorCategory.User:
            return upstream_error(400, error.message.encode())
        return RequestError(f"sampling failed: {error.message}", kind="upstream")
    if isinstance(error, tinker.APIStatusError) and error.status_code not in (404, 410):
        return upstream_error(error.status_code, error.response.content)
    return RequestError("the inference server did not answer", kind="upstream")


def cut(piece: Piece, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
    """End a choice with the token that completes a stop string, as an engine that knows these would have."""
    ids, logprobs = piece.ids, piece.logprobs
    if not stops or logprobs is None or len(logprobs) != len(ids):
        return
    text = decode(ids)
    found = [stop for stop in stops if stop in text]
    if not found:
        return
    first = min(found, key=text.find)
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        if first in decode(ids[:middle]):
            high = middle
        else:
            low = middle + 1
    piece.ids, piece.logprobs = ids[:low], logprobs[:low]
    piece.finish_reason, piece.stop_sequence = STOP, first


def connector(upstream: UpstreamConfig) -> Callable[[], Any]:
    """How the SDK's client of a service is made. Raises: MissingExtraError."""
    try:
        import tinker
    except ModuleNotFoundError as e:
        raise missing_extra("engine tinker needs Tinker's SDK", "tinker") from e
    return lambda: tinker.ServiceClient(base_url=upstream.url, api_key=upstream.api_key)


def tinker_call(
    context: Context, conn: AgentConnection, session: Session, dialect: str, mode: TokenMode, samplers: Samplers
) -> Call:
    """A call over Tinker, in any dialect."""
    agent = TranslatingAgent(conn, dialect)
    engine = TokenSampling(context, session, agent, mode)

    def finish(piece: Piece) -> None:
        cut(piece, agent.asked.sampling.stop, mode.renderer.decode)

    def make(owner: RunningCall, stream: bool) -> Transport:
        return TinkerExchange(owner, engine, context, session, samplers, stream=stream, finish=finish)

    return Call(context, session, agent, engine, make)
