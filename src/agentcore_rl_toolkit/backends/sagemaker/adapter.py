"""SageMaker training sessions as a training client. Source: botocore 1.44.8; AWS's SDK `sagemaker-train` 1.27.0."""

from __future__ import annotations

import asyncio
import itertools
import math
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from ...errors import TrainingServiceError
from ...gateway.engines.sampling_service import Asked
from ...gateway.sampling_services.sagemaker import (
    CONTROL,
    RUNTIME,
    SESSIONS,
    Caller,
    SageMakerSampler,
    SessionRuntime,
    client_of,
    model_input,
)
from ...weights.engines import Sampled
from ..training.batch import Datum
from ..training.client import Adam, Loss, Passed
from ..training.publishing import publish
from ..training.run import run_async as run_service
from ..training.settings import Observer
from . import session
from .settings import SageMakerConfig

CHUNK_DATA = 1024  # limit of one operation, as in AWS's SDK
CHUNK_TOKENS = 160_000  # the other limit is 10 MB; a token and its four numbers take 60 bytes


class SageMakerTraining:
    """A `TrainingClient`. Operations are submitted in the order of their numbers, which begin with 1."""

    service, engine = "SageMaker", "sagemaker"
    max_logprob_gap: float | None = None  # the service's rounding is not known
    penalizes = False

    def __init__(self, control: Caller, runtime: SessionRuntime, config: SageMakerConfig) -> None:
        self.upstream = f"{runtime.client.meta.endpoint_url.rstrip('/')}{SESSIONS}{runtime.session}"
        self._control, self._runtime, self._config = control, runtime, config
        self._numbers = itertools.count(1)
        self._in_order = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._billed_before = session.billed_before(config.output_dir)
        self._published = ""  # the ARN of the newest weights for sampling

    @classmethod
    async def open(cls, config: SageMakerConfig, state: str | None) -> SageMakerTraining:
        """Open a session with fresh adapters or with a saved state. Raises: MissingExtraError, TrainingServiceError."""
        control, client = Caller(client_of(CONTROL, config.region)), client_of(RUNTIME, config.region)
        name = await session.start(control, config)
        made = cls(control, SessionRuntime(client, name, poll_s=config.poll_s), config)
        if state is not None:
            try:
                await made._do({"loadState": {"modelPackageArn": state, "loadOptimizer": True}})
            except BaseException:
                await made.close("errored")
                raise
        return made

    def forward_backward(self, data: Sequence[Datum], loss: Loss, tokens: float) -> Awaitable[Passed]:
        settings = {"lossFnConfig": dict(loss.options)} if loss.options else {}
        parts = chunks(data)
        sent = [
            self._do({"forwardBackward": {"lossFnName": loss.name, "datumList": [datum(d) for d in part], **settings}})
            for part in parts
        ]

        async def passed() -> Passed:
            return combined(await asyncio.gather(*sent), [len(part) for part in parts])

        return passed()

    def step(self, adam: Adam) -> Awaitable[Mapping[str, float]]:
        params = {"learningRate": adam.learning_rate, "beta1": adam.beta1, "beta2": adam.beta2}
        if adam.grad_clip_norm:  # AWS does not document that 0 means no limit
            params["gradClipNorm"] = adam.grad_clip_norm
        sent = self._do({"optimizerStep": {"adamParamsConfig": params}})

        async def stepped() -> Mapping[str, float]:
            metrics: dict[str, float] = (await sent).get("metrics", {})
            billed = session.billed(await session.describe(self._control, self._runtime.session))
            return metrics | {f"billed_{k}_tokens": float(n + self._billed_before[k]) for k, n in billed.items()}

        return stepped()

    async def save_weights(self, name: str) -> str:
        self._published = str((await self._do({"saveWeights": {"description": name}}))["modelPackageArn"])
        return self._published

    async def publish(self, version: int, gateway: Any, probe: Sequence[int] | None) -> None:
        await publish(self, self._config.exp_id, version, gateway, max_gap=self._config.max_weights_gap)

    async def save(self, steps: int) -> str:
        name = f"{self._config.exp_id}-{steps:06d}"
        return str((await self._do({"saveState": {"description": name}}))["modelPackageArn"])

    async def sample(self, path: str, prompt_ids: list[int], *, n: int, max_tokens: int) -> list[Sampled]:
        asked = Asked(prompt=prompt_ids, n=n, max_tokens=max_tokens)
        pieces = await SageMakerSampler(self._runtime, path).sample(asked)
        found = [(p.ids, [lp for lp in p.logprobs or () if lp is not None]) for p in pieces]
        if any(len(ids) != len(logprobs) for ids, logprobs in found):
            raise TrainingServiceError("SageMaker sampled tokens without logprobs, so they cannot be trained")
        return [Sampled(ids=ids[:max_tokens], logprobs=logprobs[:max_tokens]) for ids, logprobs in found]

    async def compute_logprobs(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Return logprobs of the newest model package, not of the weights in training, because `forward` may return none.

        So the proof shows that the sampler has the package. It does not show that the package has the last step.
        """
        asked = [{"prompt": model_input(ids), "modelPackageArn": self._published} for ids in sequences]
        found = await asyncio.gather(*(self._runtime.sample({"computeLogprobs": each}) for each in asked))
        return [each["logprobs"][1:] for each in found]  # the first token has none

    async def close(self, status: str) -> None:
        for task in self._running:
            task.cancel()
        await session.stop(self._control, self._runtime.session, self._config.output_dir)
        self._runtime.close()
        self._control.close()

    def _do(self, operation: Mapping[str, Any]) -> asyncio.Task[Any]:
        """Send an operation, and return the task of its result."""
        task = asyncio.ensure_future(self._done(next(self._numbers), operation))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _done(self, number: int, operation: Mapping[str, Any]) -> Any:
        limit_s = self._config.operation_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                async with self._in_order:  # the session hangs if a number arrives before the number below it
                    operation_id = await self._runtime.train(number, str(uuid.uuid4()), operation)
                return await self._runtime.trained(operation_id)
        except TimeoutError as e:
            what = f"{next(iter(operation))}, operation {number} of session {self._runtime.session},"
            raise TrainingServiceError(f"{what} took longer than {limit_s:g} s (operation_timeout_s)") from e


def datum(datum: Datum) -> dict[str, Any]:
    """Return a datum of the service, with one value per token. Each loss needs ``weights`` as well as advantages."""
    inputs: dict[str, tuple[str, Sequence[float]]] = {
        "target_tokens": ("int64", datum.target_tokens),
        "weights": ("float32", datum.mask),
        "logprobs": ("float32", datum.logprobs),
        "advantages": ("float32", datum.advantages),
    }
    tensors = {
        name: {"data": list(data), "dtype": dtype, "shape": [len(data)]} for name, (dtype, data) in inputs.items()
    }
    return {"modelInput": model_input(datum.tokens), "lossFnInputs": tensors}


def chunks(data: Sequence[Datum]) -> list[Sequence[Datum]]:
    """Split the data of one step into as few operations of about one size as their bounds allow.

    Gradients add up until the optimizer's step. AWS does not document if an operation's loss is a sum or a mean.
    """
    tokens = sum(len(each.tokens) for each in data)
    number = max(math.ceil(len(data) / CHUNK_DATA), math.ceil(tokens / CHUNK_TOKENS))
    number = min(number, len(data))
    ends = [len(data) * k // number for k in range(number + 1)]
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def combined(results: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> Passed:
    """Combine the results of a step's operations. Metrics ``name:sum`` are sums, others are means over the data.

    AWS promises no logprobs in them.
    """
    metrics: dict[str, float] = {}
    for result, size in zip(results, sizes, strict=True):
        for name, value in result.get("metrics", {}).items():
            metrics[name] = metrics.get(name, 0.0) + value * (1.0 if name.endswith(":sum") else size / sum(sizes))
    return Passed(metrics=metrics)


async def run_async(config: SageMakerConfig, observe: Observer | None = None) -> int:
    """Train as configured. Returns the last weight version."""
    return await run_service(config, lambda state: SageMakerTraining.open(config, state), observe)
