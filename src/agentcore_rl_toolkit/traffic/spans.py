"""Spans of OpenTelemetry in the forms in which agents on AgentCore leave them, as one form.

An OTLP/JSON file has spans below ``resourceSpans``. In CloudWatch each log event is one span. In split mode the span is without
its texts, which are in an event record of the same trace and span.

Sources: OTLP specification, "JSON Protobuf Encoding"; ADOT for Python (llo_handler); semantic conventions of generative AI.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

SESSION = "session.id"


@dataclass(kw_only=True)
class Span:
    """A span. ``inputs`` and ``outputs`` are (role, text) of its messages, in order."""

    trace_id: str
    span_id: str
    start_ns: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)
    inputs: list[tuple[str, str]] = field(default_factory=list)
    outputs: list[tuple[str, str]] = field(default_factory=list)

    @property
    def operation(self) -> str:
        return str(self.attributes.get("gen_ai.operation.name", ""))


def read_spans(records: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Read the records of a file or a log group. Texts of event records are put into their spans."""
    spans: dict[tuple[str, str], Span] = {}
    texts: list[Span] = []
    for record in records:
        if "resourceSpans" in record:
            for span in _otlp(record):
                spans[span.trace_id, span.span_id] = span
        elif "traceId" in record and "body" in record:
            texts.append(_event_record(record))
        elif "traceId" in record and "spanId" in record:
            span = _span(record, _plain(record.get("attributes")))
            spans[span.trace_id, span.span_id] = span
    for text in texts:
        found = spans.setdefault((text.trace_id, text.span_id), text)
        found.inputs, found.outputs = found.inputs or text.inputs, found.outputs or text.outputs
        found.attributes = {**text.attributes, **found.attributes}
    return list(spans.values())


def _otlp(record: Mapping[str, Any]) -> Iterator[Span]:
    for resource in record["resourceSpans"]:
        of_resource = _plain(resource.get("resource", {}).get("attributes"))
        for scope in resource.get("scopeSpans", []):
            for span in scope.get("spans", []):
                yield _span(span, {**of_resource, **_plain(span.get("attributes"))})


def _span(raw: Mapping[str, Any], attributes: dict[str, Any]) -> Span:
    span = Span(
        trace_id=str(raw["traceId"]),
        span_id=str(raw["spanId"]),
        start_ns=int(raw.get("startTimeUnixNano") or 0),
        attributes=attributes,
    )
    for event in raw.get("events", []):
        _add_event(span, str(event.get("name", "")), _plain(event.get("attributes")))
    _add_messages(span, attributes)
    return span


def _event_record(record: Mapping[str, Any]) -> Span:
    """Restore the texts that ADOT moved from a span into a log event."""
    span = Span(
        trace_id=str(record["traceId"]), span_id=str(record["spanId"]), attributes=_plain(record.get("attributes"))
    )
    body = record["body"] if isinstance(record["body"], Mapping) else {}
    for direction, into in (("input", span.inputs), ("output", span.outputs)):
        for message in (body.get(direction) or {}).get("messages", []):
            content = message.get("content")
            content = content.get("content", content.get("message")) if isinstance(content, Mapping) else content
            into.append((str(message.get("role", "user")), text_of(content)))
    return span


def _add_event(span: Span, name: str, attributes: Mapping[str, Any]) -> None:
    """Take the texts of an event of the conventions up to 1.36, one message each, or of the later one with all messages."""
    if name == "gen_ai.choice":
        span.outputs.append(("assistant", text_of(attributes.get("message", attributes.get("content")))))
    elif name.startswith("gen_ai.") and name.endswith(".message"):
        span.inputs.append((name.split(".")[1], text_of(attributes.get("content"))))
    else:
        _add_messages(span, attributes)


def _add_messages(span: Span, attributes: Mapping[str, Any]) -> None:
    for key, into in (("gen_ai.input.messages", span.inputs), ("gen_ai.output.messages", span.outputs)):
        for message in _list(attributes.get(key)):
            if isinstance(message, Mapping):
                parts = message.get("parts", message.get("content"))
                into.append((str(message.get("role", "user")), text_of(parts)))


def text_of(content: Any) -> str:
    """Return the text of a message's content: a text, JSON in a text, or a list of blocks. Tool calls and results have none."""
    if isinstance(content, str):
        parsed = _json(content)
        return content if parsed is None else text_of(parsed)
    if isinstance(content, Mapping):
        return text_of(content.get("text", content.get("content", ""))) if content.get("type", "text") == "text" else ""
    if isinstance(content, list):
        return "\n".join(filter(None, map(text_of, content)))
    return ""


def _json(text: str) -> Any:
    """Return a list or an object that the text is, or None."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    blocks = found if isinstance(found, list) else [found]
    known = ("text", "toolUse", "toolResult", "parts", "content", "reasoningContent")
    return found if all(isinstance(block, Mapping) and any(key in block for key in known) for block in blocks) else None


def _list(value: Any) -> list[Any]:
    found = json.loads(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    return found if isinstance(found, list) else []


def _plain(attributes: Any) -> dict[str, Any]:
    """Return attributes as a mapping: OTLP has a list of keys with typed values, CloudWatch a mapping."""
    if isinstance(attributes, Mapping):
        return dict(attributes)
    found: dict[str, Any] = {}
    for each in attributes or []:
        value = each.get("value", {})
        if "arrayValue" in value:
            found[each["key"]] = [next(iter(inner.values()), None) for inner in value["arrayValue"].get("values", [])]
        else:
            found[each["key"]] = next(iter(value.values()), None)
    return found
