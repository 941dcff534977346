"""A rollout as a run keeps it, and its binary form.

Values for lists and filters are columns; the rest is one compressed part each: ``dialogue``, ``tokens``, ``detail``. Arrays in
``tokens`` are in base64 inside JSON, so that a browser reads them without a library of ours. Absent is NULL, and NaN inside an
array of numbers.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from ..contract import TRUNCATED_REASONS, redact
from .schema import COLUMNS
from .spans import seconds_of_tools

DIALOGUE, TOKENS, DETAIL = "dialogue", "tokens", "detail"
INPUT_CHARACTERS, ERROR_CHARACTERS = 300, 500  # limits of the columns


@dataclass(kw_only=True)
class TokenSequence:
    """A training sequence of a rollout.

    Shapes: all lists (T,). ``logprobs`` are the sampler's, ``trainer_logprobs`` and ``entropies`` the trainer's; None where there
    is none, for single tokens as for a whole list. ``advantages`` are given if the tokens of the rollout have different ones;
    otherwise all have the rollout's. ``branch_reason`` says why it left the sequence before it, ``side_call`` why
    nothing of it is trained.
    """

    ids: Sequence[int] = field(repr=False)
    mask: Sequence[int] = field(repr=False)
    logprobs: Sequence[float | None] | None = field(default=None, repr=False)
    versions: Sequence[int | None] | None = field(default=None, repr=False)
    trainer_logprobs: Sequence[float | None] | None = field(default=None, repr=False)
    entropies: Sequence[float | None] | None = field(default=None, repr=False)
    advantages: Sequence[float | None] | None = field(default=None, repr=False)
    prompt_length: int = 0
    turn_ids: Sequence[str] = ()
    context_turn_ids: Sequence[str] = ()
    branch_reason: str | None = None
    side_call: str | None = None
    finish_reason: str | None = None
    weight: float | None = None
    updates: int | None = None  # optimizer steps between sampling and the trainer's logprobs

    def encoded(self) -> dict[str, Any]:
        """Encode as JSON."""
        return {
            **vars(self),
            "ids": _base64(array("i", self.ids)),
            "mask": base64.b64encode(bytes(self.mask)).decode(),
            **{name: _floats(getattr(self, name)) for name in _FLOATS},
            "versions": self.versions and _base64(array("i", [-1 if v is None else v for v in self.versions])),
        }

    @classmethod
    def decoded(cls, value: Mapping[str, Any]) -> TokenSequence:
        """Decode the result of `encoded`, in float32."""
        plain: dict[str, Any] = {k: v for k, v in value.items() if k not in ("ids", "mask", "versions", *_FLOATS)}
        arrays: dict[str, Any] = {name: _unfloats(value.get(name)) for name in _FLOATS}
        arrays |= {name: tuple(plain.pop(name)) for name in ("turn_ids", "context_turn_ids")}
        return cls(
            ids=array("i", base64.b64decode(value["ids"])).tolist(),
            mask=list(base64.b64decode(value["mask"])),
            versions=value["versions"]
            and [None if v < 0 else v for v in array("i", base64.b64decode(value["versions"]))],
            **arrays,
            **plain,
        )


# Columns that a rollout's report of fidelity has.
_REPORTED = ("turns", "sampled_tokens", "trained_tokens", "sequence_tokens", "branches")
_ERRORS = ("error", "exception", "traceback")  # words that a tool's report of an error begins with
_FLOATS = ("logprobs", "trainer_logprobs", "entropies", "advantages")


@dataclass(kw_only=True)
class Rollout:
    """A rollout of a run. ``phase`` is "train", "before", "after" or "eval". Units: seconds; ``ended_s`` is unix time.

    ``group`` is shared by the rollouts that are compared with each other, ``input_key`` by rollouts of the same input.
    ``stages`` are seconds by stage in their order; ``calls`` the model calls with ``started_s``, ``first_token_s``,
    ``finished_s`` in unix time.
    """

    session_id: str
    phase: str
    step: int | None = None
    group: str
    input_key: str | None = None
    place: int = 0
    attempt: int | None = None
    outcome: str
    cause: str | None = None
    failure: str | None = None
    mask_reason: str | None = None
    stage: str | None = None
    reward: float | None = None
    score: float | None = None
    advantage: float | None = None
    staleness: int | None = None
    weight_min: int | None = None
    weight_max: int | None = None
    elapsed_s: float | None = None
    ended_s: float | None = None
    error: str | None = None
    traceback: str | None = None
    log: str | None = None
    payload: Mapping[str, Any] | None = None
    record: Mapping[str, Any] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    reward_parts: Any = None
    stages: Mapping[str, float] = field(default_factory=dict)
    calls: Sequence[Mapping[str, Any]] = ()
    call_errors: Sequence[Mapping[str, Any]] = ()
    dialogue: Sequence[Mapping[str, Any]] | None = None
    sequences: list[TokenSequence] | None = None
    fidelity: Mapping[str, Any] | None = None

    def columns(self) -> dict[str, Any]:
        """Return the values of the table's columns."""
        report = self.fidelity or {}
        found = {
            "grp": self.group,
            **{name: value for name, value in vars(self).items() if name in COLUMNS},
            **{name: report.get(name) for name in _REPORTED},
            "input": self.input(),
            "error": None if self.error is None else self.error[:ERROR_CHARACTERS],
            "stop": self.stop(),
            "cut_calls": self._calls_with("finish_reason", *TRUNCATED_REASONS),
            "unparsed_calls": self._calls_with("parse_status", "unparsed"),
            **numbers_of(self.sequences),
            "numbers": json.dumps(numbers) if (numbers := self.numbers()) else None,
            **self._tools(),
        }
        return {name: stored(name, value) for name, value in found.items()}

    def _tools(self) -> dict[str, Any]:
        calls, errors, seconds = tools_of(self.dialogue), tool_errors(self.dialogue), seconds_of_tools(vars(self))
        facts = {name: [calls[name], errors[name], seconds.get(name, 0.0)] for name in calls}
        total = None if self.dialogue is None else calls.total()
        return {"tool_calls": total, "tools": json.dumps(facts) if facts else None}

    def input(self) -> str | None:
        """Return the beginning of the payload's prompt, or of a payload without one."""
        if not self.payload:
            return None
        prompt = self.payload.get("prompt")
        text = prompt if isinstance(prompt, str) else json.dumps(redact(self.payload), ensure_ascii=False, default=str)
        return text[:INPUT_CHARACTERS]

    def stop(self) -> str | None:
        """Return why the rollout ended: the policy's failure, an outcome other than ok, or how its last model call ended."""
        if self.failure is not None or self.outcome != "ok":
            return "length" if self.failure == "tokens" else self.failure or self.outcome
        last = self.calls[-1].get("finish_reason") if self.calls else None
        return "length" if last in TRUNCATED_REASONS else last

    def _calls_with(self, name: str, *values: str) -> int | None:
        return sum(call.get(name) in values for call in self.calls) if self.calls else None

    def numbers(self) -> dict[str, float]:
        """Return the finite numbers that came with the reward, and a judge's score."""
        found = dict(self.metrics)
        if isinstance(self.reward_parts, Mapping) and (judge := self.reward_parts.get("judge")):
            found["judge"] = judge["score"]
        return {name: known for name, value in found.items() if (known := _finite(value)) is not None}

    def detail(self) -> dict[str, Any]:
        """Return the details of a rollout besides its columns, dialogue and tokens."""
        plain = ("record", "reward_parts", "fidelity", "traceback", "log", "error")
        return {
            "payload": redact(self.payload),
            **{name: getattr(self, name) for name in plain},
            **{name: dict(getattr(self, name)) for name in ("metrics", "stages")},
            **{name: list(getattr(self, name)) for name in ("calls", "call_errors")},
        }


