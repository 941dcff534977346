"""The requests of all three APIs, held to botocore's own models of them, and the errors of their responses.

Source: botocore's models `sagemaker`, `sagemakertrainingsessionruntime`. They leave the inputs of a loss open: `check_loss`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any, NoReturn, TypeVar

import botocore.session
import msgspec
from botocore.validate import ParamValidator
from msgspec import Meta

from ....errors import PolicyError

T = TypeVar("T")
REGION, ACCOUNT = "us-west-2", "123456789012"  # of all names that the service gives
CONTROL, RUNTIME = "sagemaker", "sagemakertrainingsessionruntime"
STATUS = {
    "AccessDeniedException": 403,
    "ResourceNotFoundException": 404,
    "ConflictException": 409,
    "ThrottlingException": 429,
    "InternalServerException": 500,
}  # all others are 400
Fraction = Annotated[float, Meta(ge=0, le=1)]
# AWS also takes ref_log_prob and temperature, which are not computed here.
LOSS_INPUTS = ("target_tokens", "weights", "logprobs", "advantages")
CLIPS = {"clip_low_threshold": (0, 1), "clip_high_threshold": (1, 10)}


class RefusedError(PolicyError):
    """A request that is answered with an error of AWS's. ``code``: its name there."""

    def __init__(self, message: str, *, code: str = "ValidationException", **ids: Any) -> None:
        super().__init__(message, **ids)
        self.code = code


def arn(resource: str) -> str:
    """The name of a resource of this service."""
    return f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:{resource}"


def read(body: bytes, kind: type[T]) -> T:
    """Raises: RefusedError that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise RefusedError(str(e)) from e


def request(body: bytes, service: str, operation: str, **located: str) -> dict[str, Any]:
    """A request of this operation; ``located`` are the members in its path. Raises: RefusedError that names the member."""
    found = {**read(body, dict[str, Any]), **located}
    shape = _model(service).operation_model(operation).input_shape
    problems = ParamValidator().validate(found, shape)
    if problems.has_errors():
        _refuse(problems.generate_report())
    _check(found, shape, operation)
    return found


def check_loss(config: Mapping[str, Any]) -> None:
    """Check what AWS's model leaves open in a forward pass. Raises: RefusedError."""
    for name, value in config.get("lossFnConfig", {}).items():
        low, high = CLIPS.get(name) or _refuse(f"lossFnConfig has no {name}")
        if not isinstance(value, (int, float)) or not low <= value <= high:
            _refuse(f"{name} must be from {low} to {high}")
    for datum in config["datumList"]:
        for name, tensor in datum.get("lossFnInputs", {}).items():
            if name not in LOSS_INPUTS or not isinstance(tensor["data"], list):
                _refuse(f"lossFnInputs has no tensor {name} here")


def page(key: str, found: list[dict[str, Any]], asked: Mapping[str, Any]) -> dict[str, Any]:
    """A page of a list: ``MaxResults`` entries, 10 unless the request says so, as of AWS's lists; from ``NextToken`` on."""
    first, size = int(asked.get("NextToken", 0)), asked.get("MaxResults", 10)
    more = {"NextToken": str(first + size)} if first + size < len(found) else {}
    return {key: found[first : first + size], **more}


@functools.cache
def _model(service: str) -> Any:
    return botocore.session.get_session().get_service_model(service)


def _refuse(message: str) -> NoReturn:
    raise RefusedError(message)


def _check(value: Any, shape: Any, where: str) -> None:
    """Hold a value to what botocore's validator leaves to the service: upper limits, enums and patterns."""
    kind, limits = shape.type_name, shape.metadata
    if limits.get("document"):
        return
    if isinstance(value, bool) and kind != "boolean":
        _refuse(f"{where} must be of type {kind}")
    if kind == "structure":
        for name, member in value.items():
            _check(member, shape.members[name], name)
    elif kind in ("list", "map"):
        for member in value.values() if kind == "map" else value:
            _check(member, shape.value if kind == "map" else shape.member, where)
    size = len(value) if kind in ("string", "list", "map") else value
    if "max" in limits and size > limits["max"]:
        _refuse(f"{where} must be at most {limits['max']}")
    if kind == "string" and value not in limits.get("enum", [value]):
        _refuse(f"{where} must be one of {', '.join(limits['enum'])}")
    pattern = limits.get("pattern", ".*")
    if kind == "string" and "\\p{" not in pattern and not re.fullmatch(pattern, value, re.DOTALL):
        _refuse(f"{where} must match {pattern}")
