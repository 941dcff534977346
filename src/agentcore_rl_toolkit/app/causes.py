"""The cause of an agent's exception: the agent's code, the policy, or the infrastructure.

Exceptions of frameworks and clients are recognised by name, so none of them is imported. The whole chain counts (causes,
contexts, members of groups), because frameworks wrap the client's exception. In a chain, a failure of the
infrastructure outweighs one of the policy: a model call that never reached the model says nothing about the policy.

Sources: strands.types.exceptions, langgraph.errors, langchain_core.exceptions, agents.exceptions (OpenAI Agents SDK), the
exception modules of openai, anthropic, litellm, pydantic-ai, smolagents, dspy, instructor, google-adk, mini-swe-agent, httpx,
requests and aiohttp. `aws_errors` has those of botocore and urllib3.
"""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..aws_errors import Fate, look_up
from ..contract import TURNS_USED, Cause
from ..errors import OTHER_FAILURE, GatewayError, PolicyFailure, StoreError

_LONGEST_CHAIN = 100

# (top-level module, class) -> what the policy failed at; subclasses count
_POLICY = {
    ("strands", "MaxTokensReachedException"): "tokens",
    ("strands", "ContextWindowOverflowException"): "context",
    ("strands", "StructuredOutputException"): "calls",
    ("langgraph", "GraphRecursionError"): "turns",
    ("langchain", "ModelCallLimitExceededError"): "turns",
    ("langchain", "ToolCallLimitExceededError"): "turns",
    ("langchain", "StructuredOutputError"): "calls",
    ("langchain_core", "ContextOverflowError"): "context",
    ("langchain_core", "OutputParserException"): "calls",
    ("agents", "MaxTurnsExceeded"): "turns",
    ("agents", "ModelBehaviorError"): "calls",
    ("openai", "LengthFinishReasonError"): "tokens",
    ("pydantic_ai", "UsageLimitExceeded"): "turns",
    ("pydantic_ai", "IncompleteToolCall"): "tokens",
    ("pydantic_ai", "UnexpectedModelBehavior"): "calls",
    ("smolagents", "AgentMaxStepsError"): "turns",
    ("smolagents", "AgentParsingError"): "calls",
    ("dspy", "AdapterParseError"): "calls",
    ("instructor", "IncompleteOutputException"): "tokens",
    ("instructor", "InstructorRetryException"): "calls",
    ("google", "LlmCallsLimitExceededError"): "turns",  # google.adk
    ("minisweagent", "LimitsExceeded"): "turns",
    ("minisweagent", "FormatError"): "calls",
    ("litellm", "ContextWindowExceededError"): "context",
}

# Nothing came back from where the call went, or no answer of it.
_UNREACHED = frozenset(
    {
        ("openai", "APIConnectionError"),
        ("openai", "APIResponseValidationError"),
        ("anthropic", "APIConnectionError"),
        ("anthropic", "APIResponseValidationError"),
        ("httpx", "TransportError"),
        ("httpcore", "NetworkError"),
        ("httpcore", "TimeoutException"),
        ("httpcore", "ProtocolError"),
        ("requests", "ConnectionError"),
        ("requests", "Timeout"),
        ("aiohttp", "ClientConnectionError"),
        ("aiohttp", "ClientPayloadError"),
    }
)
# Told by a framework in place of what its client raised: says something only where nothing else in the chain does.
_THROTTLED = frozenset({("strands", "ModelThrottledException")})

# Clients of model servers: an answer of 401, 403 or 404 means that address, key or model are wrong, not the agent's code.
_MODEL_CLIENTS = frozenset({("openai", "APIError"), ("anthropic", "APIError")})
_REFUSED = frozenset({401, 403, 404, 409})
_TRY_LATER = frozenset({408, 425, 429})

# Exceptions of other clients that carry an HTTP answer.
_ANSWERS = frozenset(
    {
        ("httpx", "HTTPStatusError"),
        ("requests", "HTTPError"),
        ("aiohttp", "ClientResponseError"),
        ("botocore", "ClientError"),
        ("urllib", "HTTPError"),
    }
)

# What frameworks make of such failures, where their client's exception does not say more.
_GIVEN_UP = frozenset(
    {
        ("agents", "ModelTimeoutError"),
        ("langchain_core", "ModelAPIError"),
        ("langchain_core", "ModelAuthenticationError"),
        ("langchain_core", "ModelConnectionError"),
        ("langchain_core", "ModelNotFoundError"),
        ("langchain_core", "ModelPermissionDeniedError"),
        ("langchain_core", "ModelRateLimitError"),
        ("langchain_core", "ModelTimeoutError"),
    }
)

# How providers, engines and our gateway say that a conversation does not fit.
_OVERFLOW = (
    "context_length_exceeded",
    "maximum context length",
    "max_model_len",
    "longer than the maximum model length",
    "longer than the model's context length",
    "prompt is too long",
    "input is too long",
    "exceed your context limit",
    "exceed context limit",
)


