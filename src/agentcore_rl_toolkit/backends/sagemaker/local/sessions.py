"""Training sessions over a model. Operations are done one at a time, in the order of their numbers.

AWS does not document what a failed operation does to its session. In this service it ends the session, and later operations fail.
A number that leaves a gap is refused. The gradient is that of the loss summed over tokens; ``actor/pg_loss`` is its mean
over the data of one request, as the SDK combines the metrics of several.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from typing import Any

from botocore import xform_name

from ....errors import ConfigError
from ...training.batch import Datum, datum_of
from ...training.client import Adam, Loss
from ...training.local import LocalModel
from . import wire
from .wire import RefusedError


def save_package(model: LocalModel, run: str, group: str, *, optimizer: bool = False) -> str:
    """Save the weights of a run as the next version of a model package group, by its name or ARN. Returns the version's ARN."""
    prefix = wire.arn(f"model-package/{group.rpartition('/')[2]}/")
    path = f"{prefix}{1 + sum(known.startswith(prefix) for known in model.paths)}"
    model.save(run, path, optimizer=optimizer)
    return path


class Session:
    """A training session. It begins with its CreateTrainingSession request."""

    def __init__(self, model: LocalModel, trainer: Executor, samplers: Executor, request: dict[str, Any]) -> None:
        self.name: str = request["TrainingSessionName"]
        self.arn = wire.arn(f"training-session/{self.name}")
        self._request, self._model, self._trainer, self._samplers = request, model, trainer, samplers
        self._run = f"{self.name}:{secrets.token_hex(4)}"
        self._operations: dict[str, tuple[str, str | None, Future[Any]]] = {}  # kind, client token and result, by id
        self._number = 0  # the last training operation
        self._latest: str | None = None  # the newest model package
        self._created_s, self._ended_s = time.time(), 0.0
        self._error = ""
        self._tokens: Counter[str] = Counter()
        self._created = trainer.submit(model.create, self._run)

    # -- the control plane

    @property
    def status(self) -> str:
        if self._ended_s:
            return "Stopping" if any(result.running() for *_, result in self._operations.values()) else "Stopped"
        return "Failed" if self._error else "Running" if self._created.done() else "Created"

    def described(self) -> dict[str, Any]:
        """Return the TrainingSessionDetail."""
        counts = {f"{kind}TokenCount": self._tokens[kind] for kind in ("Prefill", "Sample", "Training")}
        return {
            **self._request,
            "TrainingSessionArn": self.arn,
            "TrainingSessionStatus": self.status,
            "CreationTime": self._created_s,
            "LastModifiedTime": self._ended_s or self._created_s,
            "LastReceivedSequenceNumber": self._number,
            "BillableTokenUsage": counts,
            **({"ErrorDetails": self._error} if self._error else {}),
        }

    def stop(self) -> None:
        """Stop the session. Raises: RefusedError if it has ended."""
        if (status := self.status) not in ("Created", "Running"):
            raise RefusedError(f"invalid session state transition from {status} to Stopping")
        self._ended_s = time.time()

    # -- the runtime

    def train(self, request: Mapping[str, Any]) -> str:
        """Start a training operation, and return its id. The same client token and number are the same operation."""
        [(kind, config)] = request["operationConfig"].items()
        number, token = request["sequenceNumber"], request.get("clientToken")
        if known := self._operations.get(operation_id := f"train-{number}"):
            if known[1] != token:
                raise RefusedError(f"sequence number {number} was used by another operation")
            return operation_id
        self._check_open()
        if number != self._number + 1:
            raise RefusedError(f"sequence number {number} comes after {self._number}")
        self._number = number
        self._operations[operation_id] = kind, token, self._trainer.submit(self._in_turn, kind, config)
        return operation_id

    def sample(self, request: Mapping[str, Any]) -> str:
        """Start a sampling operation. Returns its id."""
        [(kind, config)] = request["operationConfig"].items()
        self._check_open()
        result = self._samplers.submit(self._do_sampling, kind, {"modelPackageArn": self._latest, **config})
        self._operations[operation_id := f"sample-{len(self._operations)}"] = kind, None, result
        return operation_id

    def result(self, operation_id: str) -> dict[str, Any]:
        """Return status and result of an operation. Raises: RefusedError."""
        if operation_id not in self._operations:
            raise RefusedError(f"Operation {operation_id} does not exist.", code="ResourceNotFoundException")
        kind, _, result = self._operations[operation_id]
        if not result.done():
            return {"status": "InProgress" if result.running() else "Pending"}
        if (error := result.exception()) is not None:
            return {"status": "Failed", "errorDetails": str(error)}
        found = result.result()
        usage = {"tokenUsage": found["tokenUsage"]} if "tokenUsage" in found else {}
        return {"status": "Completed", "operationResult": {kind: found}, **usage}

    def _check_open(self) -> None:
        if (status := self.status) != "Running":
            raise RefusedError(f"The session is {status}; it must be Running.", code="ConflictException")

    # -- on threads

    def _in_turn(self, kind: str, config: Any) -> dict[str, Any]:
        if self._ended_s or self._error:
            raise RefusedError("the session is over")
        try:
            return self._do_training(kind, config)
        except Exception as e:
            self._error = f"{kind} failed: {e}"  # set before a client can read that the operation failed
            raise ConfigError(str(e)) from e

    def _do_training(self, kind: str, config: Any) -> dict[str, Any]:
        match kind:
            case "forward" | "forwardBackward":
                data = [_datum(each) for each in config["datumList"]]
                loss = Loss(name=config["lossFnName"], options=config.get("lossFnConfig", {}))
                passed = self._model.forward_backward(self._run, data, loss, backward=kind == "forwardBackward")
                tokens = sum(len(datum.tokens) for datum in data)
                self._tokens["Training"] += tokens
                mean = {"actor/pg_loss": passed.metrics["loss"] / len(data)}
                return {"metrics": mean, "tokenUsage": {"trainingTokens": tokens}}
            case "optimizerStep":
                given = config["adamParamsConfig"]
                adam = Adam(
                    learning_rate=given["learningRate"],
                    beta1=given.get("beta1", 0.9),
                    beta2=given.get("beta2", 0.95),
                    grad_clip_norm=given.get("gradClipNorm", 0.0),
                )
                return {"metrics": {"actor/grad_norm": self._model.step(self._run, adam)["grad_norm"]}}
            case "loadState":
                self._model.load(self._run, config["modelPackageArn"], optimizer=config["loadOptimizer"])
                return {}
        group = self._request.get("ModelPackageGroupArn", self.name)
        self._latest = save_package(self._model, self._run, group, optimizer=kind == "saveState")
        return {"modelPackageArn": self._latest}

    def _do_sampling(self, kind: str, config: Any) -> dict[str, Any]:
        path = config["modelPackageArn"]
        if path is not None and path not in self._model.paths:
            raise ConfigError(f"model package {path} does not exist")
        if kind == "loadWeightsForSampling":
            return {}
        ids = _ids(config["prompt"])
        if kind == "computeLogprobs":
            return {"logprobs": [None, *self._model.logprobs(path, ids)]}
        params = {xform_name(name): value for name, value in config["samplingParams"].items()}
        generations = self._model.sample(path, ids, config["numSamples"], params)
        self._tokens.update(Prefill=len(ids) * len(generations), Sample=sum(len(g.token_ids) for g in generations))
        sequences = [
            {
                "stopReason": g.finish_reason,
                "tokens": g.token_ids,
                "logprobs": g.logprobs,
                "tokenUsage": {"prefill": len(ids), "decode": len(g.token_ids)},
            }
            for g in generations
        ]
        return {"sequences": sequences}


def _ids(model_input: Mapping[str, Any]) -> list[int]:
    return [token for chunk in model_input["chunks"] for token in chunk["tokens"]]


def _datum(given: Mapping[str, Any]) -> Datum:
    """Read a datum. Raises: ConfigError if an input's length is not that of the tokens."""
    tokens, inputs = _ids(given["modelInput"]), {k: v["data"] for k, v in given.get("lossFnInputs", {}).items()}
    wrong = [name for name, values in inputs.items() if len(values) != len(tokens)]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)} must have a value for each of {len(tokens)} tokens")
    return datum_of(tokens, inputs)
