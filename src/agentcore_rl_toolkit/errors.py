"""Every error the toolkit raises, in one tree.

::

    AgentCoreRLError
    ├── ConfigError (ValueError)            the caller's argument or file is wrong
    ├── MissingExtraError (ImportError)     an optional part is not installed
    ├── ContractError (ValueError)          agent and client disagree: bad id, bad record, bad `_rollout`
    ├── StoreError                          the object store refused or failed
    │   ├── ObjectNotFoundError (KeyError)
    │   ├── ObjectExistsError (FileExistsError)
    │   ├── ObjectTooLargeError             an object is larger than its reader takes
    │   └── StorePermissionError (PermissionError)
    ├── PolicyFailure                       raised by agents: the policy failed, not their code
    ├── RolloutError                        one rollout did not end in `ok` (`cause` says whose failure it is)
    │   ├── AgentError                      the agent raised: its own code, or what the policy did to it
    │   ├── RolloutLostError                the session died without a record, or the infrastructure made its agent raise
    │   ├── RolloutTimeoutError (TimeoutError)   a stage passed its deadline (`stage` is its name)
    │   ├── RolloutThrottledError           the runtime refused for longer than we may wait
    │   ├── RolloutCancelledError (concurrent.futures.CancelledError)
    │   └── InvalidResultError (ValueError) a record that cannot be used: broken, or without a reward
    ├── GatewayError                        the model gateway refused or failed
    │   ├── GatewayLostError                one of several gateways does not answer (`found` is what the others gave)
    │   ├── CaptureError                    tokens of a turn are missing or inconsistent
    │   └── UpstreamError                   the engine behind the gateway failed
    ├── LocalRuntimeError                   the local AgentCore Runtime failed
    │   └── AgentLoadError                  an agent file did not import (the message carries its traceback)
    ├── PolicyError                         the built-in policy or its server failed
    ├── TrainingServiceError                a training service, or a reflection model, refused or failed
    ├── JudgeError                          a judge gave no usable scores
    ├── ScorerError                         the user's function that scores rollouts failed
    └── WeightsError                        new weights did not arrive at an engine

The class shows which boundary was crossed. The message states what to do next. The ids are attributes. All errors can be
pickled: the message is positional, everything else keyword-only with a default.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

# The policy's failures: the words in records and counts, and the meaning of each.
POLICY_FAILURES = {
    "tokens": "the policy ran out of tokens: its answer was cut at the length limit",
    "turns": "the policy ran out of turns",
    "context": "the policy ran out of context: its conversation is longer than the model's window",
    "calls": "the policy made a call, or gave an answer, that does not parse",
    "answer": "the policy never began its answer: it ended inside its reasoning",
    "other": "the policy failed",
}
OTHER_FAILURE = "other"

# The stop reasons of frameworks and providers for an end of generation before the end of the work.
_STOP_REASONS: Mapping[str | None, str] = {
    "length": "tokens",  # OpenAI, vLLM, SGLang
    "max_tokens": "tokens",  # Anthropic, Bedrock, Strands
    "max_output_tokens": "tokens",  # OpenAI Responses
    "limit_output_tokens": "tokens",  # these three: Strands' `limits`
    "limit_total_tokens": "tokens",
    "limit_turns": "turns",
    "model_context_window_exceeded": "context",  # Anthropic
}


def text_of(error: BaseException) -> str:
    """Return `str(error)`, or an empty text if that raises."""
    try:
        return str(error)
    except BaseException:  # user code may raise anything
        return ""


class AgentCoreRLError(Exception):
    """Base of every error raised by this package.

    Attributes:
        session_id, input_id, key: of the rollout and its object in the store, if they are known.
        code: a service's name of the error (``AccessDeniedException``). The client library's exception is the ``__cause__``.
    """

    session_id: str | None = None
    input_id: str | int | float | None = None
    key: str | None = None
    code: str | None = None

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        for name, value in fields.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no attribute {name!r}")
            setattr(self, name, value)

    def __str__(self) -> str:
        return self.message


class ConfigError(AgentCoreRLError, ValueError):
    """An argument, option or configuration file is wrong."""


class MissingExtraError(AgentCoreRLError, ImportError):
    """An optional part of the toolkit is not installed. The message holds the exact install command."""


class ContractError(AgentCoreRLError, ValueError):
    """An id, a record or a `_rollout` block breaks the contract between agent and client."""


class StoreError(AgentCoreRLError):
    """The object store failed. ``permanent``: a retry would fail in the same way."""

    permanent = False


class ObjectNotFoundError(StoreError, KeyError):
    """There is no object under this key."""


class ObjectExistsError(StoreError, FileExistsError):
    """A create-only put found an object under this key."""


class ObjectTooLargeError(StoreError):
    """The object is larger than its reader takes. Nothing of it was kept."""


class StorePermissionError(StoreError, PermissionError):
    """The store refused access."""

    permanent = True


class PolicyFailure(AgentCoreRLError):  # noqa: N818  (the policy's failure is a result of the rollout, not an error of a program)
    """Raised by an agent when the policy failed, not its code. The rollout gets the reward that the agent declares for that.

    ``reason`` is a key of `POLICY_FAILURES` (tokens, turns, context, calls, answer), or any text, which counts as "other".

    Example: ``raise PolicyFailure("turns")``
    """

    def __init__(self, reason: str = OTHER_FAILURE, message: str = "", **ids: Any) -> None:
        super().__init__(message or POLICY_FAILURES.get(reason, str(reason)), **ids)
        self.reason = reason if reason in POLICY_FAILURES else OTHER_FAILURE

    @staticmethod
    def check_stop(stop_reason: str | None) -> None:
        """Raise PolicyFailure if this stop reason of a model or framework means that the policy was cut short."""
        failure = _STOP_REASONS.get(stop_reason)
        if failure is not None:
            raise PolicyFailure(failure, f"{POLICY_FAILURES[failure]} (stop reason {stop_reason!r})")


class RolloutError(AgentCoreRLError):
    """A rollout ended in something other than `ok`.

    Attributes:
        outcome: the value of `contract.Outcome`.
        cause: that of `contract.Cause`, or None if it did not fail.
        error_type, agent_traceback: from the agent's record, if it left one.
    """

    outcome = "lost"
    cause: str | None = "infrastructure"
    error_type: str | None = None
    agent_traceback: str | None = None


class AgentError(RolloutError):
    """The agent raised. ``failure`` is a key of `POLICY_FAILURES` if the policy is the cause."""

    outcome = "agent_error"
    cause: str | None = "agent"
    failure: str | None = None


class RolloutLostError(RolloutError):
    """The session ended, or stopped giving signs of life, without a record, or the infrastructure made its agent raise."""

    outcome = "lost"


class RolloutTimeoutError(RolloutError, TimeoutError):
    """A stage passed its deadline. ``stage`` is one of queue, start, run, result, stop."""

    outcome = "timeout"
    stage: str | None = None


class RolloutThrottledError(RolloutError):
    """The runtime kept answering 429 or 402 until the deadline or the attempts were used up."""

    outcome = "throttled"


class RolloutCancelledError(RolloutError, concurrent.futures.CancelledError):
    """The rollout was cancelled by its owner."""

    outcome = "cancelled"
    cause = None


class InvalidResultError(RolloutError, ValueError):
    """The record is not valid JSON, not an object, or has no reward where one is required, or something else wrote it."""

    outcome = "invalid"
    cause = "agent"


class GatewayError(AgentCoreRLError):
    """The model gateway refused or failed. ``status`` is the HTTP status where there was one."""

    status: int | None = None


class GatewayLostError(GatewayError):
    """A gateway of several does not answer.

    ``gateway`` is its URL, ``session_ids`` those that it may have, ``found`` what the other gateways gave.
    """

    gateway: str | None = None
    session_ids: Sequence[str] = ()
    found: Mapping[str, Any] = MappingProxyType({})


class CaptureError(GatewayError):
    """The tokens or logprobs of a turn are missing or do not fit together."""


class UpstreamError(GatewayError):
    """The engine behind the gateway failed or could not be reached."""


class LocalRuntimeError(AgentCoreRLError):
    """The local AgentCore Runtime failed."""


class AgentLoadError(LocalRuntimeError):
    """An agent file did not import. The message carries its traceback."""


class PolicyError(AgentCoreRLError):
    """The built-in policy or its server failed."""


class TrainingServiceError(AgentCoreRLError):
    """A training service refused a request, or an operation on it failed. ``code`` is the service's error code, or ""."""

    code = ""


class JudgeError(AgentCoreRLError):
    """A judge gave no usable scores. ``status`` is the HTTP status where there was one."""

    status: int | None = None


class ScorerError(AgentCoreRLError):
    """The function that scores rollouts raised, took too long, or returned no reward. Its exception is the ``__cause__``."""


class WeightsError(AgentCoreRLError):
    """An engine did not take new weights, or took them and samples from others."""
