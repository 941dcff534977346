"""The output of commands: texts made safe for a terminal, dialogues, and progress.

An agent may print anything that a model wrote. Escape sequences can change the title, the colors and the clipboard of the
reader's terminal, and hide earlier output.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from ...runs.record import calls_of

# Control characters, also of Latin-1, except tab and line feed, and characters that change the direction of text.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SHOWN = {"\x1b": "\\e", "\x07": "\\a", "\x08": "\\b", "\x00": "\\0"}
FIRST_S, THEN_S = 3.0, 15.0


def stdout_for_json(wanted: bool) -> contextlib.AbstractContextManager[object]:
    """Send the output of scorers and libraries to stderr, so that stdout has only the JSON."""
    return contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext()


class WaitReport:
    """Reports a long wait: prints ``what`` after three seconds, then every fifteen. Call it during the wait."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock = what, clock
        self._began_s = clock()
        self._next_s = self._began_s + FIRST_S

    def __call__(self) -> None:
        now = self._clock()
        if now >= self._next_s:
            self._next_s = now + THEN_S
            click.echo(f"still {self._what} ({now - self._began_s:.0f} s)", err=True)


def dialogue_lines(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield role, text and tool calls of each message, without characters that a terminal would obey."""
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        calls = [f"{call.get('name')}({call.get('arguments')})" for _, call in calls_of(message)]
        shown = " ".join([str(content).strip(), *calls]).strip()
        yield visible(f"{message.get('role', '?')!s:>10}  {shown}")


def plain_log(text: str) -> str:
    """Convert a log with lines that are JSON objects to plain lines: level and message, then the traceback."""
    lines = []
    for line in text.splitlines():
        entry = None
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
        if not isinstance(entry, dict) or "message" not in entry:
            lines.append(line)
            continue
        lines.append(f"{entry.get('level', '')} {entry['message']}".strip())
        trace = entry.get("stackTrace") or entry.get("exception") or entry.get("traceback") or ""
        lines += "".join(trace if isinstance(trace, list) else [str(trace)]).splitlines()
    return "\n".join(lines)


def visible(text: object) -> str:
    """Escape every character that a terminal would obey. A carriage return begins a new line."""
    plain = str(text).replace("\r\n", "\n").replace("\r", "\n")
    return _COMMANDS.sub(_written_out, plain)


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return _SHOWN.get(found[0]) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")
