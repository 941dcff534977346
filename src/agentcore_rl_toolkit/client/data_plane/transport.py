"""Calls to the AgentCore data plane: the one module that knows boto3.

Each call is one HTTP request. botocore's own retries are off: they re-send an invoke whose answer was lost, and the
agent would run again. The kind of error raised here tells the engine whether it may send the request again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ..._servers import sigv4
from ..._servers.keys import credential_of_runtime
from ...contract import REFUSED
from ...errors import AgentCoreRLError, ConfigError
from ...store.remote import find_region, find_session

T = TypeVar("T")

DATA_PLANE = "bedrock-agentcore"
CONNECT_TIMEOUT_S = 10.0
ENDINGS_TIMEOUT_S = 5.0
LAST_LOOK_S = 0.5  # for what has come while this process stood still
AWS_DOMAINS = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")
USER_AGENT = "agentcore-rl-toolkit"
SERVER_ERRORS = ("InternalServerException", "ServiceUnavailableException", "ServiceException")
NO_CREDENTIALS = "NoCredentials"  # code of the failure when there are none, or none that are accepted
HOW_TO_HAVE_THEM = (
    "export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (`aws sso login` renews one); the key of a local runtime "
    "of yours is found by its address"
)
NO_ROLLOUT = "not as a rollout does: it needs a function with @app.rollout_entrypoint on an AgentCoreRLApp"
MAX_REPLY_BYTES = 2**20  # an answer has ids, a key and a status; whatever is longer is not one
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a local runtime is behind no proxy
STORE_REFUSED = "StoreRefused"  # code of the failure when the agent says that its record cannot be stored


class InvokeRefusedError(AgentCoreRLError):
    """The request was answered, or not sent: nothing runs because of it, so it may be sent again.

    ``kind``: "throttled" (429, 402), "busy" (409), "unreachable" (no connection).
    """

    kind = "throttled"


class InvokeUncertainError(AgentCoreRLError):
    """The request went out and no usable answer came back: the agent may run."""


class InvokeServerError(InvokeUncertainError):
    """The runtime answered that it failed itself (500, 503, ...): the agent may run."""


class InvokeFailedError(AgentCoreRLError):
    """The runtime refused for good, or the agent answered with an error. ``code`` is the service's error name."""

    code = ""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Why a session is over. ``gone``: its process is no more, so it will store nothing. ``log``: where its log is."""

    cause: str
    gone: bool
    log: str | None = None

    def __str__(self) -> str:
        return self.cause if self.log is None else f"{self.cause} (its log: {self.log})"


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run a blocking function on a daemon thread of its own and await its result. Cancelling the wait does not stop the function.

    `asyncio.to_thread` takes no more work once the process ends, which would lose the last stop requests.
    """
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()

    def work() -> None:
        try:
            value = function(*args)
        except BaseException as e:
            done.set_exception(e)
        else:
            done.set_result(value)

    try:
        threading.Thread(target=work, name="agentcore-rl-call", daemon=True).start()
    except RuntimeError:  # no new threads while the interpreter shuts down
        work()
    return await asyncio.wrap_future(done)


async def within(call: Awaitable[T], limit_s: float) -> T:
    """Wait for an answer. The call goes on where it comes too late. Raises: TimeoutError."""
    future = asyncio.ensure_future(call)
    future.add_done_callback(
        lambda late: late.cancelled() or late.exception()
    )  # or asyncio reports that nobody read it
    for patience_s in (limit_s, LAST_LOOK_S):
        await asyncio.wait([future], timeout=patience_s)
        if future.done():
            return future.result()
    raise TimeoutError


