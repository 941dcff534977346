"""Training sessions over a model: their states and operations.

Theory of operation. The state of a session is read off what happened to it, never kept: it is Created until its run exists,
Blocked while an operation waits for a number before it, Failed once a training operation failed, Stopped when a client stopped
it (Stopping while an operation still computes), else Running. Operations that come to their turn in a session that is Failed or
Stopped are Skipped. AWS does not say whether a session outlives a failed operation; here it does not, the stricter reading.

The gradient is that of the loss summed over tokens. ``actor/pg_loss`` is its mean over the data of one request, as the SDK
combines the metrics of several. Per-token outputs are not given: AWS does not promise them.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from botocore import xform_name

from ....errors import ConfigError
from ..interface import Example
from ..model import PolicyModel
from ..operations import Operations
from . import wire
from .control import Packages
from .wire import RefusedError

PASSES = ("forward", "forwardBackward")
NOT_COMPUTED = ("includePromptLogprobs", "topkPromptLogprobs")
KEPT_SAMPLES = 4_000  # results of sampling operations that can still be asked for


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation that a client submitted. Its result is None where it was skipped."""

    kind: str
    token: str | None = None
    result: Future[Any]

    def answer(self, *, skipped: bool) -> dict[str, Any]:
        """The response to a request for this operation's result. ``skipped``: it will not start if it has not."""
        if self.result.running():
            return {"status": "InProgress"}
        if not self.result.done():
            return {"status": "Skipped" if skipped else "Pending"}
        if (error := self.result.exception()) is not None:
            return {"status": "Failed", "errorDetails": str(error)}
        if (result := self.result.result()) is None:
            return {"status": "Skipped"}
        usage = {"tokenUsage": result["tokenUsage"]} if "tokenUsage" in result else {}
        return {"status": "Completed", "operationResult": {self.kind: result}, **usage}


class Service:
    """The parts that sessions share."""

    def __init__(self, model: PolicyModel, packages: Packages) -> None:
        self.model = model
        self.packages = packages
        self.operations = Operations()
        self.samplers = ThreadPoolExecutor(64, "sagemaker-sample")

    def close(self) -> None:
        self.operations.close()
        self.samplers.shutdown(wait=False, cancel_futures=True)


