"""Structured logs: one JSON object per line, carrying the ids of the rollout that wrote it."""

from __future__ import annotations

import json
import logging
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

ID_FIELDS = ("session_id", "input_id", "exp_id")

# What a terminal obeys and JSON leaves as it is: control characters above ASCII, and what turns the direction of text.
_COMMANDS = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_ids: ContextVar[dict[str, str] | None] = ContextVar("agentcore_rl_log_ids", default=None)


@contextmanager
def log_context(**ids: str | None) -> Iterator[None]:
    """Add ids (``session_id=``, ``input_id=``, ``exp_id=``, or others) to every log line written inside, None values left out.

    Follows the context into tasks and into threads started with `contextvars.copy_context`.
    """
    token = _ids.set({**(_ids.get() or {}), **{k: v for k, v in ids.items() if v is not None}})
    try:
        yield
    finally:
        _ids.reset(token)


class JsonFormatter(logging.Formatter):
    """Formats lines as JSON objects: ``timestamp`` (UTC, ms), ``level``, ``message``, ``logger``, ids in context, the error."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        at = datetime.fromtimestamp(record.created, UTC)
        entry: dict[str, Any] = {
            "timestamp": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "message": record.getMessage(),
            "logger": record.name,
            **(_ids.get() or {}),
        }
        for name in ID_FIELDS:  # `extra={"session_id": ...}` on one call wins over the context
            value = getattr(record, name, None)
            if value is not None:
                entry[name] = value
        if record.exc_info and record.exc_info[0] is not None:
            entry["errorType"] = record.exc_info[0].__name__
            trace = traceback.TracebackException(*record.exc_info)  # its text is safe: an agent's `__str__` may raise
            entry["errorMessage"] = str(trace)
            entry["stackTrace"] = list(trace.format())
        line = json.dumps(entry, ensure_ascii=False, default=str)
        return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


def configure_logging(level: int = logging.INFO, *, everything: bool = False) -> None:
    """Send the toolkit's own log lines to stderr as JSON, unless the program has already set up logging.

    Root handlers are left as they are: when the root logger has any, the toolkit only logs through them. Calling it again
    changes the level and nothing else.

    Args:
        everything: give the lines of all other loggers, such as the agent's own, the same form and ids. Their levels stay. For
            servers, once the program's own set-up is over.
    """
    logger = logging.getLogger("agentcore_rl_toolkit")
    logger.setLevel(level)
    root = logging.getLogger()
    if root.handlers:
        return
    if not logger.handlers:
        logger.addHandler(_json_handler())
        logger.propagate = False
    if everything:
        root.addHandler(_json_handler())
        sdk = logging.getLogger("bedrock_agentcore.app")
        sdk.propagate = not sdk.handlers  # it already writes JSON


class WarnsOnceAMinute:
    """Warnings of one kind: those in the minute after one are INFO, and the next one counts them."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._warned_s: float | None = None
        self._since = 0

    def warning(self, message: str, *arguments: object, extra: Mapping[str, object] | None = None) -> None:
        """Log ``message``, as `logging.Logger.warning` does."""
        now_s = self._clock()
        if self._warned_s is not None and now_s - self._warned_s < 60:
            self._since += 1
            self._logger.info(message, *arguments, extra=extra)
            return
        counted = f" ({self._since} more since the last such line)" if self._since else ""
        self._logger.warning(message + counted, *arguments, extra=extra)
        self._warned_s, self._since = now_s, 0


def _json_handler() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    return handler
