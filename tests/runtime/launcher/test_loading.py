"""An agent's module code is run once, before there is any session. It must get no further than a session does."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.isolation.linux import cgroups

from ..conftest import AGENTS, Server, alive, wait_for

REBEL = AGENTS / "rebel.py"
OUT = ("secret", "host file", "host write", "system write", "kernel setting", "environment")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux's")


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A folder and a process of the machine's user that are nobody else's business."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "secret").write_text("s3cret")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={"MARK": "mine"})
    yield folder, process.pid
    process.kill()
    process.wait()


def look(start_server: Callable[..., Server], victim: tuple[Path, int], *options: str) -> tuple[Server, Any]:
    folder, pid = victim
    reply = ("--session-env", f"VICTIM_DIR={folder}", "--session-env", f"VICTIM_PID={pid}")
    server = start_server(*reply, *options, agent=REBEL)
    return server, server.invoke({"do": "look"})


@pytest.mark.parametrize("tier", ["namespaces", "landlock"])
def test_module_code_and_sessions_are_held_alike(
    start_server: Callable[..., Server], victim: tuple[Path, int], tier: str
) -> None:
    server, answer = look(start_server, victim, "--isolation", tier)
    template = server.view.get("/_local/status")["templates"][0]
    assert (template["start"], template["confined"]) == ("fork", True)
    for phase in ("loading", "session"):
        for what in OUT:
            kind, value = answer[phase][what]
            # namespaces: the file of secrets is there, and empty
            assert kind == "refused" or value == "", (phase, what, value)
        if tier == "namespaces":
            assert answer[phase]["host processes"] == ["done", []], answer
            assert answer[phase]["kill"] == ["refused", "ProcessLookupError"], answer
            assert answer[phase]["tmp"][0] == "done", answer
        else:
            assert answer[phase]["tmp"][0] == "refused", answer
    assert not (victim[0] / "planted").exists()
    assert not Path(f"/tmp/planted-{victim[1]}").exists()


ESCAPES = """
import ctypes, os
if os.getpid() != 1:
    raise SystemExit("not confined: on this machine itself, none of this is tried")
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    return "done" if getattr(libc, name)(*args) == 0 else os.strerror(ctypes.get_errno())
MS_REMOUNT, MS_BIND = 32, 4096
TRIED = {
    "writable /usr": call("mount", b"none", b"/usr", None, ctypes.c_ulong(MS_REMOUNT | MS_BIND), None),
    "writable /proc": call("mount", b"none", b"/proc", None, ctypes.c_ulong(MS_REMOUNT | MS_BIND), None),
    "lift the cover of secrets": call("umount2", b"/etc/shadow", 2),
    "lift /proc": call("umount2", b"/proc", 2),
    "a disk": call("mknod", b"/tmp/disk", 0o60600, ctypes.c_ulong(os.makedev(254, 0))),
}
os.makedirs("/tmp/proc", exist_ok=True)
TRIED["another /proc"] = call("mount", b"proc", b"/tmp/proc", b"proc", ctypes.c_ulong(0), None)
for pid in os.listdir("/proc"):
    if pid.isdigit() and pid != str(os.getpid()):
        TRIED["join " + pid] = call("setns", os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY), 0)