class Session:
    """One training session. Its requests come from one thread."""

    def __init__(self, service: Service, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.name: str = asked["TrainingSessionName"]
        self.created_s = time.time()
        self.ended_s: float | None = None
        self._service, self._model = service, service.model
        self._run = f"{self.name}:{secrets.token_hex(4)}"
        self._training: dict[str, Operation] = {}
        self._sampling: OrderedDict[str, Operation] = OrderedDict()
        self._last_number = self._samples = 0
        self._latest: str | None = None  # the newest model package
        self._error: str | None = None
        self._tokens: Counter[str] = Counter()
        self._lock = threading.Lock()
        service.operations.begin(self._run)
        self._created = service.operations.submit(self._run, 0, lambda: self._model.create(self._run))

    # -- the control plane

    @property
    def status(self) -> str:
        if self.ended_s is not None:
            computes = any(o.result.running() for o in self._training.values())
            return "Stopping" if computes else "Stopped"
        if self._error is not None:
            return "Failed"
        if not self._created.done():
            return "Created"
        return "Blocked" if self._service.operations.blocked(self._run) else "Running"

    def described(self) -> dict[str, Any]:
        """The TrainingSessionDetail."""
        counts = {f"{kind}TokenCount": self._tokens[kind] for kind in ("Prefill", "Sample", "Training")}
        numbers = {"LastReceivedSequenceNumber": self._last_number, "BillableTokenUsage": counts}
        ended = {"EndTime": self.ended_s, "ErrorDetails": self._error}
        known = {name: value for name, value in ended.items() if value is not None}
        return {**self.asked, **self.summary(), **numbers, **known}

    def summary(self) -> dict[str, Any]:
        """Its entry in ListTrainingSessions."""
        return {
            "TrainingSessionArn": wire.arn(f"training-session/{self.name}"),
            "TrainingSessionStatus": self.status,
            "CreationTime": self.created_s,
            "LastModifiedTime": self.ended_s or self.created_s,
        }

    def stop(self) -> None:
        """Raises: RefusedError on a session that has ended."""
        self.check_transition("Stopping", "Created", "Running", "Blocked")
        self.ended_s = time.time()

    def check_transition(self, new: str, *allowed: str) -> None:
        """Raises: RefusedError where the session's state is not one of those ``allowed``."""
        if (status := self.status) not in allowed:
            raise RefusedError(f"invalid session state transition from {status} to {new}")

    # -- the runtime

    def train(self, asked: Mapping[str, Any]) -> str:
        """The id of a training operation: a new one, or the one that this client token and number came with before."""
        [(kind, config)] = asked["operationConfig"].items()
        if kind in PASSES:
            wire.check_loss(config)
        number, token = asked["sequenceNumber"], asked.get("clientToken")
        operation_id = f"train-{number}"
        known = self._training.get(operation_id)
        if known is None:
            self._check_open()
            self._last_number = max(self._last_number, number)
            result = self._service.operations.submit(self._run, number, lambda: self._in_turn(kind, config))
            self._training[operation_id] = Operation(kind=kind, token=token, result=result)
        elif token is None or known.token != token:
            raise RefusedError(f"sequence number {number} was used by another operation")
        return operation_id

    def sample(self, asked: Mapping[str, Any]) -> str:
        """The id of a new sampling operation."""
        [(kind, config)] = asked["operationConfig"].items()
        if config.keys() & NOT_COMPUTED:
            raise RefusedError(f"{', '.join(NOT_COMPUTED)} are not computed here")
        self._check_open()
        self._samples += 1
        path = config.get("modelPackageArn") or self._latest
        result = self._service.samplers.submit(self._sampled, kind, path, config)
        self._sampling[f"sample-{self._samples}"] = Operation(kind=kind, result=result)
        if len(self._sampling) > KEPT_SAMPLES:
            self._sampling.popitem(last=False)
        return f"sample-{self._samples}"

    def answer(self, operation_id: str) -> dict[str, Any]:
        """Status and result of an operation. Raises: RefusedError."""
        operation = self._training.get(operation_id) or self._sampling.get(operation_id)
        if operation is None:
            raise RefusedError(f"Operation {operation_id} does not exist.", code="ResourceNotFoundException")
        return operation.answer(skipped=self._over)

    @property
    def _over(self) -> bool:
        return self.ended_s is not None or self._error is not None

    def _check_open(self) -> None:
        if (status := self.status) not in ("Running", "Blocked"):
            raise RefusedError(f"The session is {status}; it must be Running or Blocked.", code="ConflictException")

    def _count(self, **tokens: int) -> None:
        with self._lock:
            self._tokens.update(tokens)

    def _in_turn(self, kind: str, config: Any) -> dict[str, Any] | None:
        try:
            return None if self._over else self._trained(kind, config)
        except Exception as e:
            self._error = f"{kind} failed: {e}"  # before a client can see that the operation failed
            raise

    def _trained(self, kind: str, config: Any) -> dict[str, Any]:
        """Do a training operation; its result. Raises: ConfigError, and what the model raises."""
        match kind:
            case "forward" | "forwardBackward":
                loss = config["lossFnName"]
                data = [_example(datum, loss) for datum in config["datumList"]]
                clips = config.get("lossFnConfig", {})
                _, metrics = self._model.forward_backward(self._run, data, loss, clips, kind == "forward")
                tokens = sum(len(example.tokens) for example in data)
                self._count(Training=tokens)
                mean = {"actor/pg_loss": metrics["loss:sum"] / len(data)}
                return {"metrics": mean, "tokenUsage": {"trainingTokens": tokens}}
            case "optimizerStep":
                metrics = self._model.optim_step(self._run, _named(config["adamParamsConfig"]))
                return {"metrics": {"actor/grad_norm": metrics["grad_norm:mean"]}}
            case "loadState":
                self._check_saved(config["modelPackageArn"])
                self._model.load(self._run, config["modelPackageArn"], config["loadOptimizer"])
                return {}
        group, packages = self.asked.get("ModelPackageGroupArn", self.name), self._service.packages
        arn = packages.next_arn(group.rpartition("/")[2])
        checkpoint, base = kind == "saveState", self.asked["ModelConfig"]["BaseModelArn"]
        (self._model.save if checkpoint else self._model.publish)(self._run, arn)
        packages.add(arn, description=config.get("description", ""), checkpoint=checkpoint, base_model_arn=base)
        self._latest = arn
        return {"modelPackageArn": arn}

    def _sampled(self, kind: str, path: str | None, config: Any) -> dict[str, Any]:
        """Do a sampling operation; its result. Raises: ConfigError, and what the model raises."""
        self._check_saved(path)
        if kind == "loadWeightsForSampling":
            return {}
        ids = _ids(config["prompt"])
        if kind == "computeLogprobs":
            self._count(Prefill=len(ids))
            return {"logprobs": [None, *self._model.logprobs(path, ids)]}
        done = self._model.sample(path, ids, config["numSamples"], _named(config["samplingParams"]))
        self._count(Prefill=len(ids) * len(done), Sample=sum(len(c.ids) for c in done))
        sequences = [
            {
                "stopReason": c.stop_reason,
                "tokens": c.ids,
                "logprobs": c.logprobs,
                "tokenUsage": {"prefill": len(ids), "decode": len(c.ids)},
            }
            for c in done
        ]
        return {"sequences": sequences}

    def _check_saved(self, path: str | None) -> None:
        if path is not None and path not in self._model.paths:
            raise ConfigError(f"model package {path} does not exist")


def _named(members: Mapping[str, Any]) -> dict[str, Any]:
    """With the names of `PolicyModel`."""
    return {xform_name(name): value for name, value in members.items()}


def _ids(model_input: Mapping[str, Any]) -> list[int]:
    return [token for chunk in model_input["chunks"] for token in chunk["tokens"]]


def _example(datum: Mapping[str, Any], loss: str) -> Example:
    """Raises: ConfigError on an input that is missing or has another length than the tokens."""
    tokens, tensors = _ids(datum["modelInput"]), datum.get("lossFnInputs", {})
    needed = ("target_tokens", "weights") + (() if loss == "cross_entropy" else ("logprobs", "advantages"))
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise ConfigError(f"{loss} needs {', '.join(missing)}")
    for name, tensor in tensors.items():
        n, shape = len(tensor["data"]), tensor.get("shape", [len(tokens)])
        if n != len(tokens) or shape != [n]:
            raise ConfigError(f"{name} has {n} values of shape {shape} for {len(tokens)} tokens")
    return Example(tokens=tokens, inputs={name: tensor["data"] for name, tensor in tensors.items()})
