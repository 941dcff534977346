"""The requests of SageMaker's APIs, checked by botocore's own models of them, and the errors of the responses.

Source: botocore's models `sagemaker` and `sagemakertrainingsessionruntime`.
"""

from __future__ import annotations

import functools
from typing import Any

import botocore.session
import msgspec
from botocore.validate import ParamValidator

from ....errors import PolicyError

REGION, ACCOUNT = "us-west-2", "123456789012"  # part of all names that the service gives
STATUS = {
    "AccessDeniedException": 403,
    "ResourceNotFoundException": 404,
    "ConflictException": 409,
    "ThrottlingException": 429,
    "InternalServerException": 500,
}  # all others are 400


class RefusedError(PolicyError):
    """A request that gets an error of AWS. ``code`` is AWS's name of the error."""

    def __init__(self, message: str, *, code: str = "ValidationException", **ids: Any) -> None:
        super().__init__(message, **ids)
        self.code = code


def arn(resource: str) -> str:
    """Return the ARN of a resource of this service."""
    return f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:{resource}"


def read(body: bytes) -> dict[str, Any]:
    """Decode a body. Raises: RefusedError."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise RefusedError(str(e)) from e


def request(body: bytes, service: str, operation: str, **located: str) -> dict[str, Any]:
    """Read and check a request for this operation. ``located`` are the members in its path. Raises: RefusedError."""
    found = {**read(body), **located}
    problems = ParamValidator().validate(found, _model(service).operation_model(operation).input_shape)
    if problems.has_errors():
        raise RefusedError(problems.generate_report())
    return found


@functools.cache
def _model(service: str) -> Any:
    return botocore.session.get_session().get_service_model(service)
