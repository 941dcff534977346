"""The training half of a `service.TinkerServer`: models in training, their requests in order, what they save."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ...errors import AgentCoreRLError, ConfigError
from .listening import Answer
from .messages import ForwardBackward, read_forward_backward, write_forward_backward
from .promises import Promise, Promises, refuse
from .scripted import TinkerModel

PROTOBUF = "application/x-protobuf"


@dataclass
class _Run:
    """A model in training. Requests carry numbers and are worked on in that order, whatever order they arrive in."""

    id: str
    next_seq: int
    waiting: dict[int, Callable[[], Any]] = field(default_factory=dict)
    promises: dict[int, str] = field(default_factory=dict)


class Runs:
    """All runs of a service. `updates` are what was trained on, `steps` the optimizer's parameters, in order."""

    def __init__(self, model: TinkerModel, promises: Promises, new_sampler: Callable[[str | None], str]) -> None:
        self.model = model
        self.updates: list[ForwardBackward] = []
        self.steps: list[dict[str, float]] = []
        self._promises = promises
        self._new_sampler = new_sampler
        self._numbers = itertools.count(1)
        self._runs: dict[str, _Run] = {}
        self._trainer = ThreadPoolExecutor(1, "tinker-train")

    def stop(self) -> None:
        self._trainer.shutdown(wait=False, cancel_futures=True)

    def create(self, body: dict[str, Any]) -> Any:
        if body["base_model"] != self.model.base_model:
            return refuse(404, f"there is no base model {body['base_model']!r}; there is {self.model.base_model!r}")
        run = f"{body['session_id']}:train:{body['model_seq_id']}"
        self._runs[run] = _Run(run, 0)
        return self._queue(run, 0, lambda: self.model.create(run), lambda _: {"type": "create_model", "model_id": run})

    def info(self, run: str) -> dict[str, Any]:
        if run not in self._runs:
            raise ConfigError(f"there is no model {run!r}")
        name = self.model.base_model
        data = {"arch": "qwen3", "model_name": name, "tokenizer_id": name}
        return {"type": "get_info", "model_id": run, "model_name": name, "model_data": data, "is_lora": False}

    def weights_info(self, path: str) -> Any:
        if path not in self.model.paths:
            return refuse(404, f"there are no weights {path!r}")
        return {"base_model": self.model.base_model, "is_lora": False}

    def forward_backward(self, data: bytes) -> Answer:
        asked = read_forward_backward(data)

        def work() -> tuple[list[list[float]], dict[str, float]]:
            return self.model.forward_backward(
                asked.model_id, asked.data, asked.loss_fn, asked.config, asked.forward_only
            )

        if asked.seq_id not in self._run(asked.model_id).promises and not asked.forward_only:
            self.updates.append(asked)
        return self._queue(asked.model_id, asked.seq_id, work, lambda made: write_forward_backward(*made))

    def optim_step(self, body: dict[str, Any]) -> Answer:
        adam = body.get("adam_params")
        if adam is None:
            return refuse(422, "only Adam is known here")
        self.steps.append(adam)
        run = body["model_id"]
        return self._queue(run, body["seq_id"], lambda: self.model.optim_step(run, adam), lambda m: {"metrics": m})

    def save(self, body: dict[str, Any]) -> Answer:
        run = body["model_id"]
        path = f"tinker://{run}/weights/{body['path']}"
        if path in self.model.paths and not body.get("overwrite"):
            return refuse(409, f"{path} is there already")

        answer = {"type": "save_weights", "path": path}
        return self._queue(run, body["seq_id"], lambda: self.model.save(run, path), lambda _: answer)

    def save_for_sampler(self, body: dict[str, Any]) -> Answer:
        run, name = body["model_id"], body.get("path")
        path = f"tinker://{run}/sampler_weights/{name or 'ephemeral-' + str(next(self._numbers))}"

        def done(_: Any) -> dict[str, Any]:
            answer = {"type": "save_weights_for_sampler"}
            return answer | ({"path": path} if name else {"sampling_session_id": self._new_sampler(path)})

        return self._queue(run, body["seq_id"], lambda: self.model.publish(run, path), done)

    def load(self, body: dict[str, Any]) -> Any:
        path = body["path"]
        if path not in self.model.paths:
            return refuse(404, f"there are no weights {path!r}")
        run, seq = body.get("model_id"), body.get("seq_id") or 0
        if run is None:  # the first request of a new model
            run = f"{body['session_id']}:train:{body['model_seq_id']}"
            self._runs[run] = _Run(run, 0)
        name = run

        def work() -> None:
            if seq == 0:
                self.model.create(name)
            self.model.load(name, path, bool(body.get("optimizer")))

        return self._queue(run, seq, work, lambda _: {"type": "load_weights", "path": path, "model_id": name})

    def _run(self, run: str) -> _Run:
        if run not in self._runs:
            raise ConfigError(f"there is no model {run!r}")
        return self._runs[run]

    def _queue(self, name: str, seq: int, work: Callable[[], Any], answer: Callable[[Any], Any]) -> Answer:
        """Do some work when its number is due; the answer names the promise."""
        run = self._run(name)
        request_id = run.promises.get(seq)
        if request_id is None:
            request_id = run.promises[seq] = f"{name}:{seq}"
            promise = self._promises.make(request_id)
            run.waiting[seq] = lambda: self._do(promise, work, answer)
            self._promises.start(self._due(run))
        return Answer(body=json.dumps({"request_id": request_id, "model_id": name}).encode())

    async def _due(self, run: _Run) -> None:
        while (do := run.waiting.pop(run.next_seq, None)) is not None:
            run.next_seq += 1
            await do()

    async def _do(self, promise: Promise, work: Callable[[], Any], answer: Callable[[Any], Any]) -> None:
        try:
            made = answer(await asyncio.get_running_loop().run_in_executor(self._trainer, work))
        except (AgentCoreRLError, KeyError, ValueError) as e:
            promise.fail(f"{type(e).__name__}: {e}")
            return
        except Exception as e:
            promise.broke(e)
            return
        if isinstance(made, bytes):
            promise.keep(made, PROTOBUF)
        else:
            promise.keep(json.dumps(made).encode())
