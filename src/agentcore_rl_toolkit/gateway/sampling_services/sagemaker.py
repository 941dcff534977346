"""SageMaker Training Sessions by boto3: calls with retries, operations until they end, and a sampler of one model package.

botocore signs, writes and reads; its own retries are off, because a training operation that is sent again must keep its
client token and its number. Source: botocore 1.44.8, `sagemakertrainingsessionruntime`.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..._installation import missing_extra
from ..._servers.keys import credential_of_runtime
from ...aws_errors import Fate, Fault, look_up
from ...errors import ConfigError, TrainingServiceError
from ...messages.errors import RequestError
from ...store import backoff_s
from ...store.remote import find_region
from ..engines import Piece
from ..engines.errors import upstream_error
from ..engines.sampling_service import Asked

RUNTIME, CONTROL = "sagemakertrainingsessionruntime", "sagemaker"
SESSIONS = "/v1/training-sessions/"  # precedes the session's name in the URL of a gateway's upstream
LEAST_TOKENS = 512  # botocore and the service refuse a smaller maxTokens
CONNECTIONS = 64
POLL_S = 2.0  # as in AWS's SDK; the first polls come sooner, for short operations
PATIENCE_S = 300.0  # the time for which a service may throttle, fail or be unreachable
INVALID = "ValidationException"
_FIRST_POLL_S, _GROWTH = 0.1, 1.5
_REGION = re.compile(r"\.sagemaker(?:-fips)?\.([a-z0-9-]+)\.")  # the region in an endpoint of AWS


def client_of(service: str, region: str | None, endpoint_url: str | None = None) -> Any:
    """Return a boto3 client. ``region`` None: boto3 finds it. The key of a local service of this user is found by its address.

    Raises: MissingExtraError when the installed boto3 does not know the service; ConfigError without a region.
    """
    import boto3
    from botocore.config import Config
    from botocore.exceptions import NoRegionError, UnknownServiceError

    session = boto3.Session()
    settings: dict[str, Any] = {
        "endpoint_url": endpoint_url,
        "region_name": region or find_region(),
        "config": Config(retries={"total_max_attempts": 1}, connect_timeout=10, max_pool_connections=CONNECTIONS),
    }
    try:
        made = session.client(service, **settings)
    except UnknownServiceError as e:
        raise missing_extra("SageMaker's training needs botocore 1.43.112 or later", "sagemaker") from e
    except NoRegionError as e:
        raise ConfigError("SageMaker needs a region: export AWS_REGION") from e
    credential = credential_of_runtime(made.meta.endpoint_url)
    if credential is None:
        return made
    access_key, secret = credential
    return session.client(service, aws_access_key_id=access_key, aws_secret_access_key=secret, **settings)


class Caller:
    """Calls of one boto3 client from asyncio, each in a thread. Temporary errors are retried."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._threads = ThreadPoolExecutor(CONNECTIONS, "sagemaker")

    async def call(self, verb: str, **request: Any) -> Any:
        """Return the answer. Raises: TrainingServiceError."""
        from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

        loop, give_up_s = asyncio.get_running_loop(), time.monotonic() + PATIENCE_S
        for failures in itertools.count(1):
            try:
                return await loop.run_in_executor(self._threads, lambda: getattr(self.client, verb)(**request))
            except (BotoCoreError, ClientError) as e:
                fault = look_up(e) or Fault(fate=Fate.FINAL, code="")
                passes = fault.fate in (Fate.TRANSIENT, Fate.UNCERTAIN)
                passes = passes or fault.status == 429 or "Throttling" in fault.code
                if not passes or time.monotonic() > give_up_s:
                    code = INVALID if isinstance(e, ParamValidationError) else fault.code
                    raise TrainingServiceError(str(e), code=code) from e
            await asyncio.sleep(backoff_s(failures, first_s=0.25, most_s=4.0))

    async def create(self, verb: str, **request: Any) -> bool:
        """Make a resource, or return False if its name exists. If cancelled, wait for the request: a stop must come after it.

        Raises: TrainingServiceError.
        """
        making = asyncio.ensure_future(self.call(verb, **request))
        try:
            await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.wait([making])
            raise
        except TrainingServiceError as e:
            if e.code != "ResourceInUse":
                raise
            return False
        return True

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.client.close()