def numbers_of(sequences: Sequence[TokenSequence] | None) -> dict[str, float | None]:
    """Return smallest and mean logprob of the trained tokens, largest and mean gap to the trainer's, mean entropy."""
    sampled, gaps, entropies = list[float](), list[float](), list[float]()
    for s in sequences or ():
        values = (repeat(None) if v is None else v for v in (s.logprobs, s.trainer_logprobs, s.entropies))
        for trained, old, new, entropy in zip(s.mask, *values, strict=False):
            if trained and old is not None:
                sampled.append(old)
                # Between other weights it is what the updates did, no mismatch of sampler and trainer.
                if new is not None and not s.updates:
                    gaps.append(abs(new - old))
            if trained and entropy is not None:
                entropies.append(entropy)
    means = {"logprob_mean": sampled, "gap_mean": gaps, "entropy_mean": entropies}
    extremes = {"logprob_min": min(sampled, default=None), "gap_max": max(gaps, default=None)}
    return {**{name: sum(v) / len(v) if v else None for name, v in means.items()}, **extremes}


def calls_of(message: Mapping[str, Any]) -> list[tuple[Any, Mapping[str, Any]]]:
    """Return the tool calls of a message, each with its id and its function."""
    calls = [c for c in message.get("tool_calls") or () if isinstance(c, Mapping)]
    return [(c.get("id"), c["function"]) for c in calls if isinstance(c.get("function"), Mapping)]


