"""The contract of agent, client and gateway: ids, keys, the `_rollout` block, the stored record, outcomes.

Standard library only. The JSON written here is readable by agents and clients of the published toolkit (0.1.x, 0.2.0), and theirs
by us: fields are added, never removed or given another meaning.

A rollout leaves two kinds of objects under its experiment's prefix::

    {exp_id}/{input_id}/{session_id}.json    the record, written once
    {exp_id}/{input_id}/{session_id}.alive   present while the agent runs; rewritten as a heartbeat, deleted after the record

so that one LIST of the prefix shows both the finished rollouts and, by the age of the `.alive` objects, the running ones.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from .errors import OTHER_FAILURE, POLICY_FAILURES, ConfigError, ContractError, RolloutError

ROLLOUT_FIELD = "_rollout"
INFO_FIELD = "_agent"  # the record's block of the toolkit's fields: outcome, cause, failure, session_id, attempt, times
# True in an agent's reply: this session's payload runs once however often it is delivered.
RUNS_ONCE_FIELD = "runs_once"
TURNS_USED = (
    "model calls, all are used"  # the gateway's refusal of a call beyond `max_turns` has this text in every dialect
)
REFERENCE_FIELD = "_reference"  # a row's field for scorers only. Clients do not send it
ANSWER_FIELD = "_answer"  # the return value of an entrypoint, in the record of an agent that ran as it is
CALLS_FIELD = "_calls"  # model calls at the gateway and elsewhere, in such a record
AS_IS = "AGENTCORE_RL_AS_IS"  # variable of sessions: agents without a rollout function run as they are
PROBE_FIELD = "_probe"  # payload of the doctor, which asks what a session can reach
PROBED = "probed"  # `status` of an agent's reply to a probe, which has the report under `probe`
PROBE_EXPERIMENT = "agentcore-rl-doctor"  # the doctor's keys begin with it
REFUSED = "refused"  # `status` of an agent's reply when it cannot store its record; `error` has the reason
# The agent's 403, which AgentCore passes on without its text.
ROLLOUTS_OFF = (
    "rollouts are off in this version of the agent: a version for training has AGENTCORE_RL_ROLLOUTS=on in its environment "
    "(`agentcore-rl deploy` sets it) or AgentCoreRLApp(rollouts=True)"
)
RECORD_SUFFIX = ".json"
ALIVE_SUFFIX = ".alive"

# InvokeAgentRuntime takes 33 to 256 characters. The id travels in a header, which carries no others and no blank at its ends.
SESSION_ID_PATTERN = re.compile(r"[!-~][ -~]{31,254}[!-~]")
MAX_KEY_BYTES = 1024  # S3's limit. The other stores have it too, so that a run can move between them
MAX_DEPTH = 200  # levels of a record

IdValue = str | int | float  # an experiment or input id as a caller writes it. In a key it stands as `str` writes it

TRAIN_FIELD = "train"  # the rule of what trains, in the `_rollout` block and in a record's own block
# Texts by name. The `_rollout` block has texts to try, and a record's own block the texts that the agent read.
TEXTS_FIELD = "texts"
POLICY_REWARD_FIELD = "policy_reward"  # the agent's reward for failures of the policy, in a record's own block
TRAIN_RULES = ("all", "task", "main")  # any other word is a tag; `trajectory.selection` defines each
DEFAULT_TRAIN = "task"
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_REGION = re.compile(r"[a-z0-9-]{1,40}")  # it becomes a part of the host that records go to
_TAG = re.compile(r"[A-Za-z0-9_.-]{1,64}")

SECRET_KEYS = frozenset(
    {"api_key", "apikey", "authorization", "password", "secret", "token", "access_token", "aws_secret_access_key"}
)
# keys of the `_rollout` block that are secrets: knowing one grants a right
CAPABILITY_KEYS = frozenset({"proof_key"})
REDACTED = "[redacted]"
# User and password before a host, or the value of a parameter that is named like a key.
_IN_URL = re.compile(r"(?<=://)[^/@\s\"]+(?=@)|(?<=[?&])(?:\w*(?:key|token|secret|password|signature))=[^&\s\"]+", re.I)
_LEAVES = frozenset({str, int, float, bool, type(None)})
# Finish reasons of a reply that was cut by a length limit, in the words of vLLM, SGLang, OpenAI and Anthropic.
TRUNCATED_REASONS = frozenset({"length", "max_tokens", "max_output_tokens", "model_context_window_exceeded"})


class Outcome(StrEnum):
    """The end of a rollout.

    `ok` may be trained on, and so may an `agent_error` whose `Cause` is the policy, with the reward that the agent declares for
    that. Everything else is masked out of its group, never given reward 0.
    """

    OK = "ok"
    AGENT_ERROR = "agent_error"
    LOST = "lost"
    TIMEOUT = "timeout"
    THROTTLED = "throttled"
    CANCELLED = "cancelled"
    INVALID = "invalid"


class Cause(StrEnum):
    """The cause of a failed rollout. A cancelled one has none: it did not fail.

    A failure of the policy is an `agent_error` with this cause. Clients and agents that know no causes mask it.
    """

    AGENT = "agent"  # its code raised, or its record cannot be used
    POLICY = "policy"  # out of tokens, turns or context, or calls that do not parse
    INFRASTRUCTURE = "infrastructure"  # runtime, store, gateway, engine, network, settings: never scored
    SCORER = "scorer"  # the user's function that scores rollouts raised, or took too long: never scored


ERRORS: dict[str, type[RolloutError]] = {kind.outcome: kind for kind in RolloutError.__subclasses__()}


class Stage(StrEnum):
    """The stages of a rollout. Each has its deadline."""

    QUEUE = "queue"
    START = "start"
    RUN = "run"
    RESULT = "result"


def trace_id_of(session_id: str) -> str:
    """Return the id of the OpenTelemetry trace of a session's spans, on every side: 32 hexadecimal digits."""
    return hashlib.sha256(f"trace/{session_id}".encode(errors="surrogatepass")).hexdigest()[:32]


