"""Calls to a sampling service: the weights in use, and the `Engine` of a call.

A sampler has fixed weights, so a turn has its sampler's version. New weights are a new sampler; running calls end on the old
one. The adapter waits for its service and retries by itself. An answer reaches the agent when it is complete. An agent that
streams gets comment lines meanwhile, which every client of server-sent events skips, so that proxies keep the connection open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...messages.errors import RequestError
from ...messages.wire import Delta
from ...messages.wire.canonical import LENGTH, STOP
from ..engines import Piece
from ..engines.sampling_service import Asked
from ..router import Worker
from ..token_calls.reply import TokenReply
from ..token_calls.sampling import TokenSampling

log = logging.getLogger(__name__)

CLOSE_S = 5.0


class Sampler(Protocol):
    """Fixed weights at a service."""

    async def sample(self, asked: Asked) -> list[Piece]:
        """Return a piece per choice. It may have more tokens than requested."""
        ...


class SamplingService(Protocol):
    """The adapter of a service."""

    async def open(self, path: str) -> Sampler:
        """Return the sampler of saved weights, or of a base model."""
        ...

    def for_agent(self, error: Exception) -> RequestError:
        """Return the error for the agent, without the address of the service or details of weights and sessions."""
        ...

    async def close(self) -> None:
        """Close the sessions at the service."""
        ...


class Samplers:
    """The weights that are sampled. ``wanted`` is the path of weights, or a base model, and its version."""

    def __init__(self, service: SamplingService, wanted: tuple[str, int | None] | None) -> None:
        self.wanted = wanted
        self.service = service
        self._sampler: Sampler | None = None  # that of ``wanted``, from its first call on
        self._opening = asyncio.Lock()

    async def current(self) -> tuple[Sampler, int | None]:
        """Return the sampler of the current weights, and their version. Raises: RequestError."""
        async with self._opening:
            if self.wanted is None:
                why = "the gateway has no weights to sample from yet: give --sampler, or publish some (set_weight_version)"
                raise RequestError(why, kind="overloaded")
            sampler = self._sampler
            if sampler is None:
                try:
                    sampler = await self.service.open(self.wanted[0])
                except Exception as e:
                    log.warning("weights %s cannot be opened for sampling: %s", self.wanted[0], e)
                    raise RequestError("the engine has no weights to sample from", kind="upstream") from e
                sampler = self._sampler = self._sampler or sampler  # perhaps others were published meanwhile
            return sampler, self.wanted[1]

    async def use(self, model: str | None, version: int) -> None:
        """Let all further calls sample ``model`` as ``version``; None keeps the weights and renames their version.

        Raises: RequestError; calls then keep their weights.
        """
        if model is None:
            self.wanted = None if self.wanted is None else (self.wanted[0], version)
            return
        try:
            sampler = await self.service.open(model)
        except Exception as e:
            raise RequestError(f"{model} cannot be sampled: {e}", kind="upstream") from e
        self._sampler, self.wanted = sampler, (model, version)

    async def close(self) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_S):
                await self.service.close()


@dataclass(eq=False, repr=False)
class ServiceSampling(TokenSampling):
    """Samples by a service. A stream gets comments meanwhile."""

    samplers: Samplers = field(kw_only=True)
    pings: bool = field(default=True, init=False)

    def attempt(self) -> TokenReply:
        return self._new_reply()

    def cancel(self, worker: Worker) -> None:
        pass  # the adapter ends a cancelled call

    async def sample(self, worker: Worker) -> list[Delta]:
        # All of the answer is of these weights, however long the call waits.
        sampler, version = await self.samplers.current()
        self.versions = version, version
        request = self.request.asked
        given = request.sampling
        assert self._reply is not None
        asked = Asked(
            prompt=[] if self._prompt is None else self._prompt.token_ids,
            n=request.n,
            max_tokens=self._max_tokens,
            stop_token_ids=sorted(self.mode.renderer.stop_token_ids),
            stop=given.stop,
            temperature=1.0 if given.temperature is None else given.temperature,
            top_p=1.0 if given.top_p is None else given.top_p,
            top_k=given.top_k if given.top_k and given.top_k > 0 else None,  # 0 and -1 mean all tokens
            seed=given.seed,
        )
        try:
            pieces = await sampler.sample(asked)
            for piece in pieces:
                piece.weight_version = version
                self.context.counters["tokens_cut"] += cut(piece, asked, self.mode.renderer.decode)
        except Exception as e:
            found = self.samplers.service.for_agent(e)
            if found.kind == "upstream":
                worker.failed(unreachable=False, why=repr(e))
                log.warning("sampling failed: %r", e)
            raise found from e
        self._reply.read_event = list
        return self._reply.add([pieces])


def cut(piece: Piece, asked: Asked, decode: Callable[[Sequence[int]], str]) -> int:
    """End a choice at the limits of the request. Returns the number of tokens left out.

    The choice ends at the requested number of tokens (as "length"), with a stop token of the model, or with the token that
    completes a stop string, whichever is first. The rest is neither shown to the agent nor recorded.
    """
    if piece.logprobs is not None and len(piece.logprobs) != len(piece.ids):
        return 0  # the turn is invalid, and must stay invalid
    sampled = len(piece.ids)
    if sampled > asked.max_tokens:
        _end(piece, asked.max_tokens, LENGTH)
    ends = next((at for at, token in enumerate(piece.ids, 1) if token in asked.stop_token_ids), None)
    if ends is not None:
        _end(piece, ends, STOP)
    text = decode(piece.ids) if asked.stop else ""
    found = [stop for stop in asked.stop if stop in text]
    if found:
        first = min(found, key=text.find)
        low, high = 1, len(piece.ids)
        while low < high:
            middle = (low + high) // 2
            if first in decode(piece.ids[:middle]):
                high = middle
            else:
                low = middle + 1
        _end(piece, low, STOP)
        piece.stop_sequence = first
    return sampled - len(piece.ids)


def _end(piece: Piece, length: int, reason: str) -> None:
    piece.ids, piece.finish_reason = piece.ids[:length], reason
    if piece.logprobs is not None:
        piece.logprobs = piece.logprobs[:length]
