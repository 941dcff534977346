"""Tinker's clients over a model in this process: the SDK's methods, types and errors, without its wire.

Source: the `tinker` package 0.38.0.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np
import tinker
from tinker import types

from agentcore_rl_toolkit.backends.tinker.adapter import TinkerTraining
from agentcore_rl_toolkit.backends.tinker.settings import TinkerConfig
from agentcore_rl_toolkit.backends.training.batch import datum_of
from agentcore_rl_toolkit.backends.training.client import Adam, Loss
from agentcore_rl_toolkit.backends.training.local import LocalModel
from agentcore_rl_toolkit.backends.training.run import run_async
from agentcore_rl_toolkit.backends.training.settings import Observer
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway import Gateway, GatewayConfig, UpstreamConfig

BASE_MODEL = "builtin/policy"
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

    def __init__(self, model: LocalModel) -> None:
        self.model = model
        self.finished: list[str] = []
        self._trainer = ThreadPoolExecutor(1, "tinker-train")  # one operation at a time, in the order of the calls
        self._samplers = ThreadPoolExecutor(64, "tinker-sample")
        self._name = secrets.token_hex(4)  # saved weights outlive the service, so their names must differ
        self._numbers = itertools.count()

    def create_lora_training_client(self, base_model: str, rank: int = 32, seed: int | None = None) -> Result[Any]:
        if base_model != BASE_MODEL:
            raise _refused(f"there is no base model {base_model!r}; there is {BASE_MODEL!r}")
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

        return self._submit(create)

    def create_sampling_client(self, model_path: str | None = None, base_model: str | None = None) -> Result[Any]:
        if model_path is not None and model_path not in self.model.paths:
            raise _refused(f"there are no weights {model_path!r}")
        if model_path is None and base_model != BASE_MODEL:
            raise _refused(f"there is no base model {base_model!r}")
        return _done(LocalSamplingClient(self, model_path))

    def close(self, status: str) -> Result[None]:
        self.finished.append(status)
        return _done(None)

    def _submit(self, work: Callable[[], T], *, sample: bool = False) -> Result[T]:
        """Do work of a client: training work after all that was sent before, samples at once."""
        return Result((self._samplers if sample else self._trainer).submit(_with_sdk_errors, work))


class LocalTrainingClient:
    """A `tinker.TrainingClient`: each method sends its operation at once and returns a future."""

    def __init__(self, service: LocalService, run: str) -> None:
        self.run = run
        self._service, self._model = service, service.model

    def forward(self, data: Sequence[Any], loss_fn: str, loss_fn_config: Any = None) -> Result[Any]:
        return self._pass(data, loss_fn, loss_fn_config, backward=False)

    def forward_backward(self, data: Sequence[Any], loss_fn: str, loss_fn_config: Any = None) -> Result[Any]:
        return self._pass(data, loss_fn, loss_fn_config, backward=True)

    def _pass(self, data: Sequence[Any], loss_fn: str, config: Any, *, backward: bool) -> Result[Any]:
        def work() -> Any:
            inputs = [{name: list(v.data) for name, v in datum.loss_fn_inputs.items()} for datum in data]
            given = [datum_of(datum.model_input.to_ints(), each) for datum, each in zip(data, inputs, strict=True)]
            loss = Loss(name=loss_fn, options=config or {})  # type: ignore[arg-type]  # checked where it is computed
            passed = self._model.forward_backward(self.run, given, loss, backward=backward)
            rows = passed.logprobs or ()
            outputs = [{"logprobs": tinker.TensorData(data=row, dtype="float32", shape=[len(row)])} for row in rows]
            return tinker.ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": passed.metrics["loss"]})

        return self._service._submit(work)

    def optim_step(self, optim_params: Any) -> Result[Any]:
        adam = Adam(
            learning_rate=optim_params.learning_rate,
            beta1=optim_params.beta1,
            beta2=optim_params.beta2,
            grad_clip_norm=optim_params.grad_clip_norm,
        )

        def work() -> Any:
            norm = self._model.step(self.run, adam)["grad_norm"]
            return types.OptimStepResponse(metrics={"grad_norm:mean": norm})

        return self._service._submit(work)

    def save_state(self, name: str, ttl_seconds: int | None = None, overwrite: bool = False) -> Result[Any]:
        path = f"tinker://{self.run}/weights/{name}"
        if path in self._model.paths and not overwrite:
            raise _refused(f"{path} is there already")
        return self._save(path, types.SaveWeightsResponse(path=path), optimizer=True)

    def save_weights_for_sampler(self, name: str, ttl_seconds: int | None = None) -> Result[Any]:
        path = f"tinker://{self.run}/sampler_weights/{name}"
        return self._save(path, types.SaveWeightsForSamplerResponse(path=path), optimizer=False)

    def _save(self, path: str, response: T, *, optimizer: bool) -> Result[T]:
        def work() -> T:
            self._model.save(self.run, path, optimizer=optimizer)
            return response

        return self._service._submit(work)

    def create_sampling_client(self, model_path: str) -> Result[Any]:
        return self._service.create_sampling_client(model_path)


class LocalSamplingClient:
    """A `tinker.SamplingClient` of one set of weights."""

    def __init__(self, service: LocalService, path: str | None) -> None:
        self.path = path
        self._service = service

    def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Result[Any]:
        ids, params = prompt.to_ints(), sampling_params.model_dump(exclude_none=True)

        def work() -> Any:
            found = self._service.model.sample(self.path, ids, num_samples, params)
            sequences = [
                tinker.SampledSequence(
                    "length" if g.finish_reason == "length" else "stop",
                    str(number),
                    np.array(g.token_ids, np.int32),
                    np.array(g.logprobs, np.float32),
                )
                for number, g in enumerate(found)
            ]
            return tinker.SampleResponse(sequences)

        return self._service._submit(work, sample=True)


def _done(value: T) -> Result[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return Result(future)


def _with_sdk_errors(work: Callable[[], T]) -> T:
    """Do some work. Errors of the model are raised as the SDK raises them."""
    try:
        return work()
    except ConfigError as e:
        raise _refused(str(e)) from e


def _refused(message: str) -> tinker.RequestFailedError:
    return tinker.RequestFailedError(message, "local", types.RequestErrorCategory.User)


async def run_over(service: LocalService, config: TinkerConfig, observe: Observer | None = None) -> int:
    """A run over this service, with a gateway in this process that samples from it."""
    key = secrets.token_urlsafe(24)
    upstream = UpstreamConfig(url="http://tinker.invalid", engine="tinker")
    given = GatewayConfig(upstreams=(upstream,), model_dir=str(config.model_dir), host="127.0.0.1", admin_key=key)
    gateway = Gateway(given, connect=lambda: service)
    await gateway.start()
    try:
        here = config.replace(gateway_url=gateway.url, gateway_public_url=None, gateway_admin_key=key)
        return await run_async(here, lambda state: TinkerTraining.open(service, here, state), observe)
    finally:
        await gateway.stop()
