"""The stored record: first the bytes that deployed clients read, then our own fields."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_jsonable_python

from ..contract import (
    CAPABILITY_KEYS,
    INFO_FIELD,
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
from ..errors import AgentError, ConfigError, ContractError, InvalidResultError
from ..proof import PROOF_FIELD
from .causes import Blame

# What a rollout scores whose policy failed: a number, a dict with `reward` and metrics beside it, or None for no reward.
PolicyReward = float | Mapping[str, Any] | None

RESERVED = ("input_id", "s3_bucket", "result_key", "payload")
MAX_TRACEBACK_CHARS = 100_000
_MIN_SECRET_CHARS = 8  # shorter ones ("EMPTY") are placeholders, and replacing them everywhere would mangle text
MAX_DEPTH = 200
MAX_CONVERSIONS = 50


class Encoder:
    """Encodes one result. ``conversions`` maps the path of each converted value to what was done with it."""

    def __init__(self) -> None:
        self.conversions: dict[str, str] = {}

    def members(self, fields: Mapping[str, Any]) -> str:
        """``"key": value, "key": value`` for a top-level object, without its braces.

        Raises: InvalidResultError with the path of the value that cannot be stored.
        """
        plain = {name: self._plain(value, name, 0) for name, value in self._members(fields, "")}
        try:
            return json.dumps(plain, allow_nan=False)[1:-1]
        except ValueError as e:  # an integer of more digits than Python writes or reads
            raise InvalidResultError(f"the result cannot be written: {e}") from None

    def _plain(self, value: Any, path: str, depth: int) -> Any:
        """A value as str, int, float, bool, None, dict and list, all the way down."""
        if depth > MAX_DEPTH:  # also where it contains itself
            raise InvalidResultError(f"result[{path}] is nested more than {MAX_DEPTH} levels deep")
        value = self._simple(value, path)
        if isinstance(value, dict):
            return {n: self._plain(item, f"{path}.{n}", depth + 1) for n, item in self._members(value, path)}
        if isinstance(value, list):
            return [self._plain(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        return value

    def _members(self, value: Mapping[Any, Any], path: str) -> list[tuple[str, Any]]:
        """The members of an object, by the names that their keys have in JSON."""
        found = [(self._key(key, path), item) for key, item in value.items()]
        names = {name for name, _ in found}
        if len(names) < len(found):
            twice = next(name for name in names if sum(n == name for n, _ in found) > 1)
            where = f"result[{path}]" if path else "the result"
            raise InvalidResultError(f"{where} has two keys that are both {twice!r} in JSON")
        return found

    def _key(self, key: Any, path: str) -> str:
        if isinstance(key, enum.Enum):
            key = key.value
        if hasattr(key, "item") and callable(key.item):  # numpy scalar
            key = key.item()
        if isinstance(key, str):
            return str(key)
        if key is None or isinstance(key, bool | int):
            return json.dumps(key)
        if isinstance(key, float) and math.isfinite(key):
            return json.dumps(key)
        where = f"result[{path}]" if path else "the result"
        raise InvalidResultError(f"{where} has a key of type {type(key).__name__}; JSON keys are strings")

    def _note(self, path: str, what: str) -> None:
        if len(self.conversions) < MAX_CONVERSIONS:
            self.conversions[path] = what

    def _simple(self, value: Any, path: str) -> Any:
        """One level of a value as str, int, float, bool, None, dict or list."""
        kind = type(value)
        if kind in (str, bool, type(None), dict, list):
            return value
        if isinstance(value, enum.Enum):
            return self._simple(value.value, path)
        if isinstance(value, float):
            if math.isfinite(value):
                return float(value)
            if path in ("rewards", "reward") or path.startswith(("rewards[", "rewards.", "reward[", "reward.")):
                raise InvalidResultError(f"result[{path}] is {value!r}; a reward must be a finite number")
            self._note(path, f"{float(value)!r} became null")
            return None
        if isinstance(value, str):
            return str(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, tuple):
            return list(value)
        if isinstance(value, bytes | bytearray | memoryview):
            self._note(path, "bytes became base64")
            return base64.b64encode(value).decode("ascii")
        if isinstance(value, dt.datetime | dt.date | dt.time):
            return value.isoformat()
        if isinstance(value, dt.timedelta):
            return value.total_seconds()
        if isinstance(value, decimal.Decimal | fractions.Fraction):
            return self._simple(float(value), path)
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, Set):
            return self._sorted(value, path)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        for method in ("model_dump", "tolist"):  # pydantic models; numpy and torch arrays and scalars
            convert = getattr(value, method, None)
            if callable(convert) and not isinstance(value, type):
                return self._simple(convert(), path)
        if isinstance(value, Sequence):
            return list(value)
        if not isinstance(value, Iterator):  # reading it would use it up
            with contextlib.suppress(ValueError):  # pydantic's for what it does not know either
                return self._simple(to_jsonable_python(value), path)
        raise InvalidResultError(
            f"result[{path}] is a {kind.__module__}.{kind.__qualname__}, which has no JSON form; return plain values instead"
        )

    def _sorted(self, items: Set[Any], path: str) -> list[Any]:
        # by their JSON text, because mixed types do not compare; hash order differs from process to process
        plain = [self._plain(item, path, 0) for item in items]
        return sorted(plain, key=json.dumps)


@dataclass(frozen=True, kw_only=True)
class RolloutInfo:
    """The facts of a rollout that are stored beside its result. Units: unix seconds."""

    config: RolloutConfig
    session_id: str
    result_key: str
    payload: Mapping[str, Any] | None = field(repr=False)  # already redacted; None leaves the field out
    secrets: tuple[str, ...] = field(default=(), repr=False)
    started_s: float
    train: str | None = None  # what client or agent wants trained
    texts: dict[str, str] = field(default_factory=dict)  # read with `rollout_text`; filled while the agent runs


def check_policy_reward(value: PolicyReward) -> PolicyReward:
    """The reward that an agent declares for failures of the policy, unchanged. Raises: ConfigError."""
    if value is None:
        return None
    given: object = value  # whatever the annotation says
    if isinstance(given, (int, float, Mapping)) and not isinstance(given, bool):
        try:
            if extract_reward({"rewards": value}) is not None:
                return value
        except ContractError as e:
            raise ConfigError(f"on_policy_failure: {e}") from e
    raise ConfigError(
        f"on_policy_failure must be a number, a dict with `reward`, or None to leave such rollouts out, got {value!r}"
    )


def find_secrets(config: RolloutConfig, *keep: str) -> tuple[str, ...]:
    """Secret values of the `_rollout` block that are blanked wherever they appear in the agent's output.

    A value that is part of one of `keep` (the session id doubles as key in some set-ups) is no secret any more.
    """
    found = []
    for name, value in config.to_dict().items():
        hidden = name.lower() in SECRET_KEYS or name in CAPABILITY_KEYS
        if (
            hidden
            and isinstance(value, str)
            and len(value) >= _MIN_SECRET_CHARS
            and not any(value in text for text in keep)
        ):
            found.append(value)
    return tuple(found)


def as_fields(result: Any) -> dict[str, Any]:
    """An agent's return value as the top level of a record; a new dict, so that the caller's is never changed.

    Raises: InvalidResultError when it is not a dict (or another mapping, a dataclass, a pydantic model).
    """
    if isinstance(result, Mapping):
        return dict(result)
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    dump = getattr(result, "model_dump", None)
    if callable(dump) and not isinstance(result, type):
        return dict(dump())
    example = f': return {{"rewards": {result!r}}}' if isinstance(result, (int, float)) else ""
    raise InvalidResultError(f"Return value must be a dict, got {type(result).__name__}{example}")


def success_body(info: RolloutInfo, result: Any, *, finished_s: float, max_bytes: int) -> tuple[bytes, Outcome]:
    """The record of an agent that returned.

    Raises: InvalidResultError when the result cannot be stored; the caller writes an error record instead.
    """
    fields = as_fields(result)
    for name in (*RESERVED, INFO_FIELD, PROOF_FIELD):
        fields.pop(name, None)
    fields.setdefault("status_code", 200)
    fields.setdefault("stop_reason", "end_turn")
    handed_back = fields.get(ROLLOUT_FIELD)
    if handed_back is not None:
        fields |= redact_payload({ROLLOUT_FIELD: handed_back})
    status = fields["status_code"]
    ok = isinstance(status, int) and not isinstance(status, bool) and 200 <= status < 300
    outcome = Outcome.OK if ok else Outcome.AGENT_ERROR
    encoder = Encoder()
    body = _scrubbed(_joined(encoder, fields, max_bytes), info.secrets)
    whose = Blame(cause=Cause.AGENT) if outcome is Outcome.AGENT_ERROR else None
    tail = _reserved(info) | _info(info, outcome, whose, finished_s=finished_s, conversions=encoder.conversions)
    if "outcome" not in fields:  # the agent's own key of that name is the agent's
        tail["outcome"] = str(outcome)
    return b"{" + body + b", " + _joined(Encoder(), tail, max_bytes) + b"}", outcome


def error_body(
    info: RolloutInfo,
    *,
    stop_reason: str,
    error_type: str,
    traceback: str,
    outcome: Outcome,
    blame: Blame,
    finished_s: float,
    policy_reward: PolicyReward = None,
) -> bytes:
    """The record of a rollout that did not end well; deployed clients see the error in the fields they know.

    A failure of the policy has its reward where every reward is, beside the error.
    """
    head: dict[str, Any] = {
        "status_code": 500,
        "stop_reason": stop_reason or error_type,
        "traceback": _shortened(traceback),
    }
    if blame.cause is Cause.POLICY and policy_reward is not None:
        head["rewards"] = policy_reward
    tail = {
        **_reserved(info),
        "outcome": str(outcome),
        "error_type": error_type,
        **_info(info, outcome, blame, finished_s=finished_s, conversions={}),
    }
    if blame.cause is Cause.AGENT and policy_reward is not None:
        tail[INFO_FIELD][POLICY_REWARD_FIELD] = policy_reward  # should the gateway know that the policy gave no answer
    return b"{" + _scrubbed(_joined(Encoder(), head), info.secrets) + b", " + _joined(Encoder(), tail) + b"}"


def _reserved(info: RolloutInfo) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "input_id": info.config.input_id,
        "s3_bucket": info.config.s3_bucket,
        "result_key": info.result_key,
    }
    return fields if info.payload is None else {**fields, "payload": info.payload}


def _info(
    info: RolloutInfo, outcome: Outcome, blame: Blame | None, *, finished_s: float, conversions: Mapping[str, str]
) -> dict[str, Any]:
    whose = {} if blame is None else {"cause": str(blame.cause)}
    if blame is not None and blame.failure is not None:
        whose["failure"] = blame.failure
    block: dict[str, Any] = {
        "outcome": str(outcome),
        **whose,
        "session_id": info.session_id,
        "attempt": info.config.attempt,
        "started_s": round(info.started_s, 3),
        "finished_s": round(finished_s, 3),
    }
    if info.train is not None:
        block[TRAIN_FIELD] = info.train
    if info.texts:
        block[TEXTS_FIELD] = dict(info.texts)
    if conversions:
        block["conversions"] = dict(conversions)
    return {INFO_FIELD: block}


def _joined(encoder: Encoder, fields: Mapping[str, Any], max_bytes: int | None = None) -> bytes:
    members = encoder.members(fields).encode("ascii")
    if max_bytes is not None and len(members) > max_bytes:
        raise InvalidResultError(
            f"the result is larger than {max_bytes} bytes; store large data elsewhere and return its key"
        )
    return members


def _scrubbed(body: bytes, secrets: tuple[str, ...]) -> bytes:
    for secret in secrets:
        body = body.replace(json.dumps(secret)[1:-1].encode("ascii"), REDACTED.encode("ascii"))
    return body


def _shortened(text: str) -> str:
    half = MAX_TRACEBACK_CHARS // 2
    left_out = len(text) - 2 * half
    return text if left_out <= 0 else f"{text[:half]}\n... {left_out} characters left out ...\n{text[-half:]}"


def describe(e: BaseException) -> tuple[str, str]:
    """(stop_reason, error_type) of an exception; neither is ever empty."""
    if isinstance(e, AgentError) and e.error_type:
        return e.message or e.error_type, e.error_type
    error_type = type(e).__name__
    try:
        text = _shortened(str(e).strip())
    except BaseException:  # a broken __str__ in user code must not lose the record
        text = ""
    return text or error_type, error_type