def tools_of(dialogue: Iterable[Mapping[str, Any]] | None) -> Counter[str]:
    """Count calls by the name of the tool."""
    return Counter(str(call.get("name")) for message in dialogue or () for _, call in calls_of(message))


def tool_errors(dialogue: Iterable[Mapping[str, Any]] | None) -> Counter[str]:
    """Count results that report an error, by tool. A result without a call's id belongs to the oldest open call."""
    waiting: list[tuple[Any, Mapping[str, Any]]] = []
    found: Counter[str] = Counter()
    for message in dialogue or ():
        waiting += calls_of(message)
        if message.get("role") == "tool" and waiting:
            named = (call for call in waiting if call[0] is not None and call[0] == message.get("tool_call_id"))
            call = next(named, waiting[0])
            waiting.remove(call)
            failed = message.get("is_error") or text_of(message).lstrip().lower().startswith(_ERRORS)
            found[str(call[1].get("name"))] += bool(failed)
    return found


def text_of(message: Mapping[str, Any]) -> str:
    """Return a message with its tool calls, as one string."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [message.get("reasoning_content"), *(part.get("text") for part in parts if isinstance(part, Mapping))]
    texts += [f"{call.get('name')}({call.get('arguments')})" for _, call in calls_of(message)]
    return " ".join(text for text in texts if isinstance(text, str) and text)


def searched_text(dialogue: Sequence[Mapping[str, Any]] | None, detail: Mapping[str, Any], error: str | None) -> str:
    """Return the text for searches: the dialogue, or payload and record, and then the error."""
    found = [text_of(message) for message in dialogue or ()]
    if not dialogue:
        found = [json.dumps(detail.get(name), ensure_ascii=False, default=str) for name in ("payload", "record")]
    text = "\n".join([*found, error or "", "", ""])  # the end: two characters are found as the beginning of three
    return _text(text).replace("\0", " ")  # an index of SQLite ends at it


def pack(value: Any) -> bytes:
    """Encode as compressed JSON."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    return zlib.compress(text.encode("utf-8", "replace"), 1)  # a model may say lone surrogates, UTF-8 cannot


def unpack(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))


def _text(value: str) -> str:
    """Replace lone surrogates, which SQLite does not store."""
    return value.encode("utf-8", "replace").decode()


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def stored(column: str, value: Any) -> Any:
    """Return a value as its column takes it: text that UTF-8 has, a whole number, or a finite one."""
    kinds: dict[str, Any] = {"TEXT": _text, "INTEGER": int, "REAL": _finite, "JSON": str}
    return None if value is None else kinds[COLUMNS[column].split()[0]](value)


def _base64(values: array[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _floats(values: Sequence[float | None] | None) -> str | None:
    return None if values is None else _base64(array("f", [math.nan if v is None else v for v in values]))


def _unfloats(text: str | None) -> list[float | None] | None:
    return None if text is None else [None if v != v else v for v in array("f", base64.b64decode(text))]