def span_id_of(name: str) -> str:
    """Return the id of a span by its name: 16 hexadecimal digits. The span of a session is the root of its trace."""
    return hashlib.sha256(f"span/{name}".encode(errors="surrogatepass")).hexdigest()[:16]


def new_session_id() -> str:
    """Make an unguessable session id: 40 characters, first one alphanumeric."""
    return "r" + secrets.token_hex(19) + "0"


def check_session_id(session_id: str) -> str:
    """Return the id unchanged. Raises: ContractError when it is not 33 to 256 visible ASCII characters, or unusable in a key."""
    given: object = session_id
    if not isinstance(given, str) or not SESSION_ID_PATTERN.fullmatch(given):
        raise ContractError(
            f"session id {short(session_id)} must be 33 to 256 ASCII characters without blanks at its ends; "
            "contract.new_session_id() makes one"
        )
    return check_parts(session_id, "session id")


def check_id(value: IdValue, name: str) -> str:
    """Return the text of an experiment or input id in keys. `str` writes numbers, as in the published package.

    Any text that stays below its experiment is an id, also one with slashes (``team/run-7``).
    Raises: ContractError on an empty or ``..`` part, on a control character, on half a character, and on anything but text and
        finite numbers.
    """
    if not isinstance(value, (str, bool)) and not is_finite(value):
        raise ContractError(
            f"{name} must be text or a number, got {short(value)}; name inputs by str(...) of what you have"
        )
    return check_parts(str(value), name)


