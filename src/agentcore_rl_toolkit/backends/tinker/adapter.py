"""Tinker's SDK as a training client. Source: the `tinker` package 0.38.0 (every verb sends its request at once)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..._installation import missing_extra
from ...weights.engines import Sampled
from ..training.batch import Datum
from ..training.client import Adam, Loss, Passed
from ..training.publishing import publish
from ..training.run import run_async as run_service
from ..training.settings import Observer
from .settings import TinkerConfig


class TinkerTraining:
    """A `TrainingClient`: ``service`` is a `tinker.ServiceClient`, ``training`` a `tinker.TrainingClient`."""

    service, engine = "Tinker", "tinker"
    max_logprob_gap: float | None = None  # the service's rounding is not known
    penalizes = False

    def __init__(self, service: Any, training: Any, config: TinkerConfig) -> None:
        self.upstream = config.url
        self._config = config
        self._service = service
        self._training = training
        self._tinker = sdk()

    @classmethod
    async def open(cls, service: Any, config: TinkerConfig, state: str | None) -> TinkerTraining:
        """Open the weights in training: fresh adapters, or those of a saved state."""

        def make() -> Any:
            if state is not None:
                return service.create_training_client_from_state_with_optimizer(state).result()
            return service.create_lora_training_client(
                base_model=config.base_model, rank=config.rank, seed=config.seed
            ).result()

        return cls(service, await asyncio.to_thread(make), config)

    def forward_backward(self, data: Sequence[Datum], loss: Loss, tokens: float) -> Awaitable[Passed]:
        sent = self._training.forward_backward([self.datum(d) for d in data], loss.name, dict(loss.options) or None)

        async def passed() -> Passed:
            output = await sent
            return Passed(metrics=_numbers(output.metrics), logprobs=_logprobs(output))

        return passed()

    def step(self, adam: Adam) -> Awaitable[Mapping[str, float]]:
        sent = self._training.optim_step(self._tinker.AdamParams(**asdict(adam)))

        async def stepped() -> Mapping[str, float]:
            return _numbers((await sent).metrics)

        return stepped()

    async def save_weights(self, name: str) -> str:
        return str((await self._training.save_weights_for_sampler(name)).path)

    async def publish(self, version: int, gateway: Any, probe: Sequence[int] | None) -> None:
        await publish(self, self._config.exp_id, version, gateway, max_gap=self._config.max_weights_gap)

    async def save(self, steps: int) -> str:
        name = f"{self._config.exp_id}-{steps:06d}"
        return str((await self._training.save_state(name, overwrite=True)).path)

    async def sample(self, path: str, prompt_ids: list[int], *, n: int, max_tokens: int) -> list[Sampled]:
        sampler = await self._training.create_sampling_client(path)
        params = self._tinker.SamplingParams(max_tokens=max_tokens, temperature=1.0)
        found = await sampler.sample(self._tinker.ModelInput.from_ints(prompt_ids), n, params)
        return [Sampled(ids=list(s.tokens), logprobs=list(s.logprobs or ())) for s in found.sequences]

    async def compute_logprobs(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        data = [self._datum(s[:-1], {"target_tokens": s[1:], "weights": [1.0] * (len(s) - 1)}) for s in sequences]
        return _logprobs(await self._training.forward(data, "cross_entropy")) or []

    async def close(self, status: str) -> None:
        # Awaited in a thread: the SDK's future belongs to another event loop, and this one may be closing.
        await asyncio.to_thread(lambda: self._service.close(status).result())

    def datum(self, datum: Datum) -> Any:
        inputs = {name: getattr(datum, name) for name in ("target_tokens", "logprobs", "advantages")}
        return self._datum(datum.tokens, inputs)

    def _datum(self, tokens: list[int], inputs: dict[str, Any]) -> Any:
        return self._tinker.Datum(model_input=self._tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


async def run_async(config: TinkerConfig, observe: Observer | None = None) -> int:
    """Train as configured. Returns the last weight version. Raises: MissingExtraError without the SDK."""
    service = await asyncio.to_thread(sdk().ServiceClient, base_url=config.service_url)
    return await run_service(config, lambda state: TinkerTraining.open(service, config, state), observe)


def _numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    return {str(k): float(v) for k, v in (metrics or {}).items()}


def _logprobs(output: Any) -> list[list[float]] | None:
    if any("logprobs" not in each for each in output.loss_fn_outputs):
        return None
    return [list(each["logprobs"].data) for each in output.loss_fn_outputs]


def sdk() -> Any:
    try:
        import tinker
    except ModuleNotFoundError as e:
        raise missing_extra("Tinker needs its SDK", "tinker") from e
    return tinker
