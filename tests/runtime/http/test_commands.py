"""Commands in sessions, at their edges: characters, endings, trouble."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.eventstream import EventStreamBuffer
from botocore.exceptions import ClientError

from agentcore_rl_toolkit.runtime.http.commands import run_command

from ..conftest import AGENTS, Server, shown

# A command that a signal kills, although the test run may ignore that signal.
KILLED = "exec python3 -c 'import os, signal; signal.signal(%d, signal.SIG_DFL); os.kill(os.getpid(), %d)'"


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (r"printf '\303'; sleep .3; printf '\251'", "é"),  # a character in two writes
        (r"printf '\360\237'; sleep .2; printf '\230'; sleep .2; printf '\200!'", "😀!"),
        (r"printf 'a\303'; sleep .1; printf 'b\303'", "a\ufffdb\ufffd"),  # what is none is shown as such
        ("""python3 -c "print('é→' * 200000, end='')" """, "é→" * 200_000),
    ],
)
def test_characters_stay_whole(server: Server, session_id: str, command: str, output: str) -> None:
    assert shown(server.command(session_id, command)) == output


def test_each_stream_has_its_own_characters(server: Server, session_id: str) -> None:
    found = server.command(session_id, r"printf '\303'; printf '\303' >&2; sleep .2; printf '\251'; printf '\250' >&2")
    assert (shown(found), shown(found, "stderr")) == ("é", "è")


@pytest.mark.parametrize("command", ["echo a\0b", "echo \ud800"])
def test_what_no_command_line_can_hold_is_400(server: Server, session_id: str, command: str) -> None:
    with pytest.raises(ClientError) as error:
        server.command(session_id, command)
    assert error.value.response["Error"]["Code"] == "ValidationException"
    if "\0" in command:  # half a surrogate pair is no JSON, so no field is known
        assert error.value.response["fieldList"][0]["name"] == "command"
    assert server.session(session_id) is None


def test_a_command_ends_with_its_session(server: Server, session_id: str) -> None:
    server.invoke({}, session_id)
    threading.Timer(0.7, server.view.stop, (session_id,)).start()
    *rest, last = server.command(session_id, "echo on; sleep 60")
    assert last == {"contentStop": {"exitCode": 137, "status": "COMPLETED"}}
    assert shown(rest) == "on\n"


@pytest.mark.parametrize(
    ("command", "code"),
    [(":", 0), ("exit 255", 255), ("kill -9 $$", 137), (KILLED % (1, 1), 129), (KILLED % (2, 2), 130)],
)
def test_an_exit_code_is_a_shells(server: Server, session_id: str, command: str, code: int) -> None:
    assert server.command(session_id, command)[-1]["contentStop"] == {"exitCode": code, "status": "COMPLETED"}
    assert server.session(session_id) is not None


def test_a_command_that_cannot_be_started_says_so(
    start_server: Callable[..., Server], session_id: str, tmp_path: Path
) -> None:
    server = start_server("--state-dir", str(tmp_path / "state"), agent=AGENTS / "bare.py")
    server.invoke({}, session_id)
    root = Path(json.loads((tmp_path / "state" / "server.json").read_text())["root"])
    shutil.rmtree(root / "s")  # where commands and the runtime meet
    *rest, last = server.command(session_id, "true")
    assert "the command could not be started: FileNotFoundError" in shown(rest, "stderr")
    assert last == {"contentStop": {"exitCode": -1, "status": "COMPLETED"}}


async def test_trouble_after_the_reply_has_begun_is_an_exception_of_the_stream(session_id: str) -> None:
    async def command(*arguments: Any) -> None:
        raise ZeroDivisionError("a bug")

    async def send(message: Any) -> None:
        buffer.add_data(message.get("body", b""))

    buffer = EventStreamBuffer()
    session = SimpleNamespace(id=session_id, process=SimpleNamespace(command=command))
    await run_command(session, "true", 9.0, send)  # type: ignore[arg-type]
    begun, failed = buffer
    assert json.loads(begun.payload) == {"contentStart": {}}
    assert failed.headers[":exception-type"] == "internalServerException"
    assert json.loads(failed.payload)["message"] == "An internal error occurred."