def is_finite(value: object) -> bool:
    """Return True for a number, bools apart, that is not too large to be squared and summed."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e150


def check_parts(text: str, name: str) -> str:
    """Return a key, or a part of one, unchanged. Raises: ContractError if stores would refuse it or read it as another key."""
    unusable = CONTROL.search(text) or _SURROGATE.search(text) or len(text.encode()) > MAX_KEY_BYTES
    if unusable or any(part in ("", ".", "..") for part in text.split("/")):
        raise ContractError(
            f"{name} {short(text)} must have at most {MAX_KEY_BYTES} bytes, and no empty part, no part '.' or '..', no control "
            "character and no lone surrogate"
        )
    return text


def result_key(exp_id: IdValue, input_id: IdValue, session_id: str) -> str:
    """Return the key of a record, ``{exp_id}/{input_id}/{session_id}.json``. Nothing is escaped, as in the published package.

    The session id may be any text: deployed agents make up a uuid when called without one.
    Raises: ContractError on an id that leads out of its experiment, and on a key too long for S3.
    """
    experiment, input_name = check_id(exp_id, "exp_id"), check_id(input_id, "input_id")
    key = f"{experiment}/{input_name}/{check_parts(session_id, 'session id')}{RECORD_SUFFIX}"
    check_parts(alive_key(key), "the key")  # the longer one of the two
    return key


def alive_key(record_key: str) -> str:
    """Return the key of the heartbeat object that belongs to a record key."""
    return record_key.removesuffix(RECORD_SUFFIX) + ALIVE_SUFFIX


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The `_rollout` block of a payload, as the agent sees it.

    ``exp_id``, ``input_id`` and ``s3_bucket`` (a bucket name or a store URL) come together or not at all. Without them the agent
    runs but stores nothing. An empty ``input_id`` asks for a fresh one. Unknown keys are kept in ``extra`` and reach the agent.
    """

    exp_id: IdValue | None = None
    input_id: IdValue | None = None
    s3_bucket: str | None = None
    base_url: str | None = None
    model_id: str | None = None
    api_key: str | None = field(default=None, repr=False)
    sampling_params: Mapping[str, Any] | None = None
    attempt: int = 1
    heartbeat_s: float | None = None
    proof_key: str | None = field(default=None, repr=False)
    s3_region: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> RolloutConfig | None:
        """Read ``payload["_rollout"]``, or None when there is none.

        Raises: ContractError when the block is not an object, a needed field is missing, or an id is unusable.
        """
        block = payload.get(ROLLOUT_FIELD)
        if block is None:
            return None
        if not isinstance(block, Mapping):
            raise ContractError(f"{ROLLOUT_FIELD!r} must be an object, got {type(block).__name__}")
        names = ("exp_id", "input_id", "s3_bucket")
        if any(block.get(name) is not None for name in names):
            for name in names:
                if block.get(name) is None:
                    raise ContractError(f"Missing required rollout config field: {name!r}")
            check_id(block["exp_id"], "exp_id")
            if block["input_id"] != "":
                check_id(block["input_id"], "input_id")
        for name, (what, holds) in _CHECKS.items():
            if block.get(name) is not None and not holds(block[name]):
                raise ContractError(f"{name} must be {what}")
        known = {k: block[k] for k in _KNOWN if block.get(k) is not None}
        extra = {k: v for k, v in block.items() if k not in _KNOWN}
        return cls(**known, extra=extra)

    @classmethod
    def from_dict(cls, block: Mapping[str, Any]) -> RolloutConfig:
        """Read a `_rollout` block by itself. Raises: ContractError."""
        return cls.from_payload({ROLLOUT_FIELD: block}) or cls()

    def to_dict(self) -> dict[str, Any]:
        """Return the block as a JSON-ready dict. Absent fields are left out, and `extra` is merged in."""
        known = {k: getattr(self, k) for k in _KNOWN if getattr(self, k) is not None}
        return {**self.extra, **known}


_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "s3_bucket": ("a bucket name or store URL", lambda value: isinstance(value, str)),
    "attempt": ("an integer of 1 or more", lambda value: type(value) is int and value >= 1),
    "heartbeat_s": ("a number of seconds", is_finite),
    "proof_key": ("a string of 32 to 512 characters", lambda value: isinstance(value, str) and 32 <= len(value) <= 512),
    "s3_region": ("an AWS region", lambda value: isinstance(value, str) and _REGION.fullmatch(value) is not None),
}
_KNOWN = tuple(field.name for field in fields(RolloutConfig) if field.name != "extra")


