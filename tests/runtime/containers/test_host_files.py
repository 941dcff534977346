"""Agents given by path in containers of this machine's own programs: the docker and gvisor tiers, and who tries to get out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.runtime.containers.client import gvisor_program

from ..conftest import AGENTS, Server, wait_for
from ..container_images import containers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
OPTIONS = ("--init-timeout", "90", "--stop-grace", "5", "--memory-mb", "300")

# Everything in one program: the start of an interpreter is what costs time here, most of all behind gVisor.
ATTACK = r"""
import ctypes, errno, json, os, socket, subprocess, sys
said = {}
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, action):
    try:
        said[name] = ["done", action()]
    except OSError as e:
        said[name] = ["refused", errno.errorcode.get(e.errno, type(e).__name__)]
def call(value):
    if value < 0:
        raise OSError(ctypes.get_errno(), "")
    return value
def dial(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(3)
        s.connect(address)
def write(path):
    with open(path, "w") as f:
        f.write("x")
def fill(path, limit):
    with open(path, "wb") as f:
        for _ in range(limit):
            f.write(bytes(2**20))
def bomb():
    started = []
    try:
        for _ in range(300):
            started.append(subprocess.Popen(["/bin/sleep", "5"]))
    finally:
        for p in started:
            p.kill()
given = json.loads(sys.argv[1])
attempt("other session's file", lambda: open(given["victim"] + "/note").read())
attempt("other sessions", lambda: os.listdir(os.path.dirname(given["victim"])))
attempt("plant a file", lambda: write(given["victim"] + "/planted"))
attempt("host's file", lambda: open(given["host_file"]).read())
attempt("keys", lambda: os.listdir("/root/.ssh"))
attempt("shadow", lambda: open("/etc/shadow").read())
for place in ("/etc", "/usr", "/usr/lib", given["agent"], given["library"]):
    attempt("write " + place, lambda: write(place + "/planted"))
attempt("server's environment", lambda: open(f"/proc/{given['server_pid']}/environ").read())
attempt("kill the server", lambda: os.kill(given["server_pid"], 9))
said["processes"] = len([p for p in os.listdir("/proc") if p.isdigit()])
attempt("kernel setting", lambda: write("/proc/sys/kernel/core_pattern"))
attempt("sysrq", lambda: write("/proc/sysrq-trigger"))
attempt("setuid", lambda: os.setuid(65534))
attempt("mount", lambda: call(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)))
def device():
    os.mknod("/tmp/disk", 0o60660, os.makedev(254, 0))  # gVisor makes one, which stands for nothing
    open("/tmp/disk", "rb").close()
