"""A server as a child process: its start, its end, and the cause in its log."""

from __future__ import annotations

from collections.abc import Callable
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
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Child]:
    """Start a child that runs this program."""
    (tmp_path / "sitecustomize.py").write_text(SITE)

    def start(program: str) -> Child:
        environment = {"PYTHONPATH": str(tmp_path), "PROGRAM": program}
        child = Child("server", ["serve"], tmp_path / "server.log", environment, LocalRuntimeError)
        request.addfinalizer(child.end)
        return child

    return start


LINES = "for n in range(30): os.write(1, b'line %d\\n' % n)"


@pytest.mark.parametrize(
    ("program", "within_s", "message", "log"),
    [
        ("os._exit(3)", 60, "did not start: exit code 3", []),
        (f"{LINES}\nos._exit(3)", 60, "did not start: line 29", [f"line {n}" for n in range(5, 30)]),
        (WAIT, 0, "was not ready after 0 s", []),
    ],
)
def test_a_child_that_does_not_listen_is_an_error_with_the_end_of_its_log(
    start: Callable[[str], Child], program: str, within_s: float, message: str, log: list[str]
) -> None:
    child = start(program)
    with pytest.raises(LocalRuntimeError) as failed:
        child.wait_ready(within_s)
    assert str(failed.value) == f"the server {message}\nIts log ({child.log}) ends with:\n" + "\n".join(log)


@pytest.mark.parametrize(
    ("then", "code", "message"), [("os._exit(0)", 0, "exited with code 0"), (WAIT, -9, "was killed by signal 9")]
)
def test_a_child_that_has_ended_is_an_error_with_its_end(
    start: Callable[[str], Child], then: str, code: int, message: str
) -> None:
    child = start(SERVE + then)
    child.wait_ready(60)
    if then == WAIT:
        child.check()
    assert (child.url, child.end(0 if then == WAIT else 60)) == ("http://127.0.0.1:1", code)
    with pytest.raises(LocalRuntimeError, match=f"^the server {message}\n"):
        child.check()
    assert not child.log.with_suffix(".ready.json").exists()


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([], ""),
        (["first", "  last ", " "], "last"),
        (["error: first", "error: second", "last"], "first"),
        (["ValueError: one", "shop.errors.Odd_Error: two", "error: ours", "  ValueError: indented"], "Odd_Error: two"),
    ],
)
def test_the_cause_of_an_end_is_the_last_exception_or_the_servers_own_error_or_the_last_line(
    lines: list[str], cause: str
) -> None:
    assert cause_of("\n".join(lines)) == cause