@dataclass(frozen=True, kw_only=True)
class Blame:
    """The cause of an exception. ``failure``: if that is the policy, what it failed at."""

    cause: Cause
    failure: str | None = None


_AGENT, _INFRASTRUCTURE = Blame(cause=Cause.AGENT), Blame(cause=Cause.INFRASTRUCTURE)


def blame(error: BaseException, policy_failures: tuple[type[BaseException], ...] = ()) -> Blame:
    """Find the cause of this exception, with all exceptions chained to it. ``policy_failures``: the agent's own classes."""
    policy: Blame | None = None
    throttled = False
    for one in _chain(error):
        classes = [(cls.__module__.partition(".")[0], cls.__name__) for cls in type(one).__mro__]
        names = set(classes)
        own = isinstance(one, policy_failures)
        found = Blame(cause=Cause.POLICY, failure=OTHER_FAILURE) if own else _of_one(one, classes)
        if found is _INFRASTRUCTURE:
            return found
        policy = policy or found
        throttled = throttled or not names.isdisjoint(_THROTTLED)
    return policy or (_INFRASTRUCTURE if throttled else _AGENT)


def elsewhere(error: BaseException, base_url: str | None) -> str | None:
    """The address that a failed call went to, where it is not the model's gateway: that of a judge, for instance."""
    for one in _chain(error):
        try:
            url = urlsplit(str(one.request.url))  # type: ignore[attr-defined]  # httpx and what is built on it, requests
        except Exception:  # most have none; httpx raises where it was never set
            continue
        if url.hostname is None or (base_url is not None and url.netloc == urlsplit(base_url).netloc):
            return None
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
    return None


def _of_one(error: BaseException, classes: list[tuple[str, str]]) -> Blame | None:
    """The cause by this exception alone; None if it does not tell. ``classes``: its own class, then those it inherits from."""
    names = set(classes)
    if isinstance(error, PolicyFailure):
        return Blame(cause=Cause.POLICY, failure=error.reason)
    for name in classes:
        if name in _POLICY:
            return Blame(cause=Cause.POLICY, failure=_POLICY[name])
    if not names.isdisjoint(_UNREACHED):
        return _INFRASTRUCTURE
    fault = look_up(error)  # of a call to AWS
    if fault is not None and fault.fate is not Fate.FINAL:
        return _INFRASTRUCTURE
    model_client = not names.isdisjoint(_MODEL_CLIENTS)
    if model_client or not names.isdisjoint(_ANSWERS):
        return _of_answer(error, model_client)
    broken = isinstance(error, (ConnectionError, TimeoutError, urllib.error.URLError, GatewayError, StoreError))
    return _INFRASTRUCTURE if broken or not names.isdisjoint(_GIVEN_UP) else None


def _of_answer(error: BaseException, model_client: bool) -> Blame | None:
    """The cause by the HTTP answer that an exception carries."""
    status, words = _status(error), _words(error)
    if status is not None and (status >= 500 or status in _TRY_LATER):
        return _INFRASTRUCTURE  # whatever it says: an engine that fails over a long prompt has failed
    if TURNS_USED in words:
        return Blame(cause=Cause.POLICY, failure="turns")
    if any(overflow in words for overflow in _OVERFLOW):
        return Blame(cause=Cause.POLICY, failure="context")
    # Without a status it came in a stream, after one of 200: the server broke off.
    return _INFRASTRUCTURE if model_client and (status is None or status in _REFUSED) else None


def _status(error: BaseException) -> int | None:
    """The HTTP status of an answer, wherever this client keeps it."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        response = response.get("ResponseMetadata")
        found = response.get("HTTPStatusCode") if isinstance(response, Mapping) else None
    else:
        names = ("status_code", "status", "code")
        found = next((v for o in (error, response) for n in names if isinstance(v := getattr(o, n, None), int)), None)
    return found if isinstance(found, int) else None


def _words(error: BaseException) -> str:
    """The answer's words, in lower case: the exception's text, its code, and the body where it has been read."""
    found: list[object] = [getattr(error, "code", None), getattr(error, "body", None)]
    try:
        found.append(str(error))
        found.append(getattr(getattr(error, "response", None), "text", None))
    except Exception:  # a broken __str__, or a body that was never read: the rest has to do
        pass
    return " ".join(str(part) for part in found if part is not None).lower()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and everything chained to it, each once, nearest first."""
    seen: set[int] = set()
    waiting = [error]
    while waiting and len(seen) < _LONGEST_CHAIN:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        linked: list[Any] = [getattr(one, "original_exception", None), one.__cause__]  # the first is Strands'
        if not one.__suppress_context__:
            linked.append(one.__context__)
        if isinstance(one, BaseExceptionGroup):
            linked.extend(one.exceptions)
        waiting.extend(found for found in linked if isinstance(found, BaseException))