class Transport:
    """Invokes and stops over boto3's ``bedrock-agentcore`` client, made on first use.

    Args:
        read_timeout_s: how long one invoke may take before its fate counts as unknown. The default of boto3 (60 s) is
            shorter than a slow cold start.
    Raises: ConfigError when boto3 cannot make the client (no region, unknown service).
    """

    def __init__(
        self,
        agent_runtime_arn: str,
        *,
        region: str,
        endpoint_url: str | None,
        qualifier: str | None,
        pool_connections: int,
        read_timeout_s: float,
    ) -> None:
        self._arn = agent_runtime_arn
        self.region = region
        self._endpoint_url = endpoint_url
        self._qualifier = {"qualifier": qualifier} if qualifier else {}
        self._pool_connections = pool_connections
        self._read_timeout_s = read_timeout_s
        self._lock = threading.Lock()
        self._client: Any = None
        self._local_key: tuple[str, str] | None = None  # of a runtime of this user on this machine

    @property
    def client(self) -> Any:
        """The boto3 client."""
        if self._client is None:
            with self._lock:
                if self._client is None:
                    self._client = self._make(DATA_PLANE, self._endpoint_url, self.region)
        return self._client

    def make_s3_client(self) -> Any:
        """A boto3 S3 client for users' own code; the toolkit reads results through its store."""
        return self._make("s3", None, find_region(self.region))

    def _make(self, service: str, endpoint_url: str | None, region: str | None) -> Any:
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, PartialCredentialsError

        config = Config(
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=self._pool_connections,
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=self._read_timeout_s,
            tcp_keepalive=True,
            user_agent_extra=USER_AGENT,
            parameter_validation=False,  # ids are checked by us; this saves a fifth of the CPU of a call
        )
        try:
            made = {"region_name": region, "endpoint_url": endpoint_url, "config": config}
            client = self._session.client(service, **made)
            found = credential_of_runtime(client.meta.endpoint_url) if service == DATA_PLANE else None
            if found is None:
                return client
            client.close()
            self._local_key = key, secret = found
            return self._session.client(service, aws_access_key_id=key, aws_secret_access_key=secret, **made)
        except PartialCredentialsError as e:
            raise ConfigError(f"no credentials: {HOW_TO_HAVE_THEM} ({e})") from e
        except (BotoCoreError, ValueError) as e:
            raise ConfigError(f"boto3 could not make a {service} client: {e}") from e

    def invoke(self, session_id: str, payload: bytes) -> bytes:
        client = self.client
        try:
            response = client.invoke_agent_runtime(
                agentRuntimeArn=self._arn,
                runtimeSessionId=session_id,
                contentType="application/json",
                payload=payload,
                **self._qualifier,
            )
        except Exception as e:
            raise classify(e, session_id) from e
        try:
            body: bytes = response["response"].read(MAX_REPLY_BYTES + 1)
        except Exception as e:
            raise InvokeUncertainError(f"the answer to the invoke broke off: {e}", session_id=session_id) from e
        if len(body) > MAX_REPLY_BYTES:
            response["response"].close()  # of the rest nothing is read
            raise InvokeFailedError(
                f"the agent answered with more than {MAX_REPLY_BYTES} bytes; decorate it with @app.rollout_entrypoint, which "
                "answers with the key of its record",
                code="BadReply",
                session_id=session_id,
            )
        return body

    def stop(self, session_id: str) -> bool:
        client = self.client
        try:
            client.stop_runtime_session(agentRuntimeArn=self._arn, runtimeSessionId=session_id, **self._qualifier)
        except Exception as e:
            error = classify(e, session_id)
            if isinstance(error, InvokeFailedError) and error.code == "ResourceNotFoundException":
                return False
            raise error from e
        return True

    def endings(self, session_ids: Sequence[str]) -> Mapping[str, Ending] | None:
        """Which of these sessions are over, of a local runtime; None anywhere else, and at AWS without a request.

        Raises: InvokeUncertainError when it cannot be asked at the moment.
        """
        base = str(self.client.meta.endpoint_url)
        if is_aws(base):
            return None
        question = json.dumps({"agentRuntimeArn": self._arn, **self._qualifier, "sessions": list(session_ids)}).encode()
        url, headers = f"{base.rstrip('/')}/_local/endings", {"content-type": "application/json"}
        credential = self._local_key
        if credential is None and (found := self._session.get_credentials()) is not None:
            frozen = found.get_frozen_credentials()
            credential = frozen.access_key, frozen.secret_key
        if credential is not None:
            headers |= sigv4.sign(credential, method="POST", url=url, body=question, now=time.time())
        try:
            sent = urllib.request.Request(url, question, headers)
            with _DIRECTLY.open(sent, timeout=ENDINGS_TIMEOUT_S) as answer:
                return _read_endings(answer.read())
        except urllib.error.HTTPError as e:
            e.close()
            if e.code >= 500 or e.code == 429:
                raise InvokeUncertainError(f"the runtime answered with status {e.code}") from e
            return None
        except (OSError, http.client.HTTPException) as e:
            raise InvokeUncertainError(str(e)) from e

    @functools.cached_property
    def _session(self) -> Any:
        return find_session()

    def close(self) -> None:
        """Close pooled connections."""
        if self._client is not None:
            self._client.close()


