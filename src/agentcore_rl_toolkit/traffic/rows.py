"""Rows of a data set from production traffic."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .redaction import Redaction
from .spans import SESSION, Span

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """A call of an agent by a user. Rows of one ``user`` stay together. None: the trace does not name its user.

    ``sequences`` have the ids that were sampled, as `input_ids` and `assistant_masks` (1: sampled and trained), both (T,).
    """

    session: str
    user: str | None
    start_ns: int = 0
    prompt: str
    answer: str = ""
    reference: Any = None
    sequences: Sequence[Row] = ()


def invocations(
    spans: Iterable[Span], left_out: Counter[str], user_key: str = SESSION, begin_ns: int = 0
) -> list[Invocation]:
    """Return the invocations in the spans, in the order of time. Traces since ``begin_ns`` without a text are left out.

    A trace is one invocation. Its prompt is the last text of the user in the first span that has texts: the agent's own span, or
    its first model call. Its answer is the last text of the agent.
    """
    traces: dict[str, list[Span]] = {}
    for span in spans:
        traces.setdefault(span.trace_id, []).append(span)
    found: list[Invocation] = []
    for trace_id, members in traces.items():
        members.sort(key=lambda span: (span.start_ns, span.operation != "invoke_agent"))
        start_ns, agents = members[0].start_ns, [span for span in members if span.operation == "invoke_agent"]
        prompt = next((text for span in members for text in _last(span.inputs, "user")), "")
        said = (text for span in [*agents, *reversed(members)] for text in _last(span.outputs, "assistant"))
        if not prompt:
            if start_ns >= begin_ns and any(span.operation in ("invoke_agent", "chat") for span in members):
                left_out["traces were left out: their text is missing or was cut off"] += 1
            continue
        facts = {key: value for span in reversed(members) for key, value in span.attributes.items()}
        session = str(facts.get(SESSION) or trace_id)
        user = session if user_key == SESSION else str(facts.get(user_key) or "") or None
        answer = next(said, "")
        found.append(Invocation(session=session, user=user, start_ns=start_ns, prompt=prompt, answer=answer))
    return sorted(found, key=lambda each: each.start_ns)


def _last(messages: Sequence[tuple[str, str]], role: str) -> list[str]:
    """Return the last text of a role, as a list of at most one."""
    texts = [text.strip() for each, text in messages if each == role and text.strip()]
    return texts[-1:]


def from_dataset(rows: Iterable[Mapping[str, Any]]) -> list[Invocation]:
    """Read rows of an AgentCore data set: the first turn of each scenario, with its reference.

    The reference is the expected response, or a dict with it if the scenario has assertions or an expected trajectory, too.
    """
    found = []
    for number, row in enumerate(rows):
        first = (row.get("turns") or [{}])[0]
        values = {"expected_response": first.get("expected_response")}
        values |= {key: row.get(key) for key in ("assertions", "expected_trajectory")}
        known = {key: value for key, value in values.items() if value}
        reference = known["expected_response"] if known.keys() == {"expected_response"} else known or None
        given, name = first.get("input", ""), str(row.get("scenario_id", number))
        prompt = given if isinstance(given, str) else json.dumps(given)
        found.append(Invocation(session=name, user=name, prompt=prompt, reference=reference))
    return found


def harvest(
    found: Iterable[Invocation],
    left_out: Counter[str],
    *,
    prompt_field: str = "prompt",
    redaction: Redaction | None = None,
    held_out_share: float = 0.0,
    begin_ns: int = 0,
) -> tuple[list[tuple[Row, Invocation]], list[Row]]:
    """Make rows of the first invocation of each session. ``left_out`` counts all others, by the reason.

    Later invocations of a session need its history, which an agent does not get as a payload. A prompt that is a JSON object
    becomes the payload itself, another one the field ``prompt_field``. Equal payloads become one row. The rows of a user are all
    trained on or all held out, as a hash of the user's name decides.

    Returns the rows to train on with their invocations, and those to hold out.
    """
    rows: list[tuple[Row, Invocation]] = []
    held_out: list[Row] = []
    sessions: set[str] = set()
    seen: set[str] = set()
    for each in found:
        if each.session in sessions:
            left_out["later invocations of a session were left out: they need its history"] += 1
            continue
        sessions.add(each.session)
        if 0 < each.start_ns < begin_ns:
            left_out["sessions were left out: they began before --since"] += 1
            continue
        if each.user is None:
            left_out["sessions were left out: they lack the attribute of the user"] += 1
            continue
        row = _payload(each.prompt, prompt_field)
        row = row if redaction is None else redaction.value(row)
        if (key := json.dumps(row, sort_keys=True)) in seen:
            left_out["sessions had the same first message as another one"] += 1
            continue
        seen.add(key)
        if each.reference is not None:
            row["_reference"] = each.reference if redaction is None else redaction.value(each.reference)
        if int(hashlib.sha256(each.user.encode()).hexdigest()[:8], 16) / 2**32 < held_out_share:
            held_out.append(row)
        else:
            rows.append((row, each))
    return rows, held_out


def _payload(prompt: str, prompt_field: str) -> Row:
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(prompt), dict):
            return found
    return {prompt_field: prompt}
