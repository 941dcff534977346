"""Requests to AgentCore's data plane over boto3. Each call is one HTTP request.

botocore's own retries are off. They would send an invoke again whose reply was lost, and the agent would run twice.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import threading
import urllib.error
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from .._servers import sigv4
from .._servers.keys import credential_of_runtime, is_here
from ..aws_errors import Fate, Fault, look_up
from ..contract import REFUSED, ROLLOUTS_OFF
from ..errors import AgentCoreRLError, AgentError, ConfigError, InvalidResultError, RolloutLostError
from ..store.remote import find_session, renewed_session

T = TypeVar("T")

DATA_PLANE = "bedrock-agentcore"
CONNECT_TIMEOUT_S = 10.0
ENDINGS_TIMEOUT_S = 5.0
LAST_LOOK_S = 0.5  # a reply that came while this process was stopped is still read
REFUSED_KEY = (401, 403)  # statuses
AWS_DOMAINS = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")
HOW_TO_HAVE_THEM = (
    "export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (`aws sso login` renews one); the key of a local runtime "
    "of yours is found by its address"
)
NO_ROLLOUT = (
    "which is not the reply of a rollout: the agent needs a function with @app.rollout_entrypoint on an AgentCoreRLApp"
)
MAX_REPLY_BYTES = 2**20  # a reply has ids, a key and a status. The rest of a longer one is not read
STORE_REFUSED = "StoreRefused"  # code of the error when the agent cannot store its record


class CallError(AgentCoreRLError):
    """A request failed, and another one may succeed. ``fate`` is never `final`.

    Attributes:
        status: the HTTP status of the reply, if one came.
        credentials: fresh credentials may help. The next call uses them.
    """

    fate = Fate.UNCERTAIN
    status: int | None = None
    credentials = False

    @property
    def throttled(self) -> bool:
        """The service takes no more sessions or requests at present."""
        return self.fate is Fate.REFUSED and self.status != 409

    @property
    def server_error(self) -> bool:
        """The service itself failed (500, 503), and the agent may run."""
        return self.fate is Fate.UNCERTAIN and (self.status or 0) >= 500


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run a blocking function on a daemon thread and await its result. Cancelling the wait does not stop the function.

    `asyncio.to_thread` accepts no work once the process ends, which would lose the last stop requests. An asyncio future cannot
    hold every exception, so errors come as values.
    """
    done: concurrent.futures.Future[tuple[Any, BaseException | None]] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()

    def work() -> None:
        try:
            done.set_result((function(*args), None))
        except BaseException as e:
            done.set_result((None, e))

    try:
        threading.Thread(target=work, name="agentcore-rl-call", daemon=True).start()
    except RuntimeError:
        work()  # no new threads while the interpreter shuts down
    result, error = await asyncio.wrap_future(done)
    if error is not None:
        raise error
    return result


async def within(call: Awaitable[T], limit_s: float) -> T:
    """Wait for a reply. The call continues if it takes longer. Raises: TimeoutError."""
    future = asyncio.ensure_future(call)
    future.add_done_callback(lambda late: late.cancelled() or late.exception())  # marks a late error as seen
    for patience_s in (limit_s, LAST_LOOK_S):
        await asyncio.wait([future], timeout=patience_s)
        if future.done():
            return future.result()
    raise TimeoutError


