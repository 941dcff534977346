"""Find out which messages a template refuses or drops, and write these in a form that it accepts.

Each message is rewritten without regard to later messages, so a prompt continues from turn to turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from ..wire.history import tool_call

SYSTEM = ("system", "developer")
PROBE_USER = {"role": "user", "content": "q"}
# From the least to the most. Agents may send any of them; templates know some.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_ID_SIZE = 9  # characters, letters and digits: mistral_common's `InstructRequestNormalizer` takes no others


def probe_answer(arguments: str, call_id: str = "call00000") -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [tool_call(call_id, "probe_tool", arguments)]}


# Return True if the template takes the messages and writes the words in this order.
Writes = Callable[..., bool]


def _rule(phrase: str) -> Any:
    return field(default=False, metadata={"phrase": phrase})


@dataclass(frozen=True, kw_only=True)
class Habits:
    """The form of messages for a template: the rules that it needs, because it refuses messages or drops them.

    ``call_id`` is the form that all ids of calls get. ``efforts`` are the reasoning efforts that the template takes.
    """

    merges_leading: bool = _rule("leading system messages are merged")
    leading_as_user: bool = _rule("leading system messages are the user's")
    late_as_user: bool = _rule("later system messages are written in place, as the user's")
    merges_users: bool = _rule("user messages in a row are merged")
    merges_answers: bool = _rule("answers in a row are merged")
    lone_results_as_user: bool = _rule("a tool's result without its call is the user's")
    results_as_user: bool = _rule("the results of tools are the user's")
    joins_results: bool = _rule("a user message after a tool's result is written into the result")
    needs_user: bool = _rule("an empty message of the user is put in front")
    objects_only: bool = _rule("unreadable arguments are an object")
    short_ids: bool = _rule("ids of calls are nine characters")
    call_id: str = ""
    efforts: tuple[str, ...] = EFFORTS

    def __str__(self) -> str:
        said = [rule.metadata["phrase"] for rule in fields(self) if rule.metadata and getattr(self, rule.name)]
        if self.call_id:
            said.append(f"ids of calls are {self.call_id}")
        if self.efforts != EFFORTS:
            said.append(f"reasoning efforts: {', '.join(self.efforts) or 'none'}")
        return "; ".join(said) or "messages are written as they are"

    def apply(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages in a form that the template takes. The given dicts may be changed."""
        messages = self._with_ids(messages)
        leading = next((i for i, m in enumerate(messages) if m["role"] not in SYSTEM), len(messages))
        front, rest = messages[:leading], messages[leading:]
        if self.merges_leading and leading > 1:
            front = [{**front[0], "content": "\n\n".join(m["content"] for m in front)}]
        if self.leading_as_user:
            front, rest = [], [*({**m, "role": "user"} for m in front), *rest]
        if self.late_as_user:
            rest = [{**m, "role": "user"} if m["role"] in SYSTEM else m for m in rest]
        if self.lone_results_as_user or self.results_as_user:
            rest = _with_results_as_user(rest, every=self.results_as_user)
        if self.needs_user and (not rest or rest[0]["role"] != "user"):
            rest.insert(0, {"role": "user", "content": ""})
        out = front
        for message in rest:
            if out and self._joins(out[-1], message):
                out[-1] = _joined(out[-1], message)
            else:
                out.append(message)
        return out

    def _joins(self, before: dict[str, Any], message: dict[str, Any]) -> bool:
        roles = (before["role"], message["role"])
        return (
            (self.merges_users and roles == ("user", "user"))
            or (self.merges_answers and roles == ("assistant", "assistant"))
            or (self.joins_results and roles == ("tool", "user"))
        )

    def _with_ids(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not self.short_ids and not self.call_id:
            return messages
        known: dict[str, str] = {}
        index = 0
        for message in messages:
            for call in message.get("tool_calls") or ():
                old = str(call.get("id"))
                name = call["function"]["name"]
                call["id"] = known[old] = self.call_id.format(name=name, index=index) if self.call_id else _short(old)
                index += 1
            if message["role"] == "tool":
                old = str(message.get("tool_call_id"))
                message["tool_call_id"] = known.get(old) or (old if self.call_id else _short(old))
        return messages


def _short(call_id: str) -> str:
    fits = len(call_id) == _ID_SIZE and call_id.isascii() and call_id.isalnum()
    return call_id if fits else hashlib.blake2b(call_id.encode()).hexdigest()[:_ID_SIZE]


def _with_results_as_user(messages: list[dict[str, Any]], *, every: bool) -> list[dict[str, Any]]:
    """Write the results of tools as the user's: those without a call before them, or all."""
    called = False
    out = []
    for message in messages:
        if message["role"] != "tool":
            called = message["role"] == "assistant" and bool(message.get("tool_calls"))
        elif every or not called:
            message = {"role": "user", "content": message["content"]}
        out.append(message)
    return out


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    joined = {**other, **one}
    for name in ("content", "reasoning_content", "thinking"):
        texts = [text for message in (one, other) if (text := message.get(name))]
        if name in joined:
            joined[name] = "\n\n".join(texts)
    if calls := [*(one.get("tool_calls") or ()), *(other.get("tool_calls") or ())]:
        joined["tool_calls"] = calls
    return joined


def find_habits(writes: Writes, *, text_arguments: bool, call_id: str, short_ids: bool) -> Habits:
    first, second, asked = "probe-first", "probe-second", "probe-asked"
    system = [{"role": "system", "content": first}, {"role": "system", "content": second}]
    user = {**PROBE_USER, "content": asked}
    answer = {"role": "assistant", "content": first}
    calling, called = probe_answer("{broken"), probe_answer("{}")
    result = {"role": "tool", "tool_call_id": "call00000", "content": first}
    no_system = not writes([system[0], user], first, asked) and writes([user], asked)
    plain = writes([user, answer, {**user, "content": second}], asked, first, second)
    known = writes([user, called])
    in_calls = known and writes([user, called, result], asked, first)
    return Habits(
        merges_leading=writes([system[0], user]) and not writes([*system, user], first, second, asked),
        leading_as_user=no_system,
        late_as_user=no_system or not writes([user, system[0], user], asked, first, asked),
        merges_users=not writes([user, {**user, "content": second}], asked, second),
        merges_answers=plain and not writes([user, answer, {**answer, "content": second}], asked, first, second),
        lone_results_as_user=in_calls and not writes([user, result], asked, first),
        results_as_user=plain and not in_calls,
        joins_results=in_calls
        and not writes([user, called, result, {**user, "content": second}], asked, first, second),
        needs_user=(not writes([system[0]]) and writes([system[0], user]))
        or (plain and not writes([answer, user], first, asked)),
        objects_only=not text_arguments and known and not writes([user, calling]),
        short_ids=short_ids,
        call_id=call_id,
        efforts=tuple(level for level in EFFORTS if writes([user], reasoning_effort=level)),
    )
