"""The cause of an agent's exception: the agent's code, the policy, or the infrastructure.

Exceptions of frameworks and clients are recognized by name, so none of them is imported. The whole chain counts (causes,
contexts, members of groups), because frameworks wrap the client's exception. In a chain, a failure of the infrastructure
outweighs one of the policy: a model call that never reached the model shows nothing about the policy.

Sources: strands.types.exceptions, langgraph.errors, langchain_core.exceptions, agents.exceptions (OpenAI Agents SDK), the
exception modules of openai, anthropic, litellm, pydantic-ai, smolagents, dspy, instructor, google-genai, google-adk,
mini-swe-agent, httpx, requests and aiohttp. `aws_errors` has those of botocore and urllib3.
"""

from __future__ import annotations

import errno
import urllib.error
from dataclasses import dataclass
from urllib.parse import urlsplit

from ..aws_errors import Fate, chained, look_up
from ..contract import TURNS_USED, Cause
from ..errors import OTHER_FAILURE, GatewayError, PolicyFailure, StoreError

# Classes, each after its top-level module. The nearest class of an exception that is in the table decides.
_KINDS = {
    # what the policy failed at
    "tokens": """strands.MaxTokensReachedException openai.LengthFinishReasonError pydantic_ai.IncompleteToolCall
        instructor.IncompleteOutputException""",
    "context": """strands.ContextWindowOverflowException langchain_core.ContextOverflowError
        litellm.ContextWindowExceededError""",
    "turns": """langgraph.GraphRecursionError langchain.ModelCallLimitExceededError langchain.ToolCallLimitExceededError
        agents.MaxTurnsExceeded pydantic_ai.UsageLimitExceeded smolagents.AgentMaxStepsError google.LlmCallsLimitExceededError
        minisweagent.LimitsExceeded""",
    "calls": """strands.StructuredOutputException langchain.StructuredOutputError langchain_core.OutputParserException
        agents.ModelBehaviorError pydantic_ai.UnexpectedModelBehavior smolagents.AgentParsingError dspy.AdapterParseError
        instructor.InstructorRetryException minisweagent.FormatError""",
    # no usable reply of a client, and what frameworks raise instead of the client's exception
    "infrastructure": """openai.APIConnectionError openai.APIResponseValidationError anthropic.APIConnectionError
        anthropic.APIResponseValidationError httpx.TransportError httpcore.NetworkError httpcore.TimeoutException
        httpcore.ProtocolError http.BadStatusLine http.IncompleteRead requests.ConnectionError requests.Timeout
        aiohttp.ClientConnectionError aiohttp.ClientPayloadError agents.ModelTimeoutError langchain_core.ModelAPIError
        langchain_core.ModelAuthenticationError langchain_core.ModelConnectionError langchain_core.ModelNotFoundError
        langchain_core.ModelPermissionDeniedError langchain_core.ModelRateLimitError langchain_core.ModelTimeoutError""",
    "throttled": "strands.ModelThrottledException",  # decides only if nothing else in the chain does
    "model_answer": "openai.APIError anthropic.APIError google.APIError",
    "answer": """httpx.HTTPStatusError requests.HTTPError aiohttp.ClientResponseError botocore.ClientError
        urllib.HTTPError""",
}
_TABLE = {name: kind for kind, names in _KINDS.items() for name in names.split()}

# These replies of an engine show that its address, key or model is wrong, and not the agent's code.
_REFUSED = frozenset({401, 403, 404, 409})
# A full or failing disk, the machine's table of files, and its network.
_MACHINE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENFILE})
_MACHINE |= {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH}
_TRY_LATER = frozenset({408, 425, 429})
# The words of providers, engines and our gateway for a conversation that does not fit.
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
    """The cause of an exception. ``failure`` is the policy's failure, if the policy is the cause."""

    cause: Cause
    failure: str | None = None


_AGENT, _INFRASTRUCTURE = Blame(cause=Cause.AGENT), Blame(cause=Cause.INFRASTRUCTURE)


def _policy(failure: str) -> Blame:
    return Blame(cause=Cause.POLICY, failure=failure)


def blame(error: BaseException, policy_failures: tuple[type[BaseException], ...] = ()) -> Blame:
    """Find the cause of this exception, with all exceptions chained to it. ``policy_failures``: the agent's own classes."""
    policy: Blame | None = None
    throttled = False
    for one in chained(error):
        kind = _kind(one)
        found = _policy(OTHER_FAILURE) if isinstance(one, policy_failures) else _of_one(one, kind)
        if found is _INFRASTRUCTURE:
            return found
        policy = policy or found
        throttled = throttled or kind == "throttled"
    return policy or (_INFRASTRUCTURE if throttled else _AGENT)


def elsewhere(error: BaseException, base_url: str | None) -> str | None:
    """Find the address of a failed call that did not go to the model's gateway, such as one to a judge, or None otherwise."""
    for one in chained(error):
        for place in ("request", "request_info", "response"):  # httpx and requests; aiohttp; google-genai
            try:
                url = urlsplit(str(getattr(one, place).url))
            except Exception:  # most exceptions have none, and httpx raises if it was never set
                continue
            if url.hostname is None or (base_url is not None and url.netloc == urlsplit(base_url).netloc):
                return None
            return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
    return None


def _kind(error: BaseException) -> str | None:
    # httpx2 and httpcore2 have the classes of httpx and httpcore.
    names = (f"{cls.__module__.partition('.')[0].removesuffix('2')}.{cls.__name__}" for cls in type(error).__mro__)
    return next((_TABLE[name] for name in names if name in _TABLE), None)


def _of_one(error: BaseException, kind: str | None) -> Blame | None:
    if isinstance(error, PolicyFailure):
        return _policy(error.reason)
    if kind in ("tokens", "context", "turns", "calls"):
        return _policy(kind)
    fault = look_up(error)  # an error of a call to AWS
    if kind == "infrastructure" or (fault is not None and fault.fate is not Fate.FINAL):
        return _INFRASTRUCTURE
    if kind in ("answer", "model_answer"):
        return _of_answer(error, kind == "model_answer")
    broken = isinstance(error, (ConnectionError, TimeoutError, urllib.error.URLError, GatewayError, StoreError))
    return _INFRASTRUCTURE if broken or (isinstance(error, OSError) and error.errno in _MACHINE) else None


def _of_answer(error: BaseException, model_client: bool) -> Blame | None:
    status, text = _status(error), _text(error)
    if status is not None and (status >= 500 or status in _TRY_LATER):
        return _INFRASTRUCTURE  # an engine that fails over a long prompt has failed
    if TURNS_USED in text:
        return _policy("turns")
    if any(overflow in text for overflow in _OVERFLOW):
        return _policy("context")
    # An error without a status came in a stream after a 200: the server broke off.
    return _INFRASTRUCTURE if model_client and (status is None or status in _REFUSED) else None


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    values = (getattr(of, name, None) for of in (error, response) for name in ("status_code", "status", "code"))
    return next((value for value in values if isinstance(value, int)), None)


def _text(error: BaseException) -> str:
    """Return the reply's text in lower case: the exception's text, its code, and the body if it has been read."""
    found: list[object] = [getattr(error, "code", None), getattr(error, "body", None)]
    try:
        found.append(str(error))
        found.append(getattr(getattr(error, "response", None), "text", None))
    except Exception:  # a broken __str__, or a body that was never read
        pass
    return " ".join(str(part) for part in found if part is not None).lower()