def is_aws(url: str) -> bool:
    """Whether an address is AWS's own."""
    host = urlsplit(url).hostname or ""
    return host.endswith(AWS_DOMAINS)


def _read_endings(body: bytes) -> dict[str, Ending] | None:
    """A local runtime's answer; None when something else answered."""
    try:
        found = json.loads(body)["ended"]
        return {
            str(name): Ending(cause=str(entry["cause"]), gone=bool(entry["gone"]), log=entry.get("log"))
            for name, entry in found.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def classify(error: Exception, session_id: str) -> AgentCoreRLError:
    """The fate of an invoke by boto3's exception: by its status and error type, never by the words of its message.

    Source: error table of InvokeAgentRuntime (429, 402, 409, 424, 500), botocore.exceptions.
    """
    from botocore import exceptions as boto

    if isinstance(error, AgentCoreRLError):
        return error
    if isinstance(error, boto.ClientError):
        detail = error.response.get("Error", {})
        code = str(detail.get("Code", ""))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        text = f"{code or status}: {detail.get('Message', error)}"
        if status in (429, 402) or code in ("ThrottlingException", "ServiceQuotaExceededException", "TooManyRequests"):
            return InvokeRefusedError(text, kind="throttled", session_id=session_id)
        if status == 408:  # the request did not come whole in time: nothing was run
            return InvokeRefusedError(text, kind="unreachable", session_id=session_id)
        if status == 409 or code == "RetryableConflictException":
            return InvokeRefusedError(text, kind="busy", session_id=session_id)
        if (isinstance(status, int) and status >= 500) or code in SERVER_ERRORS:
            return InvokeServerError(text, session_id=session_id)
        return InvokeFailedError(text, code=code, session_id=session_id)
    unsent = (boto.ConnectTimeoutError, boto.EndpointConnectionError, boto.ProxyConnectionError, boto.SSLError)
    if isinstance(error, unsent):
        return InvokeRefusedError(str(error), kind="unreachable", session_id=session_id)
    if isinstance(error, (boto.HTTPClientError, ConnectionError, TimeoutError)):
        return InvokeUncertainError(str(error), session_id=session_id)
    if isinstance(error, boto.NoCredentialsError):
        return InvokeFailedError(f"no credentials: {HOW_TO_HAVE_THEM}", code=NO_CREDENTIALS, session_id=session_id)
    # Parameters, region: nothing was sent, and sending again would not help.
    return InvokeFailedError(f"{type(error).__name__}: {error}", code=type(error).__name__, session_id=session_id)


def parse_reply(body: bytes, session_id: str) -> dict[str, Any]:
    """Decode an agent's answer to an invoke. Raises: InvokeFailedError when it is not a JSON object or reports an error."""

    def refused(text: str, code: str = "BadReply") -> InvokeFailedError:
        return InvokeFailedError(text, code=code, session_id=session_id)

    try:
        reply = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise refused(f"the agent answered with something that is not JSON: {body[:200]!r}") from e
    if not isinstance(reply, dict):
        raise refused(f"the agent answered with {type(reply).__name__}, not an object, {NO_ROLLOUT}")
    if reply.get("status") == REFUSED:
        raise refused(str(reply.get("error")), STORE_REFUSED)
    if "result_key" in reply:
        return reply
    if reply.get("error"):
        raise refused(f"the agent refused: {reply['error']}", "AgentRefused")
    raise refused(f"the agent answered with its own {sorted(reply)[:8]}, {NO_ROLLOUT}")
