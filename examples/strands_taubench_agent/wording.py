"""The two forms of a conversation: the published form, and a compact form for small policies.

``full`` has the complete instructions, the descriptions of the tools, and the original replies. ``compact`` has one sentence of
instructions, tools without descriptions, and replies as short lines. A small policy learns the rest in the training. Both have
the same tools and arguments, and a compact reply contains no more than the original reply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

Rendering = Literal["full", "compact"]

MAX_TOKENS = {"full": 1024, "compact": 96}  # limit of a reply
COMPACT_PROMPT = "Solve the ticket: check, fix what is wrong, then say done."
SOLO_PROMPT = """You are a customer service agent. You are given a ticket with a user's request, and solve it with the tools.
You cannot talk to the user. Make one tool call at a time. When you have solved the ticket, or handed it over, answer with the
word done.

Follow this policy:

{policy}"""
USER_PROMPT = """You are a customer service agent who helps a user. In each turn, either write to the user or make one tool call.

Follow this policy:

{policy}"""

# What a compact reply keeps of the objects that the telecom tools return.
_KEPT = (
    *("customer_id", "line_ids", "line_id", "phone_number", "bill_id", "status", "account_status", "total_due"),
    *("data_used_gb", "data_limit_gb", "data_refueling_gb", "roaming_enabled", "contract_end_date", "message"),
)
_FILLERS = frozenset(
    [
        "card",
        "cellular",
        "currently",
        "for",
        "has",
        "is",
        "mode",
        "now",
        "status",
        "successfully",
        "the",
        "turned",
        "your",
    ]
)
_BATTERY = re.compile(r"\s*\|\s*\N{BATTERY}.*$")
_NOT_PLAIN = re.compile(r"[^\x20-\x7e]+")


def system_prompt(rendering: Rendering, policy: str, *, solo: bool) -> str:
    if rendering == "compact":
        return COMPACT_PROMPT
    return (SOLO_PROMPT if solo else USER_PROMPT).format(policy=policy)


def tool_spec(rendering: Rendering, schema: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as Strands wants it, from the benchmark's OpenAI schema."""
    parameters = dict(schema["parameters"])
    description = str(schema["description"])
    if rendering == "compact":
        description = str(schema["name"]).replace("_", " ")
        names = list(parameters.get("properties", {}))
        parameters = {
            "type": "object",
            "properties": {name: {} for name in names},
            "required": list(parameters.get("required", [])),
        }
    return {"name": schema["name"], "description": description, "inputSchema": {"json": parameters}}


def reply(rendering: Rendering, text: str) -> str:
    """Return the result of a tool in the form for the model."""
    return text if rendering == "full" else compact(text)


def compact(text: str) -> str:
    """Short lines: objects as the fields that matter, text without icons, in lower case.

    >>> compact('Airplane Mode is now OFF.\\nStatus Bar: \N{ANTENNA WITH BARS} Good | 5G | \N{BATTERY} 80%')
    'airplane off\\nbar good, 5g'
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict | list):
        return "\n".join(_fields(item) for item in (value if isinstance(value, list) else [value]))
    lines = [_NOT_PLAIN.sub("", _BATTERY.sub("", line)) for line in text.splitlines() if not line.startswith("(")]
    return "\n".join(_plain(line) for line in lines if line.strip())


def _plain(line: str) -> str:
    line = re.sub(r"\s*\|\s*", ", ", line).replace(":", "").rstrip(". ")
    return " ".join(word for word in line.lower().split() if word not in _FILLERS)


def _fields(item: Any) -> str:
    if not isinstance(item, dict):
        return str(item)
    parts = []
    for name, value in item.items():
        if isinstance(value, dict):
            parts.append(_fields(value))
        elif name in _KEPT and value is not None:
            parts.append(f"{name} {' '.join(map(str, value)) if isinstance(value, list) else value}")
    return ", ".join(part for part in parts if part)