class SessionRuntime(Caller):
    """The runtime of one training session. ``poll_s`` is the longest time between two questions for a result."""

    def __init__(self, client: Any, session: str, *, poll_s: float = POLL_S) -> None:
        super().__init__(client)
        self.session = session
        self._poll_s = poll_s

    async def train(self, number: int, token: str, operation: Mapping[str, Any]) -> str:
        """Submit a training operation, and return its id. The same number and token are the same operation."""
        sent = await self.call(
            "execute_training_operation",
            trainingSessionName=self.session,
            sequenceNumber=number,
            clientToken=token,
            operationConfig=operation,
        )
        return str(sent["operationId"])

    async def trained(self, operation_id: str) -> Any:
        """Return the result of a training operation."""
        return await self._result("get_training_operation_result", operation_id)

    async def sample(self, operation: Mapping[str, Any]) -> Any:
        """Return the result of a sampling operation."""
        sent = await self.call(
            "execute_sampling_operation", trainingSessionName=self.session, operationConfig=operation
        )
        return await self._result("get_sampling_operation_result", sent["operationId"])

    async def _result(self, verb: str, operation_id: str) -> Any:
        """Ask until the operation has ended. Raises: TrainingServiceError when it failed or was skipped."""
        delay_s = min(_FIRST_POLL_S, self._poll_s)
        while True:
            await asyncio.sleep(delay_s)
            found = await self.call(verb, trainingSessionName=self.session, operationId=operation_id)
            status = found["status"]
            if status == "Completed":
                return next(iter(found.get("operationResult", {}).values()), {})
            if status not in ("Pending", "InProgress"):
                why = found.get("errorDetails", "the service gives no reason")
                raise TrainingServiceError(f"operation {operation_id} ended as {status}: {why}", code=status)
            delay_s = min(self._poll_s, _GROWTH * delay_s)


def model_input(ids: Sequence[int]) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": list(ids)}]}


class SageMakerService:
    """A `SamplingService`. ``url`` ends in the session's name; ``text_of``: token ids to text, markers shown."""

    def __init__(self, url: str, text_of: Callable[[Sequence[int]], str]) -> None:
        endpoint, _, session = url.partition(SESSIONS)
        region = _REGION.search(endpoint)
        self._runtime = SessionRuntime(client_of(RUNTIME, region and region[1], endpoint), session)
        self._text_of = text_of

    async def open(self, path: str) -> SageMakerSampler:
        await self._runtime.sample({"loadWeightsForSampling": {"modelPackageArn": path}})
        return SageMakerSampler(self._runtime, path, self._text_of)

    def for_agent(self, error: Exception) -> RequestError:
        if isinstance(error, TrainingServiceError) and error.code in (INVALID, "Failed"):
            found = upstream_error(400, error.message.encode())
            if error.code == INVALID or found.kind == "context_overflow":
                return found
        if isinstance(error, TrainingServiceError) and error.code == "ThrottlingException":
            return RequestError("the engine has too many requests", kind="rate_limit")
        return RequestError("the engine did not answer", kind="upstream")

    async def close(self) -> None:
        self._runtime.close()


class SageMakerSampler:
    """A model package of a session. Each request names it, because the default weights are not documented.

    ``text_of`` makes texts of the model's stop tokens.
    """

    def __init__(self, runtime: SessionRuntime, path: str, text_of: Callable[[Sequence[int]], str] = str) -> None:
        self._runtime, self._path, self._text_of = runtime, path, text_of

    async def sample(self, asked: Asked) -> list[Piece]:
        params: dict[str, Any] = {
            "maxTokens": max(LEAST_TOKENS, asked.max_tokens),
            "temperature": asked.temperature,
            "topP": asked.top_p,
            # The service takes only texts, so the model's stop tokens are sent as texts.
            "stop": [self._text_of([token]) for token in asked.stop_token_ids] + asked.stop,
            "topK": asked.top_k,
            "seed": asked.seed,
        }
        operation = {
            "prompt": model_input(asked.prompt),
            "numSamples": asked.n,
            "samplingParams": {name: value for name, value in params.items() if value is not None},
            "modelPackageArn": self._path,
        }
        found = await self._runtime.sample({"sample": operation})
        return [
            Piece(choice=choice, ids=one["tokens"], logprobs=one.get("logprobs"), finish_reason=one["stopReason"])
            for choice, one in enumerate(found["sequences"])
        ]
