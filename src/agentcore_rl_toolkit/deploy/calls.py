"""Calls to AWS, each checked by botocore's own model of the service; a rehearsal sends only harmless ones."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ConfigError
from ..store.remote import find_region, find_session

T = TypeVar("T")
Find = Callable[[], Mapping[str, Any] | None]
DEADLINE_S = 60.0
AGENT_S = 900.0  # AgentCore ends a request without streaming then
# Calls that change nothing: a rehearsal sends them, so that it shows what would happen to what is there.
HARMLESS = ("Get", "List", "Describe", "Head")
# A rehearsal without credentials shows what would happen in an account that has nothing yet.
SOME_ACCOUNT, SOME_REGION = "123456789012", "us-west-2"
_NOTHING_THERE: dict[str, Any] = {
    "GetCallerIdentity": {"Account": SOME_ACCOUNT, "Arn": f"arn:aws:iam::{SOME_ACCOUNT}:user/rehearsal"},
    "ListAgentRuntimes": {"agentRuntimes": []},
    "GetAgentRuntime": {
        "status": "READY",
        "roleArn": f"arn:aws:iam::{SOME_ACCOUNT}:role/agent",
        "agentRuntimeVersion": "1",
        "agentRuntimeArtifact": {"containerConfiguration": {"containerUri": "the-image"}},
        "networkConfiguration": {"networkMode": "PUBLIC"},
    },
    "GetAgentRuntimeEndpoint": {"status": "READY", "liveVersion": "1"},
}


def wait_for(look: Callable[[], T | None], within_s: float, pause_s: float, late: str) -> T:
    """Return what ``look`` finds, at the latest after this time. Raises: ConfigError with the text ``late``."""
    deadline = time.monotonic() + within_s
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise ConfigError(f"{late} after {within_s:.0f} s")
        time.sleep(pause_s)
    return found


class RefusedError(ConfigError):
    """AWS refused a call. ``code`` is its error code, such as `AccessDeniedException`."""


class Calls:
    """The AWS calls of one deployment.

    Args:
        region: of all services; None: the session's own.
        rehearse: print what would be sent instead of sending it. Then credentials may be absent: nothing at all is sent.
        say: takes one line for the user.
    """

    def __init__(self, *, region: str | None, rehearse: bool, say: Callable[[str], None]) -> None:
        self._session = find_session()
        self.region: str | None = region or find_region()
        self.rehearse = rehearse
        self.say = say
        self._clients: dict[str, Any] = {}
        self._offline = rehearse and self._session.get_credentials() is None
        if self._offline:
            region = "" if self.region else f", {SOME_REGION} for your region"
            say(f"no credentials, so AWS is not called: {SOME_ACCOUNT} stands for your account{region}")
            self.region = self.region or SOME_REGION
        if self.region is None:
            raise ConfigError("there is no AWS region: give --region REGION, or export AWS_REGION")
        if not self._offline and self._session.get_credentials() is None:
            raise ConfigError(
                "no credentials: export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the machine a role"
            )

    def step(self, what: str, done: str) -> None:
        """Print that ``what`` is ``done``, such as `created`, or in a rehearsal that it would be."""
        self.say(f"{what}: {'would be' if self.rehearse else 'is'} {done}")

    def settled(
        self, find: Find, what: str, changing: Collection[str], times_s: tuple[float, float], status: str = "status"
    ) -> Mapping[str, Any] | None:
        """Describe something until its status is none of ``changing``, and print each one. In a rehearsal, once.

        ``times_s`` are the limit and the pause. Returns the description, None if it does not exist. Raises: ConfigError.
        """
        said: set[str] = set()

        def look() -> tuple[Mapping[str, Any] | None] | None:
            now = find()
            if now is None or now[status] not in changing or self.rehearse:
                return (now,)
            if now[status] not in said:
                said.add(now[status])
                self.say(f"{what}: {now[status]}")
            return None

        return wait_for(look, *times_s, f"{what} still changes")[0]

    @cached_property
    def _identity(self) -> Mapping[str, Any]:
        return dict(self("sts", "GetCallerIdentity"))

    @property
    def account(self) -> str:
        return str(self._identity["Account"])

    @property
    def caller(self) -> str:
        """The ARN of the user, or of the session of a role."""
        return str(self._identity["Arn"])

    @property
    def partition(self) -> str:
        return self.caller.split(":")[1]

    def __call__(self, service: str, operation: str, *, absent: tuple[str, ...] = (), **parameters: Any) -> Any:
        """Call ``operation`` (`CreateRole`) of ``service`` (`iam`). Gives the reply.

        With ``absent``, error codes that mean "there is none": None in their place. In a rehearsal a call that would change
        something is printed, and gives None.

        Raises: RefusedError, with AWS's code and message; ConfigError for parameters that the service's model does not allow.
        """
        from botocore import xform_name
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.validate import ParamValidator

        client, parameters = self._client(service), {k: v for k, v in parameters.items() if v is not None}
        shape = client.meta.service_model.operation_model(operation).input_shape
        wrong = ParamValidator().validate(parameters, shape) if shape else None
        if wrong is not None and wrong.has_errors():
            raise ConfigError(f"{service}:{operation}: {wrong.generate_report()}")
        if self.rehearse and not operation.startswith(HARMLESS):
            self.say(f"would call {service}:{operation}\n{_shown(parameters)}")
            return None
        if self._offline:
            return _NOTHING_THERE.get(operation)
        try:
            return getattr(client, xform_name(operation))(**parameters)
        except ClientError as e:
            error = e.response.get("Error", {})
            code = str(error.get("Code", ""))
            if code in absent:
                return None
            raise RefusedError(f"{service}:{operation}: {code}: {error.get('Message', '')}", code=code) from e
        except BotoCoreError as e:
            raise RefusedError(f"{service}:{operation}: {e}") from e

    def every(self, service: str, operation: str, entries: str, **parameters: Any) -> Iterator[Any]:
        """Yield the entries of all pages of a list."""
        names = {"s3": ("ContinuationToken", "NextContinuationToken"), "sagemaker": ("NextToken", "NextToken")}
        given, returned = names.get(service, ("nextToken", "nextToken"))
        page: Any = {returned: None}
        while returned in page:
            page = self(service, operation, **{given: page[returned]}, **parameters) or {}
            yield from page.get(entries, [])

    def price_list(self) -> Callable[..., Any]:
        """Return calls of AWS's price list, which one region has for all."""
        return partial(Calls(region="us-east-1", rehearse=self.rehearse, say=lambda line: None), "pricing")

    def upload(self, file: Path, bucket: str, key: str) -> None:
        """Upload a file of any size to S3. Raises: RefusedError."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        if self.rehearse:
            self.say(f"would upload {file} to s3://{bucket}/{key}")
            return
        try:
            self._client("s3").upload_file(str(file), bucket, key)
        except (Boto3Error, BotoCoreError, ClientError) as e:
            raise RefusedError(f"s3: {file.name} was not uploaded to s3://{bucket}/{key}: {e}") from e

    def parameters_of(self, service: str, operation: str) -> frozenset[str]:
        """Return the names of an operation's parameters that this boto3 knows."""
        shape = self._client(service).meta.service_model.operation_model(operation).input_shape
        return frozenset(shape.members if shape else ())

    def _client(self, service: str) -> Any:
        from botocore.config import Config

        if service not in self._clients:
            once = service == "bedrock-agentcore"  # a slow agent would run again
            retries: Any = {"total_max_attempts": 1 if once else 5, "mode": "standard"}
            config = Config(connect_timeout=10, read_timeout=AGENT_S if once else DEADLINE_S, retries=retries)
            self._clients[service] = self._session.client(service, region_name=self.region, config=config)
        return self._clients[service]


def _shown(parameters: Mapping[str, Any]) -> str:
    """Return parameters to show: policies as documents, archives by their size, variables by their names."""

    def readable(value: Any) -> Any:
        if isinstance(value, bytes):
            return f"<{len(value)} bytes>"
        if isinstance(value, str) and value.startswith("{") and '"Version"' in value:
            return json.loads(value)
        if isinstance(value, Mapping):
            return {
                k: dict.fromkeys(v, "(set)") if k == "environmentVariables" else readable(v) for k, v in value.items()
            }
        return value

    lines = json.dumps(readable(parameters), indent=2, default=str)
    return "\n".join(f"    {line}" for line in lines.splitlines())
