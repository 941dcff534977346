"""Spans of OpenTelemetry in the forms in which agents on AgentCore leave them, as one form.

An OTLP/JSON file has spans below ``resourceSpans``. In CloudWatch each log event is one span. In split mode the span is without
its texts, which are in an event record of the same trace and span.

Sources: OTLP specification, "JSON Protobuf Encoding"; ADOT for Python (llo_handler); semantic conventions of generative AI.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

SESSION = "session.id"
_BLOCKS = {"text", "toolUse", "toolResult", "parts", "content", "reasoningContent"}  # keys of blocks of a message


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
    for record in itertools.chain.from_iterable(map(_flat, records)):
        try:
            if "traceId" in record and "body" in record:
                texts.append(_event_record(record))
            elif "traceId" in record and "spanId" in record:
                span = _span(record)
                spans[span.trace_id, span.span_id] = span
        except (AttributeError, LookupError, TypeError, ValueError):
            continue  # other services write to the same groups
    for text in texts:
        found = spans.setdefault((text.trace_id, text.span_id), text)
        found.inputs, found.outputs = found.inputs or text.inputs, found.outputs or text.outputs
        found.attributes = {**text.attributes, **found.attributes}
    return list(spans.values())


def _flat(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the spans of an OTLP record, each with its resource, or the record itself."""
    if "resourceSpans" not in record:
        yield record
    for resource in record.get("resourceSpans") or []:
        for scope in resource.get("scopeSpans") or []:
            for span in scope.get("spans") or []:
                yield {**span, "resource": resource.get("resource")}


def _span(raw: Mapping[str, Any]) -> Span:
    """Read a span with the texts in its attributes and events.

    The conventions up to 1.36 have an event for each message, the later ones an attribute with all messages.
    """
    attributes = _plain((raw.get("resource") or {}).get("attributes")) | _plain(raw.get("attributes"))
    start_ns = int(raw.get("startTimeUnixNano") or 0)
    span = Span(trace_id=str(raw["traceId"]), span_id=str(raw["spanId"]), start_ns=start_ns, attributes=attributes)
    for event in raw.get("events") or []:
        name, values = str(event.get("name", "")), _plain(event.get("attributes"))
        if name == "gen_ai.choice":
            span.outputs.append(("assistant", text_of(values.get("message", values.get("content")))))
        elif name.startswith("gen_ai.") and name.endswith(".message"):
            span.inputs.append((name.split(".")[1], text_of(values.get("content"))))
        else:
            _add_messages(span, values)
    _add_messages(span, attributes)
    return span


def _event_record(record: Mapping[str, Any]) -> Span:
    """Restore the texts that ADOT moved from a span into a log event."""
    attributes = _plain(record.get("attributes"))
    span = Span(trace_id=str(record["traceId"]), span_id=str(record["spanId"]), attributes=attributes)
    body = record["body"] if isinstance(record["body"], Mapping) else {}
    for direction, into in (("input", span.inputs), ("output", span.outputs)):
        for message in (body.get(direction) or {}).get("messages", []):
            content = message.get("content")
            content = content.get("content", content.get("message")) if isinstance(content, Mapping) else content
            into.append((str(message.get("role", "user")), text_of(content)))
    return span


def _add_messages(span: Span, attributes: Mapping[str, Any]) -> None:
    for key, into in (("gen_ai.input.messages", span.inputs), ("gen_ai.output.messages", span.outputs)):
        value = attributes.get(key) or []
        for message in json.loads(value) if isinstance(value, str) else value:
            into.append((str(message.get("role", "user")), text_of(message.get("parts", message.get("content")))))


def text_of(content: Any) -> str:
    """Return the text of a message's content: a text, or a list of blocks, also as JSON. Tool calls and results have none."""
    if isinstance(content, str) and content.startswith("["):
        with contextlib.suppress(ValueError):
            blocks = json.loads(content)
            if all(isinstance(block, Mapping) and not _BLOCKS.isdisjoint(block) for block in blocks):
                return _text(blocks)
    return _text(content)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content  # the user's own text, also if it is JSON
    if isinstance(content, Mapping):
        return _text(content.get("text", content.get("content", ""))) if content.get("type", "text") == "text" else ""
    return "\n".join(filter(None, map(_text, content))) if isinstance(content, list) else ""


def _plain(attributes: Any) -> dict[str, Any]:
    """Return attributes as a mapping: OTLP has a list of keys with typed values, CloudWatch a mapping."""
    if isinstance(attributes, Mapping):
        return dict(attributes)
    return {each["key"]: _value(each.get("value", {})) for each in attributes or []}


def _value(typed: Mapping[str, Any]) -> Any:
    if "arrayValue" in typed:
        return [_value(inner) for inner in typed["arrayValue"].get("values", [])]
    return next(iter(typed.values()), None)
