"""Tinker by its SDK, which waits for its service and retries by itself. Source: the `tinker` package 0.38.0."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from typing import Any

from ..._installation import missing_extra
from ...errors import CaptureError
from ...messages.errors import RequestError
from ...messages.wire.canonical import LENGTH, STOP
from ..config import UpstreamConfig
from ..engines import Piece
from ..engines.errors import upstream_error
from ..engines.sampling_service import Asked

PRODUCTION_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
CLOSE_S = 5.0
KEY_ENV, URL_ENV = "TINKER_API_KEY", "TINKER_BASE_URL"  # the SDK's own names


class TinkerService:
    """A `SamplingService` of Tinker.

    ``connect`` makes a `tinker.ServiceClient` or an object with its methods, also when the service lost its session.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._service = connect()

    @classmethod
    def at(cls, upstream: UpstreamConfig) -> TinkerService:
        """Connect with the SDK. Raises: MissingExtraError."""
        try:
            import tinker
        except ModuleNotFoundError as e:
            raise missing_extra("engine tinker needs Tinker's SDK", "tinker") from e
        return cls(lambda: tinker.ServiceClient(base_url=upstream.url, api_key=upstream.api_key))

    async def open(self, path: str) -> TinkerSampler:
        return TinkerSampler(self, path, await self.client(path))

    async def client(self, path: str, *, renew: bool = False) -> Any:
        """Return the SDK's client for these weights. If ``renew`` is set, open another session of the service first."""
        if renew:
            self._service = self._connect()
        named = {"model_path" if path.startswith("tinker://") else "base_model": path}
        # In a thread: the SDK blocks while it opens its session.
        return await asyncio.to_thread(lambda: self._service.create_sampling_client(**named).result())

    def for_agent(self, error: Exception) -> RequestError:
        import tinker

        if isinstance(error, tinker.RequestFailedError):
            if error.category is tinker.types.RequestErrorCategory.User:
                return upstream_error(400, error.message.encode())
            return RequestError(f"sampling failed: {error.message}", kind="upstream")
        if isinstance(error, tinker.APIStatusError) and error.status_code not in (404, 410):
            return upstream_error(error.status_code, error.response.content)
        return RequestError("the engine did not answer", kind="upstream")

    async def close(self) -> None:
        await asyncio.to_thread(lambda: self._service.close("success").result(CLOSE_S))


class TinkerSampler:
    """A `tinker.SamplingClient`, opened again once if the service lost its session. A cancelled call ends at the service."""

    def __init__(self, service: TinkerService, path: str, client: Any) -> None:
        self._service, self._path, self._client = service, path, client
        self._opening = asyncio.Lock()

    async def sample(self, asked: Asked) -> list[Piece]:
        import tinker

        prompt = tinker.ModelInput.from_ints(asked.prompt)
        params = tinker.SamplingParams(
            max_tokens=asked.max_tokens,
            # Strings or ids, not both; an empty list would disable the model's own end of text too.
            stop=asked.stop_token_ids or None,
            temperature=asked.temperature,
            top_k=-1 if asked.top_k is None else asked.top_k,
            top_p=asked.top_p,
            seed=asked.seed,
        )
        client = self._client
        try:
            return pieces_of(await client.sample(prompt, asked.n, params))
        except tinker.APIStatusError as e:
            if e.status_code not in (404, 410):
                raise
        async with self._opening:
            if self._client is client:  # or another call has opened one meanwhile
                self._client = await self._service.client(self._path, renew=True)
        return pieces_of(await self._client.sample(prompt, asked.n, params))


def pieces_of(response: Any) -> list[Piece]:
    """Return a `tinker.SampleResponse`; NaN stands for a logprob that was not computed. Raises: CaptureError."""
    pieces = []
    for choice, sampled in enumerate(response.sequences):
        if sampled.stop_reason not in (STOP, LENGTH):
            raise CaptureError(f"a sequence has the unknown stop reason {sampled.stop_reason!r}")
        piece = Piece(choice=choice, ids=list(sampled.tokens), finish_reason=sampled.stop_reason)
        if sampled.logprobs is not None:
            piece.logprobs = [None if math.isnan(lp) else lp for lp in sampled.logprobs]
        pieces.append(piece)
    return pieces


def service_url() -> str:
    """Return the service that the SDK would use: TINKER_BASE_URL, or production."""
    return (os.environ.get(URL_ENV) or PRODUCTION_URL).rstrip("/")