@dataclass(eq=False)
class Transport:
    """Invokes and stops over boto3's ``bedrock-agentcore`` client, which the first call makes. Its methods block.

    Args:
        read_timeout_s: how long one invoke may take. boto3's default of 60 s is shorter than a slow cold start.
    """

    agent_runtime_arn: str
    _: KW_ONLY
    region: str
    endpoint_url: str | None
    qualifier: str | None
    pool_connections: int
    read_timeout_s: float

    def __post_init__(self) -> None:
        self._address = {"agentRuntimeArn": self.agent_runtime_arn}
        self._address |= {"qualifier": self.qualifier} if self.qualifier else {}
        self._lock = threading.Lock()
        self._client: Any = None
        self._session: Any = None
        self._local_key: tuple[str, str] | None = None  # opens a runtime of this user on this machine

    # ---- the boto3 clients

    @property
    def client(self) -> Any:
        """The boto3 client.

        Raises: ConfigError when boto3 cannot make it (no region, half of a key); CallError when there are no credentials now.
        """
        with self._lock:
            self._client = self._client or self._make()
            return self._client

    def _make(self) -> Any:
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, PartialCredentialsError

        here = is_here(urlsplit(self.endpoint_url or "").hostname or "")
        config = Config(
            proxies={} if here else None,  # the environment's are not for servers of this machine
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=self.pool_connections,
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=self.read_timeout_s,
            tcp_keepalive=True,
            user_agent_extra="agentcore-rl-toolkit",
            parameter_validation=False,  # ids are checked by us. This saves a fifth of the CPU of a call
        )
        self._session = self._session or find_session()
        made = {"region_name": self.region, "endpoint_url": self.endpoint_url, "config": config}
        try:
            client = self._session.client(DATA_PLANE, **made)
            found = self._local_key = credential_of_runtime(client.meta.endpoint_url)
            if found is None:
                return client
            client.close()
            key, secret = found
            return self._session.client(DATA_PLANE, aws_access_key_id=key, aws_secret_access_key=secret, **made)
        except PartialCredentialsError as e:
            raise ConfigError(f"no credentials: {HOW_TO_HAVE_THEM} ({e})", code=type(e).__name__) from e
        except (BotoCoreError, ValueError) as e:
            fault = look_up(e)
            if fault is not None and fault.credentials:  # the source of credentials did not answer
                raise CallError(str(e), fate=fault.fate, credentials=True, code=fault.code) from e
            raise ConfigError(f"boto3 could not make a {DATA_PLANE} client: {e}", code=type(e).__name__) from e

    def _renew(self, client: Any) -> None:
        """Use fresh credentials from the next call on."""
        with self._lock:
            if self._client is client:  # otherwise, another call did it
                self._client, self._session = None, renewed_session()

    def close(self) -> None:
        """Close pooled connections."""
        if self._client is not None:
            self._client.close()

    # ---- calls

    def invoke(self, session_id: str, payload: bytes) -> bytes:
        """Send one invoke and return the agent's reply.

        Raises: CallError when another one may succeed; ConfigError, RolloutLostError or InvalidResultError when not.
        """
        client = self.client
        about = {"runtimeSessionId": session_id, "contentType": "application/json", **self._address}
        try:
            response = client.invoke_agent_runtime(payload=payload, **about)
        except Exception as e:
            raise self._error(e, client, session_id) from e
        with contextlib.closing(response["response"]) as reply:
            try:
                return bytes(reply.read(MAX_REPLY_BYTES))
            except Exception as e:
                text = f"the reply to the invoke broke off: {e}"
                raise CallError(text, code=type(e).__name__, session_id=session_id) from e

    def stop(self, session_id: str) -> None:
        """Stop a session, unless the runtime has no such session. Raises as `invoke`."""
        client = self.client
        try:
            client.stop_runtime_session(runtimeSessionId=session_id, **self._address)
        except Exception as e:
            error = self._error(e, client, session_id)
            if error.code != "ResourceNotFoundException":
                raise error from e

    def endings(self, session_ids: Sequence[str]) -> Mapping[str, str] | None:
        """Ask a local runtime which of these sessions have ended, and why. Returns None for any other. AWS gets no request.

        Raises: CallError when it cannot be asked at present. After a refusal, the next question has the runtime's present key.
        """
        client = self.client
        base = str(client.meta.endpoint_url)
        if is_aws(base):
            return None
        question = json.dumps({**self._address, "sessions": list(session_ids)}).encode()
        url, credential = f"{base.rstrip('/')}/_local/endings", self._local_key
        if credential is None and (found := self._session.get_credentials()) is not None:
            credential = found.get_frozen_credentials()[:2]
        try:
            sent = sigv4.send(credential, method="POST", url=url, body=question, timeout_s=ENDINGS_TIMEOUT_S)
            with sent as answer:
                ended = json.load(answer)["ended"]
            # A session without a process stores nothing more.
            gone = {name: entry for name, entry in ended.items() if entry["gone"]}
            logs = {name: f" (its log: {entry['log']})" for name, entry in gone.items() if entry.get("log") is not None}
            return {name: f"{entry['cause']}{logs.get(name, '')}" for name, entry in gone.items()}
        except urllib.error.HTTPError as e:
            e.close()
            if e.code in REFUSED_KEY and self._has_new_key(client):
                self._renew(client)
            if e.code >= 500 or e.code == 429 or e.code in REFUSED_KEY:
                raise CallError(f"the runtime answered with status {e.code}", status=e.code) from e
            return None
        except (OSError, http.client.HTTPException) as e:
            raise CallError(str(e)) from e
        except (ValueError, KeyError):
            return None  # another server's reply

    def _has_new_key(self, client: Any) -> bool:
        """Return True if a local runtime was started at this address since, and has another key than this client."""
        if self._client is not client:  # another call has noticed it
            return True
        return credential_of_runtime(client.meta.endpoint_url) not in (None, self._local_key)

    def _error(self, error: Exception, client: Any, session_id: str) -> AgentCoreRLError:
        """Return the error to raise for an exception of this boto3 client."""
        fault = look_up(error) or Fault(fate=Fate.FINAL, code=type(error).__name__)
        fate, code, renew = fault.fate, fault.code, fault.credentials
        if fault.status in REFUSED_KEY or code == "NoCredentialsError":  # another error may mean that the agent ran
            renew = renew or self._has_new_key(client)
            fate = Fate.TRANSIENT if renew else fate
        if renew:
            self._renew(client)
        response = getattr(error, "response", None)
        message = response.get("Error", {}).get("Message", error) if isinstance(response, Mapping) else error
        text = f"{code}: {message}"
        about = {"code": code, "session_id": session_id}
        if fate is not Fate.FINAL:
            return CallError(text, fate=fate, status=fault.status, credentials=renew, **about)
        if code == "RuntimeClientError" and "(403)" in text:
            return ConfigError(f"the agent refused the rollout: {ROLLOUTS_OFF} ({text})", **about)
        if code == "RuntimeClientError":  # AWS does not say more: it did not start, died, or answered 4xx or 5xx
            what = "the session ended, or its agent failed, before it accepted the request"
            return RolloutLostError(f"{what}: {text}", **about)
        if code == "NoCredentialsError":
            return ConfigError(f"no credentials: {HOW_TO_HAVE_THEM}", **about)
        return ConfigError(f"the runtime does not accept this request: {text}", **about)


def is_aws(url: str) -> bool:
    """Return True for an address of AWS."""
    return (urlsplit(url).hostname or "").endswith(AWS_DOMAINS)


def parse_reply(body: bytes, session_id: str) -> dict[str, Any]:
    """Decode an agent's reply to an invoke.

    Raises: InvalidResultError when it is not that of a rollout; AgentError or RolloutLostError when it reports an error.
    """
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError) as e:
        text = f"the agent answered with something that is not JSON, {NO_ROLLOUT}: {body[:200]!r}"
        raise InvalidResultError(text, session_id=session_id) from e
    fields = reply if isinstance(reply, dict) else {}
    if fields.get("status") == REFUSED:
        raise RolloutLostError(str(fields.get("error")), code=STORE_REFUSED, session_id=session_id)
    if "result_key" in fields:
        return fields
    if fields.get("error"):
        raise AgentError(f"the agent refused: {fields['error']}", error_type="AgentRefused", session_id=session_id)
    what = f"the fields {sorted(fields)[:8]}" if isinstance(reply, dict) else f"{type(reply).__name__}, not an object"
    raise InvalidResultError(f"the agent answered with {what}, {NO_ROLLOUT}", session_id=session_id)
