"""The stored record: first the bytes that deployed clients read, then our own fields."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import decimal
import enum
import fractions
import inspect
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_jsonable_python

from ..contract import (
    CAPABILITY_KEYS,
    INFO_FIELD,
    MAX_DEPTH,
    POLICY_REWARD_FIELD,
    REDACTED,
    ROLLOUT_FIELD,
    SECRET_KEYS,
    TEXTS_FIELD,
    TRAIN_FIELD,
    Cause,
    Outcome,
    RolloutConfig,
    extract_reward,
    redact_payload,
)
from ..errors import AgentError, ConfigError, ContractError, InvalidResultError, text_of
from ..proof import PROOF_FIELD
from .causes import Blame

# The score of a rollout whose policy failed: a number, a dict with `reward` and metrics, or None for no reward.
PolicyReward = float | Mapping[str, Any] | None

RESERVED = ("input_id", "s3_bucket", "result_key", "payload", INFO_FIELD, PROOF_FIELD)
MAX_TRACEBACK_CHARS = 100_000
_MIN_SECRET_CHARS = 8  # shorter ones ("EMPTY") are placeholders, and replacing them everywhere would mangle text
MAX_CONVERSIONS = 50


class Encoder:
    """Encodes one result. ``conversions`` maps the path of each value that lost something to a description.

    Texts in it lose their ``secrets``. Numbers and names of keys keep them: a key of digits would break numbers.
    """

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self.conversions: dict[str, str] = {}
        self._secrets = secrets

    def members(self, fields: Mapping[str, Any]) -> str:
        """Encode ``"key": value, "key": value`` for a top-level object, without its braces.

        Raises: InvalidResultError with the path of the value that cannot be stored.
        """
        return json.dumps(self._object(fields, "", 0), allow_nan=False)[1:-1]

    def _object(self, value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        where = f"result[{path}]" if path else "the result"
        for key, item in value.items():
            name = _key(key, where)
            if name in found:
                raise InvalidResultError(f"{where} has two keys that are both {name!r} in JSON")
            found[name] = self._plain(item, f"{path}.{name}" if path else name, depth + 1)
        return found

    def _plain(self, value: Any, path: str, depth: int) -> Any:
        """Convert a value to str, int, float, bool, None, dict and list, all the way down."""
        if depth > MAX_DEPTH:  # also where it contains itself
            raise InvalidResultError(f"result[{path}] is nested more than {MAX_DEPTH} levels deep")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, enum.Enum):
            return self._plain(value.value, path, depth)
        if isinstance(value, str):
            text = str(value)
            for secret in self._secrets:
                text = text.replace(secret, REDACTED)
            return text
        if isinstance(value, int):
            return int(value)
        if isinstance(value, (float, decimal.Decimal, fractions.Fraction)):
            return self._number(float(value), path)
        if (members := _members_of(value)) is not None:
            return self._object(members, path, depth)
        if isinstance(value, (bytes, bytearray, memoryview)):
            self._note(path, "bytes became base64")
            return base64.b64encode(value).decode("ascii")
        if isinstance(value, os.PathLike):
            return self._plain(os.fspath(value), path, depth)  # may be bytes
        if isinstance(value, Set):  # hash order differs from process to process, and mixed types do not compare
            return sorted((self._plain(item, path, depth + 1) for item in value), key=json.dumps)
        if callable(convert := getattr(value, "tolist", None)) and not isinstance(value, type):
            return self._plain(convert(), path, depth)  # arrays and scalars of numpy and torch
        if isinstance(value, Sequence):
            return [self._plain(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        if not isinstance(value, Iterator):  # reading it would use it up
            with contextlib.suppress(ValueError, TypeError):  # pydantic's for an unknown type, and for pandas' NaT
                return self._plain(to_jsonable_python(value, timedelta_mode="float"), path, depth)
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        way = "await it" if inspect.isawaitable(value) else "return plain values instead"
        raise InvalidResultError(f"result[{path}] is a {name}, which has no JSON form; {way}")

    def _number(self, value: float, path: str) -> float | None:
        if math.isfinite(value):
            return value
        if path.replace("[", ".").partition(".")[0] in ("rewards", "reward"):
            raise InvalidResultError(f"result[{path}] is {value!r}; a reward must be a finite number")
        self._note(path, f"{value!r} became null")
        return None

    def _note(self, path: str, what: str) -> None:
        if len(self.conversions) < MAX_CONVERSIONS:
            self.conversions[path] = what


def _members_of(value: Any) -> Mapping[Any, Any] | None:
    """Return the members of a mapping, a dataclass or a pydantic model. None for another value."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    dump = getattr(value, "model_dump", None)
    members = dump() if callable(dump) else None
    return members if isinstance(members, Mapping) else None


def _key(key: Any, where: str) -> str:
    if isinstance(key, enum.Enum):
        key = key.value
    if callable(getattr(key, "item", None)):  # numpy scalar
        key = key.item()
    if isinstance(key, str):
        return str(key)
    if key is None or isinstance(key, (bool, int)) or (isinstance(key, float) and math.isfinite(key)):
        return json.dumps(key)
    raise InvalidResultError(f"{where} has a key of type {type(key).__name__}; JSON keys are strings")


@dataclass(frozen=True, kw_only=True)
class RolloutInfo:
    """The facts of a rollout that are stored with its result. Units: unix seconds.

    Attributes:
        result_key: the key of the record. Of a rollout without a record, its name in logs.
        payload: already redacted. None leaves the field out.
        train: the rule of what trains, of the client or the agent.
        texts: read with `rollout_text`. Filled while the agent runs.
    """

    config: RolloutConfig
    session_id: str
    result_key: str
    payload: Mapping[str, Any] | None = field(default=None, repr=False)
    started_s: float = field(default_factory=time.time)
    train: str | None = None
    texts: dict[str, str] = field(default_factory=dict)


