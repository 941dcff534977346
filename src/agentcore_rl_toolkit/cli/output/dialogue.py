"""A rollout's dialogue as text, one line a message. All commands print the same lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .terminal import visible


def lines(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Role, text and tool calls of each message, without what a terminal would obey."""
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls") or []]
        shown = " ".join([str(content).strip(), *calls]).strip()
        yield visible(f"{message.get('role', '?')!s:>10}  {shown}")