def redact(value: Any, levels: int = MAX_DEPTH) -> Any:
    """Copy JSON-like data and replace the values of secret-looking keys. Raises: ContractError if it has more levels."""
    if type(value) in _LEAVES:  # most of a payload. The checks below cost more than they look
        return value
    if levels <= 0:
        raise ContractError("the payload is nested too deeply to be stored")
    if isinstance(value, Mapping):
        return {
            k: REDACTED if isinstance(k, str) and k.lower() in SECRET_KEYS and v is not None else redact(v, levels - 1)
            for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact(v, levels - 1) for v in value]
    return value


def redact_payload(payload: Any, levels: int = MAX_DEPTH - 1) -> Any:
    """Copy a payload as it may be stored: redacted, and without capabilities in its `_rollout` block. Raises: ContractError."""
    clean = redact(payload, levels)
    block = clean.get(ROLLOUT_FIELD) if isinstance(clean, dict) else None
    if isinstance(block, dict):
        if isinstance(block.get("base_url"), str):
            block["base_url"] = redact_urls(block["base_url"])
        block.update({name: REDACTED for name in CAPABILITY_KEYS if block.get(name) is not None})
    return clean


def redact_urls(text: str) -> str:
    """Return a text without the passwords and keys that URLs in it carry."""
    return _IN_URL.sub(REDACTED, text)


def _own_block(record: Mapping[str, Any] | None) -> Mapping[str, Any]:
    block = (record or {}).get(INFO_FIELD)
    return block if isinstance(block, Mapping) else {}


def record_outcome(record: Mapping[str, Any]) -> Outcome:
    """Return the outcome of a stored record.

    Our records have it in their own block, which an agent's result cannot overwrite, and repeat it under `outcome` unless the
    agent uses that name for itself. In records of the published toolkit `status_code` decides.

    An agent that the infrastructure made raise is lost. Agents of ours that are deployed may call it `agent_error`.
    """
    block, status = _own_block(record), record.get("status_code", 200)
    named = block.get("outcome")
    if named is None and str(record.get("outcome")) in set(Outcome):
        named = record["outcome"]
    if named is None:
        known = isinstance(status, int) and not isinstance(status, bool)
        named = (Outcome.OK if 200 <= status < 300 else Outcome.AGENT_ERROR) if known else Outcome.INVALID
    if str(named) not in set(Outcome):
        return Outcome.INVALID
    raised = named == Outcome.AGENT_ERROR and block.get("cause") == Cause.INFRASTRUCTURE
    return Outcome.LOST if raised else Outcome(str(named))


def record_error(record: Mapping[str, Any], key: str | None = None) -> RolloutError | None:
    """Return the exception that describes a record, with its cause and the policy's failure, or None if it ended `ok`."""
    outcome = record_outcome(record)
    if outcome is Outcome.OK:
        return None
    block, reason = _own_block(record), str(record.get("stop_reason") or "")
    kind, trace, stage = (
        None if record.get(name) is None else str(record[name]) for name in ("error_type", "traceback", "stage")
    )
    what = reason or kind or "no reason given"
    about: dict[str, Any] = {"error_type": kind, "agent_traceback": trace, "key": key}
    who = "the agent failed"
    if outcome is Outcome.TIMEOUT:
        about["stage"] = stage
    elif outcome is Outcome.AGENT_ERROR and block.get("cause") == Cause.POLICY:
        failure, who = str(block.get("failure")), "the policy failed"
        about |= {"cause": Cause.POLICY, "failure": failure if failure in POLICY_FAILURES else OTHER_FAILURE}
    texts = {
        Outcome.AGENT_ERROR: f"{who}: {what}",
        Outcome.LOST: f"the infrastructure failed the agent: {what}",
        Outcome.TIMEOUT: f"the agent ran out of time: {reason}",
        Outcome.THROTTLED: reason,
        Outcome.CANCELLED: reason or "the agent was cancelled",
        Outcome.INVALID: f"the record cannot be used: {reason or record.get('outcome')}",
    }
    return ERRORS[outcome](texts[outcome], **about)


def check_tag(tag: str) -> str:
    """Check the name of an agent's role, and return it. Raises: ConfigError."""
    if tag in TRAIN_RULES or not _TAG.fullmatch(tag):
        words = ", ".join(TRAIN_RULES)
        raise ConfigError(f"a tag has 1 to 64 letters, digits, '_', '-' or '.', and is none of {words}; got {tag!r}")
    return tag


