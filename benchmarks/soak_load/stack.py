"""The processes of a soak: started, started again when they are killed, measured, ended; and what they may leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.gateway.client import ADMIN_KEY_ENV

from .trainer import BUCKET

HERE = Path(__file__).parent
TEST_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-west-2"}
CREDENTIAL = (TEST_CREDENTIALS["AWS_ACCESS_KEY_ID"], TEST_CREDENTIALS["AWS_SECRET_ACCESS_KEY"])
KEPT = (".json", ".alive")  # records, and heartbeats of sessions that were killed before theirs
SERVERS = ("model", "gateway", "runtime")
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Measure:
    """One look at a process."""

    at_s: float
    pid: int
    rss_mb: float
    files: int


@dataclass
class Process:
    """A process of the stack, however often it is started."""

    name: str
    handle: subprocess.Popen[bytes] | None = None
    port: int = 0
    starts: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    wanted: bool = True


class Stack:
    """``folder`` holds all files."""

    def __init__(self, folder: Path, *, tier: str, at_once: int, rollouts: int, step: int) -> None:
        self.folder, self.tier = folder, tier
        self.at_once, self.rollouts, self.step = at_once, rollouts, step
        self.temporary, self.state, self.seen = folder / "t", folder / "state", folder / "seen"
        self.temporary.mkdir()  # short: sockets live below it
        self.seen.mkdir()
        self.seen.chmod(0o777)
        self.processes = {name: Process(name) for name in (*SERVERS, "trainer")}
        self.measures: dict[str, list[Measure]] = {}
        self.roots: set[str] = set()
        self.began_s = time.monotonic()
        self.environment = {
            **os.environ,
            **TEST_CREDENTIALS,
            "AGENTCORE_RL_CREDENTIALS": ":".join(CREDENTIAL),  # of the runtime: its key file is below their TMPDIR
            "TMPDIR": str(self.temporary),
            ADMIN_KEY_ENV: secrets.token_urlsafe(24),
        }

    # -- starting
    def _command(self, name: str, port: int, ready: Path) -> list[str]:
        ours = [sys.executable, "-m", "agentcore_rl_toolkit.cli"]
        parent = str(os.getpid())
        tail = ["--port", str(port), "--ready-file", str(ready), "--parent-pid", parent]
        if name == "model":
            return [sys.executable, str(HERE / "model.py"), str(port), str(ready), parent]
        if name == "gateway":
            upstream = self.processes["model"].info["url"]
            options = ["--engine", "vllm", "--upstream", upstream, "--store", str(self.folder / "gateway")]
            return [*ours, "gateway", "serve", *options, *tail]
        if name == "runtime":
            options = ["--agent", f"soak={HERE / 'agent.py'}", "--state-dir", str(self.state), "--isolation", self.tier]
            options += ["--set", "stop_grace=5", "--memory-mb", "512"]
            options += [
                "--set",
                "idle_timeout=20",
                "--writable",
                str(self.seen),
                "--store",
                str(self.folder / BUCKET),
                "--session-env",
                f"SEEN={self.seen}",
            ]
            return [*ours, "runtime", "serve", *options, *tail]
        settings = {
            "folder": str(self.folder),
            "runtime": self.processes["runtime"].info["url"],
            "arn": self.processes["runtime"].info["agents"]["soak"],
            "store": f"file://{self.folder / BUCKET}",
            "gateway": self.processes["gateway"].info["url"],
            "rollouts": self.rollouts,
            "step": self.step,
            "at_once": self.at_once,
        }
        path = self.folder / "trainer.json"
        path.write_text(json.dumps(settings))
        return [sys.executable, str(HERE / "trainer.py"), str(path)]

    async def start(self, name: str, *, within_s: float = 60.0) -> None:
        """Start a process, on the port it had. Raises: RuntimeError when it does not come up."""
        process = self.processes[name]
        ready = self.folder / f"{name}.ready"
        ready.unlink(missing_ok=True)
        with (self.folder / f"{name}.log").open("ab") as log:
            process.handle = await asyncio.to_thread(
                subprocess.Popen,
                self._command(name, process.port, ready),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
            )
        process.starts += 1
        if name == "trainer":
            return
        give_up_s = time.monotonic() + within_s
        while not ready.exists():
            if process.handle.poll() is not None:
                return  # killed again, or the disk is full: whoever keeps it starts it once more
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"{name} did not start within {within_s:g} s: {self.folder / f'{name}.log'}")
            await asyncio.sleep(0.02)
        process.info = json.loads(ready.read_text())
        process.port = int(process.info["url"].rpartition(":")[2])
        if name == "runtime":
            with contextlib.suppress(OSError, ValueError, KeyError):
                self.roots.add(json.loads((self.state / "server.json").read_text())["root"])

    async def keep(self, name: str) -> None:
        """Start a process again, a moment after it ended, as long as it is wanted."""
        process = self.processes[name]
        while process.wanted:
            handle = process.handle
            if handle is not None and handle.poll() is None:
                await asyncio.sleep(0.05)
                continue
            if name == "trainer" and handle is not None and handle.returncode == 0:
                return
            await asyncio.sleep(0.3)
            if process.wanted:
                await self.start(name)

    async def stop_all(self) -> None:
        for process in reversed(self.processes.values()):
            process.wanted = False
            if process.handle is not None and process.handle.poll() is None:
                process.handle.terminate()
                try:
                    await asyncio.to_thread(process.handle.wait, 40)
                except subprocess.TimeoutExpired:
                    print(f"  {process.name} did not end within 40 s of SIGTERM")
                    process.handle.kill()
                    await asyncio.to_thread(process.handle.wait)

    # -- looking
    def levels(self) -> list[list[int]]:
        """Processes below the runtime, by distance: the template's guardian, the template, sessions."""
        handle = self.processes["runtime"].handle
        if handle is None or handle.poll() is not None:
            return []
        tree = children()
        found, heads = [], [handle.pid]
        while heads := [child for head in heads for child in tree.get(head, [])]:
            found.append(heads)
        return found

    def pid_of(self, role: str) -> int | None:
        if role in self.processes:
            handle = self.processes[role].handle
            return handle.pid if handle is not None and handle.poll() is None else None
        levels = self.levels()
        if role == "guardian":  # the process above the template, which ends with it what it leaves
            return levels[0][0] if levels else None
        if role == "template":
            return levels[1][0] if len(levels) > 1 else None
        return levels[-1][-1] if len(levels) > 2 else None

    def measure(self) -> None:
        for role in (*SERVERS, "template", "trainer"):
            pid = self.pid_of(role)
            if pid is None:
                continue
            with contextlib.suppress(OSError, IndexError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                files = len(os.listdir(f"/proc/{pid}/fd"))
                rss_mb = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
                self.measures.setdefault(role, []).append(Measure(time.monotonic() - self.began_s, pid, rss_mb, files))

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of the present life of each process, with those of its children that ended; sessions are the template's."""
        found = {}
        for role in (*SERVERS, "template", "trainer"):
            pid = self.pid_of(role)
            with contextlib.suppress(OSError, IndexError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found[role] = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
                if role == "template":
                    found["sessions"] = sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")
        return found

    # -- what is left
    def left(self) -> dict[str, list[str]]:
        """Everything there should be nothing of, once all servers have ended."""
        shared = [self.temporary / f"agentcore-rl{name}-{os.getuid()}" for name in ("", "-keys")]
        sessions, marked = self.state / "sessions", str(self.folder)
        unfinished = [p for p in (self.folder / BUCKET).rglob("*") if p.is_file() and p.suffix not in KEPT]
        return {
            "processes": descendants(os.getpid()),
            "session folders": [str(p) for p in sessions.glob("*/*")],
            "temporary files": [str(p) for p in self.temporary.rglob("*") if p not in shared],
            "half-written objects": [str(p) for p in unfinished],
            "sockets": [line for line in Path("/proc/net/unix").read_text().splitlines() if marked in line],
            "mounts": [line for line in Path("/proc/self/mounts").read_text().splitlines() if marked in line],
        }


def children() -> dict[int, list[int]]:
    """Living processes by parent."""
    found: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    found.setdefault(int(fields[1]), []).append(int(entry.name))
    return found


def descendants(pid: int) -> list[str]:
    """Living processes below ``pid``: with it as subreaper, whatever was started by it or by what it started."""
    tree, found, heads = children(), [], [pid]
    while heads:
        for child in tree.get(heads.pop(), []):
            heads.append(child)
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{child} {command[:200]}")
    return found
