"""Tinker's SDK with a scripted model behind it: what was sampled, and trouble on demand."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np
import tinker

from scripted_engine import Fault

from ..backends.scripted_model import ScriptedModel
from ..backends.tinker.local_service import LocalService, Result


@dataclass
class SampleCall:
    """One `SamplingClient.sample`."""

    path: str | None
    prompt_ids: list[int]
    params: Any
    completion_ids: list[list[int]] = field(default_factory=list)
    cancelled: bool = False


def status_error(status: int, text: str = "scripted failure") -> tinker.APIStatusError:
    response = httpx.Response(status, json={"detail": text}, request=httpx.Request("POST", "http://tinker.inner"))
    return tinker.APIStatusError(text, response=response, body=None)


class ScriptedTinker(LocalService):
    """`faults` and `errors` are those of the next samples, in order; ``replies`` what they say; ``connected`` counts sessions."""

    url = "http://127.0.0.1:9"

    def __init__(self) -> None:
        model = ScriptedModel()
        model.first_id, model.last_id = 300, 500
        super().__init__(model)
        self.replies, self.saved = model.replies, model.saved
        self.faults: deque[Fault] = deque()
        self.errors: deque[Exception] = deque()
        self.calls: list[SampleCall] = []
        self.opening: dict[str, Future[None]] = {}  # what opening these weights waits for
        self.connected = 0

    def connect(self) -> ScriptedTinker:
        self.connected += 1
        return self

    def create_sampling_client(self, model_path: str | None = None, base_model: str | None = None) -> Result[Any]:
        if (held := self.opening.get(model_path or "")) is not None:
            held.result(60)
        inner = super().create_sampling_client(model_path, base_model).result()
        made: Future[Any] = Future()
        made.set_result(_Sampler(self, inner))
        return Result(made)


class _Sampler:
    def __init__(self, service: ScriptedTinker, inner: Any) -> None:
        self._service, self._inner = service, inner

    async def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        service = self._service
        call = SampleCall(self._inner.path, prompt.to_ints(), sampling_params)
        service.calls.append(call)
        fault = service.faults.popleft() if service.faults else Fault()
        error = service.errors.popleft() if service.errors else None
        try:
            if fault.gate is not None:
                await fault.gate.wait()
        except BaseException:
            call.cancelled = True
            raise
        if error is not None:
            raise error
        if fault.drop_after is not None:
            raise tinker.APIConnectionError(request=httpx.Request("POST", "http://tinker.inner"))
        response = await self._inner.sample(prompt, num_samples, sampling_params)
        if fault.edit is not None:
            sequences = [{"tokens": s.tokens, "logprobs": list(s.logprobs)} for s in response.sequences]
            fault.edit({"sequences": sequences})
            response = replace(
                response,
                sequences=[
                    replace(s, tokens_np=np.array(e["tokens"]), logprobs_np=np.array(e["logprobs"]))
                    for s, e in zip(response.sequences, sequences, strict=True)
                ],
            )
        call.completion_ids = [list(s.tokens) for s in response.sequences]
        return response