def check_train(rule: str) -> str:
    """Check a rule of what trains (a word of `TRAIN_RULES`, or tags with commas between), and return it. Raises: ConfigError."""
    if rule not in TRAIN_RULES:
        for tag in rule.split(","):
            check_tag(tag)
    return rule


def record_train(record: Mapping[str, Any] | None) -> str | None:
    """Return the rule of what trains in a record, set by the client or the agent."""
    rule = _own_block(record).get(TRAIN_FIELD)
    return rule if isinstance(rule, str) else None


def cause_of(error: BaseException | None) -> Cause | None:
    """Return the cause of an ended rollout's failure by its error, or None if it did not fail."""
    if error is None:
        return None
    named = error.cause if isinstance(error, RolloutError) else Cause.INFRASTRUCTURE  # credentials, store, gateway
    return None if named is None else Cause(named)


def parse_record(body: bytes) -> dict[str, Any]:
    """Decode a stored record. Raises: ContractError when it is not a JSON object (bare NaN and Infinity are refused too)."""

    def refuse(token: str) -> float:
        raise ContractError(f"it holds {token}; write None for a value that is absent")

    try:
        record = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as e:  # bad UTF-8, bad JSON, a number of thousands of digits
        raise ContractError(f"the record is not valid JSON: {e}") from e
    if not isinstance(record, dict):
        raise ContractError(f"the record must be a JSON object, got {type(record).__name__}")
    return record


def extract_reward(record: Mapping[str, Any]) -> float | None:
    """Return the scalar reward of a record, or None when it has none.

    ``rewards`` may be a number, or a list whose last element counts (the published convention); ``reward`` is read when
    ``rewards`` is absent. A dict form ``{"reward": x, ...}`` carries extra metrics next to the reward.

    Raises: ContractError when a reward, of the list or of ``turn_rewards`` too, is present but is not a finite number.
    """
    value = record.get("rewards", record.get("reward"))
    if isinstance(value, Mapping):
        value = value.get("reward")
    listed = value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else [value]
    named = record.get("turn_rewards")
    if named is not None and not isinstance(named, Mapping):
        raise ContractError(f"turn_rewards must be a dict from reply ids to numbers, got {type(named).__name__}")
    for number in (*(() if value is None else listed), *(named or {}).values()):
        if not (isinstance(number, bool) or is_finite(number)):
            raise ContractError(f"reward must be a finite number, got {short(number)}")
    return float(listed[-1]) if listed and value is not None else None


def nearly_equal(numbers: Sequence[float]) -> bool:
    """Return True if the numbers are the same but for rounding."""
    return math.isclose(min(numbers), max(numbers), rel_tol=1e-12, abs_tol=1e-12)


def short(value: object) -> str:
    """Return at most 200 characters of a value's repr."""
    try:
        text = repr(value)
    except Exception:  # integers of more than 4300 digits have no repr, and a user's class may raise in its own
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 200 else text[:200] + "..."


def advise_on_calls(records: Iterable[Mapping[str, Any] | None]) -> str:
    """Return what to change if unmodified agents ran and no model call of theirs arrived at the gateway, otherwise ""."""
    found = [calls for record in records if isinstance(calls := (record or {}).get(CALLS_FIELD), Mapping)]
    if not found or any(calls.get("gateway") for calls in found):
        return ""
    elsewhere: Counter[str] = sum((Counter(calls.get("elsewhere")) for calls in found), Counter())
    places = ", ".join(f"{n} x {place}" for place, n in elsewhere.most_common(5)) or "none that this toolkit sees"
    hosts = sorted({place.partition("/")[0] for place in elsewhere if place.endswith("(another host)")})
    ways = [f"--model-host {host} sends these calls to the gateway" for host in hosts[:3]]
    way = "; ".join(ways) or "See app.model(), Program and --policy-model (docs/agents.md)"
    return f"no model call of the agent arrived at the gateway. Calls to other addresses: {places}. {way}"
