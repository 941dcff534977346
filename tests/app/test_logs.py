"""Structured logs: JSON with the rollout's ids, and the program's own logging left alone."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from agentcore_rl_toolkit.logs import JsonFormatter, WarnsOnceAMinute, log_context


@pytest.fixture
def lines() -> Iterator[Any]:
    """A logger that writes JSON lines, and a function that reads them back."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("test_logs")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False

    def read() -> list[dict[str, Any]]:
        return [json.loads(line) for line in stream.getvalue().splitlines()]

    yield logger, read
    logger.removeHandler(handler)


def test_a_line_is_one_json_object(lines: Any) -> None:
    logger, read = lines
    logger.warning("%s is\nlate é", "it")
    (line,) = read()
    assert line["message"] == "it is\nlate é"
    assert (line["level"], line["logger"]) == ("WARNING", "test_logs")
    assert line["timestamp"].endswith("Z")
    assert len(line["timestamp"]) == len("2026-01-01T00:00:00.000Z")


def test_a_line_commands_no_terminal() -> None:
    answer = "\x1b]0;owned\x07 \x9b2J \x7f \u202egnp.exe \ud800 Grüße, 世界"
    written = JsonFormatter().format(logging.makeLogRecord({"msg": answer}))
    assert not any(c in written for c in "\x1b\x07\x9b\x7f\u202e")
    assert "Grüße, 世界" in written
    assert json.loads(written)["message"] == answer


def test_ids_come_from_the_context_and_go_with_it(lines: Any) -> None:
    logger, read = lines
    with log_context(session_id="s", input_id="i", exp_id=None):
        with log_context(exp_id="e", input_id="j"):
            logger.info("inner")
        logger.info("outer")
    logger.info("after")
    logger.info("by hand", extra={"session_id": "t"})
    ids = [{k: line.get(k) for k in ("session_id", "input_id", "exp_id")} for line in read()]
    assert ids[0] == {"session_id": "s", "input_id": "j", "exp_id": "e"}
    assert ids[1] == {"session_id": "s", "input_id": "i", "exp_id": None}
    assert ids[2] == {"session_id": None, "input_id": None, "exp_id": None}
    assert ids[3]["session_id"] == "t"


def test_what_is_warned_of_again_and_again_is_counted(lines: Any) -> None:
    logger, read = lines
    now_s = 0.0
    warnings = WarnsOnceAMinute(logger, clock=lambda: now_s)
    for _ in range(3):
        warnings.warning("no %s", "luck", extra={"session_id": "s"})
    now_s = 61.0
    warnings.warning("no luck")
    warnings.warning("no luck")
    assert [(line["level"], line["message"]) for line in read()] == [
        ("WARNING", "no luck"),
        ("INFO", "no luck"),
        ("INFO", "no luck"),
        ("WARNING", "no luck (2 more since the last such line)"),
        ("INFO", "no luck"),
    ]
    assert read()[1]["session_id"] == "s"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_program_with_logging_of_its_own_keeps_it() -> None:
    err = run(
        "import logging\n"
        "logging.basicConfig(format='MINE %(name)s %(message)s', level='INFO')\n"
        "before = list(logging.getLogger().handlers)\n"
        "from agentcore_rl_toolkit.app import AgentCoreRLApp\n"
        "AgentCoreRLApp()\n"
        "assert logging.getLogger().handlers == before\n"
        "logging.getLogger('agentcore_rl_toolkit.x').info('hello')\n"
        "logging.getLogger('mine').info('hi')\n"
    )
    assert err.splitlines() == ["MINE agentcore_rl_toolkit.x hello", "MINE mine hi"]
