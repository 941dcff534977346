"""A server as a child process: its start, its end, and the cause in its log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentcore_rl_toolkit._servers.child import Child, cause_of
from agentcore_rl_toolkit.errors import LocalRuntimeError

# Python runs it before the command line of the child.
SITE = """
import json, os, signal, sys, time
file = sys.orig_argv[sys.orig_argv.index("--ready-file") + 1]
exec(os.environ["PROGRAM"])
"""
SERVE = """
with open(file + ".partial", "w") as ready:
    json.dump({"url": "http://127.0.0.1:1"}, ready)
os.rename(file + ".partial", file)
"""
WAIT = "time.sleep(60)"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Child]]:
    """Start a child that runs this program."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    children: list[Child] = []

    def start(program: str) -> Child:
        environment = {"PYTHONPATH": str(tmp_path), "PROGRAM": program}
        children.append(Child("server", ["serve"], tmp_path / "server.log", environment, LocalRuntimeError))
        return children[-1]

    yield start
    for child in children:
        child.end()


@pytest.mark.parametrize(
    ("program", "within_s", "message"),
    [
        ("os._exit(3)", 60, "did not start: exit code 3\nIts log ({log}) ends with:\n"),
        (
            "[os.write(1, b'line %d\\n' % n) for n in range(30)]; os._exit(3)",
            60,
            "did not start: line 29\nIts log ({log}) ends with:\n" + "\n".join(f"line {n}" for n in range(5, 30)),
        ),
        (WAIT, 0, "was not ready after 0 s\nIts log ({log}) ends with:\n"),
    ],
)
def test_a_child_that_does_not_listen_is_an_error_with_the_end_of_its_log(
    start: Callable[[str], Child], program: str, within_s: float, message: str
) -> None:
    child = start(program)
    with pytest.raises(LocalRuntimeError) as failed:
        child.wait_ready(within_s)
    assert str(failed.value) == f"the server {message.format(log=child.log)}"
    assert child.process.returncode in (3, -9)


@pytest.mark.parametrize(
    ("then", "within_s", "code", "message"),
    [
        ("os._exit(0)", 60, 0, "exited with code 0"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 60, -15, "was killed by signal 15"),
        (WAIT, 0, -9, "was killed by signal 9"),
    ],
)
def test_a_child_that_has_ended_is_an_error_with_its_end(
    start: Callable[[str], Child], then: str, within_s: float, code: int, message: str
) -> None:
    child = start(SERVE + then)
    child.wait_ready(60)
    if within_s == 0:
        child.check()
    assert (child.url, child.end(within_s)) == ("http://127.0.0.1:1", code)
    with pytest.raises(LocalRuntimeError, match=f"^the server {message}\n"):
        child.check()
    assert not child.log.with_suffix(".ready.json").exists()


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([], ""),
        (["first", "  last ", " "], "last"),
        (["error: first", "error: second", "last"], "first"),
        (["ValueError: one", "shop.errors.Odd_Error: two", "error: ours", "last"], "Odd_Error: two"),
        (["KeyboardInterrupt", "  ValueError: indented"], "KeyboardInterrupt"),
    ],
)
def test_the_cause_of_an_end_is_the_last_exception_or_the_servers_own_error_or_the_last_line(
    lines: list[str], cause: str
) -> None:
    assert cause_of("\n".join(lines)) == cause
