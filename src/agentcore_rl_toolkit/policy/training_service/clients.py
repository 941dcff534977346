"""Tinker's clients over a model in this process: the SDK's methods, types and errors, and nothing of its wire.

For tests, and for rehearsals of a run on one machine. Source: the `tinker` package 0.38.0.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from ..._installation import missing_extra
from ...errors import ConfigError
from .interface import Completion, Example
from .operations import Operations

if TYPE_CHECKING:
    from .model import PolicyModel

try:
    import tinker
    from tinker.types import (
        OptimStepResponse,
        RequestErrorCategory,
        SaveWeightsForSamplerResponse,
        SaveWeightsResponse,
    )
except ModuleNotFoundError as e:
    raise missing_extra("Tinker's clients need its SDK", "tinker") from e

T = TypeVar("T")


class Result(Generic[T]):
    """The result of the SDK's methods: can be awaited, or waited for."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> T:
        return self._future.result(timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self._future).__await__()


class LocalService:
    """A `tinker.ServiceClient`. ``finished`` are the statuses that it was closed with; it can be used again after that."""

    def __init__(self, model: PolicyModel) -> None:
        self.model = model
        self.finished: list[str] = []
        self.operations = Operations()
        self.samplers = ThreadPoolExecutor(64, "training-service-sample")
        self._name = secrets.token_hex(4)  # saved weights outlive the service: the next one's names must be others
        self._numbers = itertools.count()

    def create_lora_training_client(self, base_model: str, rank: int = 32, seed: int | None = None) -> Result[Any]:
        if base_model != self.model.base_model:
            raise _refused(f"there is no base model {base_model!r}; there is {self.model.base_model!r}")
        return self._training_client(None)

    def create_training_client_from_state_with_optimizer(self, path: str) -> Result[Any]:
        return self._training_client(path)

    def _training_client(self, path: str | None) -> Result[Any]:
        client = LocalTrainingClient(self, f"{self._name}:train:{next(self._numbers)}")

        def create() -> LocalTrainingClient:
            self.model.create(client.run)
            if path is not None:
                self.model.load(client.run, path, optimizer=True)
            return client

        return client._do(create)

    def create_sampling_client(self, model_path: str | None = None, base_model: str | None = None) -> Result[Any]:
        if model_path is not None and model_path not in self.model.paths:
            raise _refused(f"there are no weights {model_path!r}")
        if model_path is None and base_model != self.model.base_model:
            raise _refused(f"there is no base model {base_model!r}")
        made: Future[LocalSamplingClient] = Future()
        made.set_result(LocalSamplingClient(self, model_path))
        return Result(made)

    def close(self, status: str) -> Result[None]:
        self.finished.append(status)
        done: Future[None] = Future()
        done.set_result(None)
        return Result(done)


class LocalTrainingClient:
    """A `tinker.TrainingClient`: each method sends its operation at once and returns a future."""

    def __init__(self, service: LocalService, run: str) -> None:
        self.run = run
        self._service = service
        self._model = service.model
        self._numbers = itertools.count()
        service.operations.begin(run)

    def forward(self, data: Sequence[Any], loss_fn: str, loss_fn_config: Any = None) -> Result[Any]:
        return self._pass(data, loss_fn, loss_fn_config, forward_only=True)

    def forward_backward(self, data: Sequence[Any], loss_fn: str, loss_fn_config: Any = None) -> Result[Any]:
        return self._pass(data, loss_fn, loss_fn_config, forward_only=False)

    def _pass(self, data: Sequence[Any], loss_fn: str, config: Any, *, forward_only: bool) -> Result[Any]:
        examples = [
            Example(
                tokens=datum.model_input.to_ints(), inputs={k: list(v.data) for k, v in datum.loss_fn_inputs.items()}
            )
            for datum in data
        ]

        def work() -> Any:
            logprobs, metrics = self._model.forward_backward(self.run, examples, loss_fn, config or {}, forward_only)
            outputs = [{"logprobs": tinker.TensorData(data=row, dtype="float32", shape=[len(row)])} for row in logprobs]
            return tinker.ForwardBackwardOutput("ArrayRecord", outputs, metrics)

        return self._do(work)

    def optim_step(self, optim_params: Any) -> Result[Any]:
        adam = optim_params.model_dump()
        return self._do(lambda: OptimStepResponse(metrics=self._model.optim_step(self.run, adam)))

    def save_state(self, name: str, ttl_seconds: int | None = None, overwrite: bool = False) -> Result[Any]:
        path = f"tinker://{self.run}/weights/{name}"
        if path in self._model.paths and not overwrite:
            raise _refused(f"{path} is there already")

        def save() -> SaveWeightsResponse:
            self._model.save(self.run, path)
            return SaveWeightsResponse(path=path)

        return self._do(save)

    def save_weights_for_sampler(self, name: str, ttl_seconds: int | None = None) -> Result[Any]:
        path = f"tinker://{self.run}/sampler_weights/{name}"

        def publish() -> SaveWeightsForSamplerResponse:
            self._model.publish(self.run, path)
            return SaveWeightsForSamplerResponse(path=path)

        return self._do(publish)

    def create_sampling_client(self, model_path: str) -> Result[Any]:
        return self._service.create_sampling_client(model_path)

    def _do(self, work: Callable[[], T]) -> Result[T]:
        return Result(self._service.operations.submit(self.run, next(self._numbers), lambda: _answered(work)))


class LocalSamplingClient:
    """A `tinker.SamplingClient` of one set of weights."""

    def __init__(self, service: LocalService, path: str | None) -> None:
        self.path = path
        self._service = service

    def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Result[Any]:
        ids, params = prompt.to_ints(), sampling_params.model_dump(exclude_none=True)

        def work() -> Any:
            found = self._service.model.sample(self.path, ids, num_samples, params)
            return tinker.SampleResponse([_sequence(i, completion) for i, completion in enumerate(found)])

        return Result(self._service.samplers.submit(lambda: _answered(work)))


def _sequence(index: int, completion: Completion) -> Any:
    return tinker.SampledSequence(
        "length" if completion.stop_reason == "length" else "stop",
        str(index),
        np.array(completion.ids, np.int32),
        np.array(completion.logprobs, np.float32),
    )


def _answered(work: Callable[[], T]) -> T:
    """Do some work; what the model refuses is raised as the SDK raises it."""
    try:
        return work()
    except ConfigError as e:
        raise _refused(str(e)) from e


def _refused(message: str) -> tinker.RequestFailedError:
    return tinker.RequestFailedError(message, "local", RequestErrorCategory.User)