attempt("device", device)
attempt("raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close())
attempt("runtime's port", lambda: dial(socket.AF_INET, ("127.0.0.1", given["port"])))
attempt("engine's socket", lambda: dial(socket.AF_UNIX, given["engine"]))
attempt("abstract socket", lambda: dial(socket.AF_UNIX, given["abstract"]))
attempt("fill /tmp", lambda: fill("/tmp/large", 1100))
if given["bomb"]:
    attempt("fork bomb", bomb)
print(json.dumps(said))
"""


@pytest.fixture(scope="module", params=["docker", "gvisor"])
def server(
    request: pytest.FixtureRequest, engine_storage: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    if request.param == "gvisor" and shutil.which("runsc") is None:
        pytest.skip("runsc is not installed")
    processes = ("--processes", "100") if request.param == "docker" else ()
    server = Server(tmp_path_factory.mktemp("runtime"), "--isolation", request.param, *OPTIONS, *processes)
    assert server.info["isolation"] == request.param
    yield server
    assert server.stop() == 0, server.output.read_text()
    assert containers() == []


def command(server: Server, session_id: str, *argv: str) -> str:
    """Standard output of a command beside a session."""
    text = " ".join("'" + a.replace("'", "'\\''") + "'" for a in argv)
    reply = server.default_client.invoke_agent_runtime_command(
        agentRuntimeArn=server.arn, runtimeSessionId=session_id, body={"command": text, "timeout": 100}
    )
    parts = [event["chunk"] for event in reply["stream"]]
    out = "".join(p.get("contentDelta", {}).get("stdout", "") for p in parts)
    errors = "".join(p.get("contentDelta", {}).get("stderr", "") for p in parts)
    assert parts[-1]["contentStop"]["exitCode"] == 0, errors
    return out


def test_sessions_serve_and_cannot_get_out(server: Server, tmp_path: Path) -> None:
    victim, attacker = new_session_id(), new_session_id()
    seen = server.invoke({"do": "where"}, victim, client=server.client(read_timeout=100))
    assert {"note", "probe.py", "tmp"} <= set(seen["files"])
    assert seen["home"] == seen["cwd"]
    assert Path(seen["cwd"], "note").read_text() == "mine"
    assert "SECRET_OF_THE_HOST" not in seen["env"]
    (tmp_path / "host.txt").write_text("of the host")
    described = server.view.get("/_local/status")
    root = Path(described["state_dir"]).parent
    given = {
        "victim": seen["cwd"],
        "host_file": str(tmp_path / "host.txt"),
        "agent": str(AGENTS),
        "library": sys.prefix,
        "server_pid": server.process.pid,
        "port": int(server.url.rsplit(":", 1)[1]),
        "engine": str(root / "engine" / "podman"),
        "bomb": server.info["isolation"] == "docker",  # gVisor bounds the memory of processes, not their number
        "abstract": "\0agentcore-rl-container-test",
    }
    assert Path(given["engine"]).exists()
    reply: dict[str, Any] = json.loads(command(server, attacker, sys.executable, "-c", ATTACK, json.dumps(given)))
    assert reply.pop("processes") < 10
    assert len(reply.pop("other sessions")[1]) == 1  # its own
    got_out = {name: answer for name, answer in reply.items() if answer[0] == "done"}
    assert got_out == {}
    assert reply["fill /tmp"] == ["refused", "ENOSPC"]
    if given["bomb"]:
        assert reply["fork bomb"] == ["refused", "EAGAIN"]
    assert not Path(seen["cwd"], "planted").exists()
    assert server.invoke({}, victim)["calls"] == 2
    for session_id in (victim, attacker):
        server.view.stop(session_id, 0.0)
    wait_for(lambda: not Path(seen["cwd"]).exists())


def test_memory_is_bounded(server: Server) -> None:
    session_id = new_session_id()
    server.invoke({}, session_id, client=server.client(read_timeout=100))
    eat = "x = [bytearray(b'x') * 2**20 for _ in range(500)]"
    with pytest.raises((AssertionError, botocore.exceptions.ClientError, botocore.exceptions.EventStreamError)):
        command(server, session_id, sys.executable, "-c", eat)
    if server.session(session_id) is not None:
        server.view.stop(session_id, 0.0)


def test_an_idle_session_ends(engine_storage: Path, start_server: Callable[..., Server]) -> None:
    server = start_server("--isolation", "docker", "--idle-timeout", "3", "--stop-grace", "5")
    session_id = new_session_id()
    assert server.invoke({"do": "where"}, session_id)
    ended = wait_for(lambda: server.ended(session_id))
    assert (ended["state"], ended["exit_status"]) == ("idle", 0)


def test_a_tier_that_is_not_here_is_refused(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    for name in ("DOCKER_HOST", "CONTAINER_HOST", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    if any(Path(path).exists() for path in ("/var/run/docker.sock", "/run/podman/podman.sock")):
        pytest.skip("an engine listens at its usual place")
    server = start_server("--isolation", "docker", wait=False)
    assert server.process.wait(30) != 0
    assert "isolation tier 'docker' is not available here" in server.output.read_text()


def test_gvisor_does_not_take_a_limit_that_it_cannot_hold(
    engine_storage: Path, start_server: Callable[..., Server]
) -> None:
    if shutil.which("runsc") is None:
        pytest.skip("runsc is not installed")
    server = start_server("--isolation", "gvisor", "--processes", "10", wait=False)
    assert server.process.wait(30) == 2
    assert "cannot bound processes" in server.output.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="runsc changes owners as root only")
def test_gvisor_is_not_given_the_machines_dev_null(tmp_path: Path) -> None:
    """It would make it "nobody"'s, as releases of runsc do with their standard input."""
    programs = tmp_path / "programs"
    programs.mkdir()
    runsc = programs / "runsc"
    runsc.write_text('#!/bin/sh\nif [ /dev/stdin -ef /dev/null ]; then echo null; fi\ncat\necho "$@"\n')
    runsc.chmod(0o755)
    (tmp_path / "engine").mkdir()
    program = gvisor_program(tmp_path / "engine")

    def run(**given: Any) -> str:
        path = {"PATH": f"{programs}:{os.environ['PATH']}"}
        return subprocess.run(
            [program, "create", "x"], env=path, stdout=subprocess.PIPE, timeout=30, check=True, text=True, **given
        ).stdout

    assert run(stdin=subprocess.DEVNULL) == "create x\n"
    assert run(input="said\n") == "said\ncreate x\n"