def check_policy_reward(value: PolicyReward) -> PolicyReward:
    """Check the reward that an agent declares for failures of the policy, and return it. Raises: ConfigError."""
    given: object = value
    if value is None:
        return None
    try:
        scored = isinstance(given, (int, float, Mapping)) and not isinstance(given, bool)
        if scored and extract_reward({"rewards": value}) is not None:
            return value
    except ContractError as e:
        raise ConfigError(f"on_policy_failure: {e}") from e
    raise ConfigError(
        f"on_policy_failure must be a number, a dict with `reward`, or None to leave such rollouts out, got {value!r}"
    )


def find_secrets(config: RolloutConfig, *keep: str) -> tuple[str, ...]:
    """Return the secret values of the `_rollout` block, which are blanked in the agent's output.

    A value that is part of one of `keep` is no secret: some agents use the session id as their key.
    """
    return tuple(
        value
        for name, value in config.to_dict().items()
        if (name.lower() in SECRET_KEYS or name in CAPABILITY_KEYS)
        and isinstance(value, str)
        and len(value) >= _MIN_SECRET_CHARS
        and not any(value in text for text in keep)
    )


def success_body(info: RolloutInfo, result: Any, *, max_bytes: int) -> tuple[bytes, Outcome]:
    """Return the record of an agent that returned, and its outcome.

    Raises: InvalidResultError when the result cannot be stored; the caller writes an error record instead.
    """
    members = _members_of(result)
    if members is None:
        example = f': return {{"rewards": {result!r}}}' if isinstance(result, (int, float)) else ""
        raise InvalidResultError(f"Return value must be a dict, got {type(result).__name__}{example}")
    given = {name: value for name, value in members.items() if name not in RESERVED}
    given.setdefault("status_code", 200)
    given.setdefault("stop_reason", "end_turn")
    if given.get(ROLLOUT_FIELD) is not None:
        given |= redact_payload({ROLLOUT_FIELD: given[ROLLOUT_FIELD]}, 2 * MAX_DEPTH)  # the encoder names the path
    status = given["status_code"]
    ok = isinstance(status, int) and not isinstance(status, bool) and 200 <= status < 300
    outcome = Outcome.OK if ok else Outcome.AGENT_ERROR
    own = {} if "outcome" in given else {"outcome": str(outcome)}  # an agent may use that key
    return _body(info, given, own, outcome, None if ok else Blame(cause=Cause.AGENT), max_bytes=max_bytes), outcome


def error_body(
    info: RolloutInfo,
    *,
    stop_reason: str,
    error_type: str,
    outcome: Outcome,
    blame: Blame,
    traceback: str = "",
    policy_reward: PolicyReward = None,
) -> bytes:
    """Return the record of a rollout that failed. Deployed clients find the error in the fields they know."""
    given: dict[str, Any] = {
        "status_code": 500,
        "stop_reason": stop_reason or error_type,
        "traceback": _shortened(traceback),
    }
    if blame.cause is Cause.POLICY and policy_reward is not None:
        given["rewards"] = policy_reward
    # Of an agent's failure, the gateway may know that the policy failed.
    kept = {POLICY_REWARD_FIELD: policy_reward if blame.cause is Cause.AGENT else None}
    return _body(info, given, {"outcome": str(outcome), "error_type": error_type}, outcome, blame, kept)


def _body(
    info: RolloutInfo,
    given: Mapping[str, Any],
    own: Mapping[str, Any],
    outcome: Outcome,
    blame: Blame | None,
    kept: Mapping[str, Any] | None = None,
    *,
    max_bytes: float = math.inf,
) -> bytes:
    """Return a record: the ``given`` fields of the agent without secrets, our ``own``, and a block with those ``kept``."""
    config, encoder = info.config, Encoder(find_secrets(info.config, info.result_key, info.session_id))
    first = encoder.members(given)
    block = {
        "outcome": str(outcome),
        "cause": None if blame is None else str(blame.cause),
        "failure": None if blame is None else blame.failure,
        "session_id": info.session_id,
        "attempt": config.attempt,
        "started_s": round(info.started_s, 3),
        "finished_s": round(time.time(), 3),
        TRAIN_FIELD: info.train,
        TEXTS_FIELD: dict(info.texts) or None,
        "conversions": encoder.conversions or None,
        **(kept or {}),
    }
    fields = {"input_id": config.input_id, "s3_bucket": config.s3_bucket, "result_key": info.result_key, **own}
    fields |= {} if info.payload is None else {"payload": info.payload}
    fields[INFO_FIELD] = {name: value for name, value in block.items() if value is not None}
    last = Encoder().members(fields)
    if max(len(first), len(last)) > max_bytes:
        what = f"the result is larger than {max_bytes} bytes"
        raise InvalidResultError(f"{what}; store large data elsewhere and return its key")
    return f"{{{first}, {last}}}".encode("ascii")


def _shortened(text: str) -> str:
    half = MAX_TRACEBACK_CHARS // 2
    left_out = len(text) - 2 * half
    return text if left_out <= 0 else f"{text[:half]}\n... {left_out} characters left out ...\n{text[-half:]}"


def describe(e: BaseException) -> tuple[str, str]:
    """Return (stop_reason, error_type) of an exception. Neither is ever empty."""
    if isinstance(e, AgentError) and e.error_type:
        return e.message or e.error_type, e.error_type
    error_type = type(e).__name__
    return _shortened(text_of(e).strip()) or error_type, error_type