"""


def test_what_a_template_may_do_over_its_own_namespaces_does_not_lead_out(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    """It keeps what it takes to confine sessions; that must not undo its own confinement."""
    agent = tmp_path / "agent" / "agent.py"
    agent.parent.mkdir()
    agent.write_text(
        f"{ESCAPES}\nfrom bedrock_agentcore.runtime import BedrockAgentCoreApp\napp = BedrockAgentCoreApp()\n"
        "@app.entrypoint\ndef main(payload):\n    return TRIED\nif __name__ == '__main__':\n    app.run()\n"
    )
    server = start_server("--isolation", "namespaces", agent=agent)
    tried = server.invoke({})
    assert set(tried) == {
        "writable /usr",
        "writable /proc",
        "lift the cover of secrets",
        "lift /proc",
        "a disk",
        "another /proc",
    }
    assert "done" not in tried.values(), tried


@pytest.mark.parametrize(
    "limit",
    [pytest.param((), marks=pytest.mark.nightly), ("--memory-mb", "400", "--processes", "50", "--cpus", "1")],
)
def test_pids_are_the_machines_and_everything_ends_with_the_template(
    start_server: Callable[..., Server], limit: tuple[str, ...]
) -> None:
    server = start_server("--isolation", "namespaces", *limit)
    server.invoke({})
    (session,) = server.view.sessions()
    template = server.template_pid()
    status = Path(f"/proc/{session['pid']}/status").read_text()
    assert f"PPid:\t{template}\n" in status
    os.kill(template, 9)
    wait_for(lambda: not alive(session["pid"]))
    wait_for(lambda: server.view.sessions() == [])
    assert server.invoke({})["calls"] == 1


def test_loading_has_no_network_where_sessions_have_none(start_server: Callable[..., Server], tmp_path: Path) -> None:
    agent = tmp_path / "agent" / "agent.py"
    agent.parent.mkdir()
    agent.write_text(
        "import os\nSEEN = sorted(line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:])\n"
        "from bedrock_agentcore.runtime import BedrockAgentCoreApp\napp = BedrockAgentCoreApp()\n"
        "@app.entrypoint\ndef main(payload):\n    return {'seen': SEEN}\nif __name__ == '__main__':\n    app.run()\n"
    )
    server = start_server("--isolation", "namespaces", "--network", "none", agent=agent)
    assert server.invoke({}) == {"seen": ["lo"]}


def test_sessions_hold_no_file_of_the_template(start_server: Callable[..., Server]) -> None:
    server = start_server()
    server.invoke({})
    (session,) = server.view.sessions()
    held = {os.readlink(path) for path in Path(f"/proc/{session['pid']}/fd").iterdir()}
    assert [name for name in held if name.endswith("template.log")] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups of version 1 are root's")
@pytest.mark.parametrize(
    ("number", "tier"),
    [
        (signal.SIGTERM, "namespaces"),
        (signal.SIGKILL, "process"),
        pytest.param(signal.SIGTERM, "process", marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, "namespaces", marks=pytest.mark.nightly),
    ],
)
def test_control_groups_of_a_template_go_with_its_runtime_or_the_next(
    start_server: Callable[..., Server], number: int, tier: str
) -> None:
    if cgroups.detect() is None:
        pytest.skip("no control group is usable here")
    server = start_server("--isolation", tier, "--memory-mb", "400")
    server.invoke({})
    assert groups_of(server.process.pid) != []
    server.stop(number)
    if number == signal.SIGKILL:
        wait_for(lambda: not any(alive(pid) for pid in below(groups_of(server.process.pid))))
        start_server("--isolation", tier)
    assert groups_of(server.process.pid) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups of version 1 are root's")
@pytest.mark.parametrize("tier", ["namespaces", pytest.param("process", marks=pytest.mark.nightly)])
def test_control_groups_of_sessions_go_with_a_killed_template(start_server: Callable[..., Server], tier: str) -> None:
    if cgroups.detect() is None:
        pytest.skip("no control group is usable here")
    server = start_server("--isolation", tier, "--memory-mb", "400")
    server.invoke({})
    before = {p for group in groups_of(server.process.pid) for p in (group, *group.iterdir()) if p.is_dir()}
    os.kill(server.template_pid(), signal.SIGKILL)
    wait_for(lambda: server.view.sessions() == [])
    assert server.invoke({})["calls"] == 1  # a new template
    sessions = {p for p in before if p.name.endswith("-1")}
    assert sessions
    wait_for(lambda: not any(p.is_dir() for p in sessions))
    assert server.stop() == 0
    assert groups_of(server.process.pid) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups of version 1 are root's")
def test_control_groups_go_although_another_process_has_the_number_of_the_killed_runtime(
    start_server: Callable[..., Server],
) -> None:
    where = cgroups.detect()
    if where is None:
        pytest.skip("no control group is usable here")
    later = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        ours = cgroups.owned("left-")  # of a living process: it stays
        left = re.sub(r"of\d+", f"of{later.pid}", ours)  # of one that had this number before
        for parent in where.directories(ours) + where.directories(left):
            (parent / "session").mkdir(parents=True)
        cgroups.sweep()
        assert [p for p in where.directories(left) if p.exists()] == []
        assert all((p / "session").exists() for p in where.directories(ours))
    finally:
        later.communicate()
        for parent in where.directories(ours):
            cgroups.remove_below(parent)


def groups_of(pid: int) -> list[Path]:
    where = cgroups.detect()
    parents = set(where.parents.values()) if where is not None else set()
    return [group for parent in parents for group in parent.glob(f"of{pid}.*")]


def below(groups: list[Path]) -> list[int]:
    """Processes in these groups. The groups go meanwhile: what is gone has none."""
    found: list[int] = []
    for group in groups:
        for folder, _, _ in os.walk(group):
            with contextlib.suppress(OSError):
                found += map(int, Path(folder, "cgroup.procs").read_text().split())
    return found


@pytest.mark.parametrize("tier", ["namespaces", "landlock"])
def test_an_agent_beside_the_runtimes_own_folders_does_not_see_into_them(
    start_server: Callable[..., Server], tmp_path: Path, tier: str
) -> None:
    state, agent = tmp_path / "state", tmp_path / "agent.py"
    other = state / "sessions" / "another" / "1"
    reads = (
        "import os\ndef seen():\n    try:\n        return open(os.environ['OTHER']).read()\n"
        "    except OSError:\n        return ''\n"
    )
    agent.write_text(
        f"{reads}AT_LOAD = seen()\nfrom bedrock_agentcore.runtime import BedrockAgentCoreApp\napp = BedrockAgentCoreApp()\n"
        "@app.entrypoint\ndef main(payload):\n    return {'loading': AT_LOAD, 'session': seen()}\n"
        "if __name__ == '__main__':\n    app.run()\n"
    )
    options = ("--isolation", tier, "--state-dir", str(state), "--session-env", f"OTHER={other / 'secret'}")
    server = start_server(*options, agent=agent)
    other.mkdir(parents=True)
    (other / "secret").write_text("s3cret")
    assert server.invoke({}) == {"loading": "", "session": ""}
    os.kill(server.template_pid(), 9)  # loaded anew, it finds the file there
    wait_for(lambda: server.view.sessions() == [])
    assert server.invoke({}) == {"loading": "", "session": ""}
