# ruff: noqa: ASYNC110, ASYNC220  # other processes have files and states, no events; starting one takes a millisecond
"""Rollouts of the math agent through the whole local stack, twice: undisturbed, and with the runtime killed in the middle.

Workload: `examples/strands_math_agent` served by `agentcore-rl runtime serve`, a `file://` store, the model gateway and a
scripted model (one calculator call, then the answer), each server a process of its own; `RolloutClient` sends the rollouts. In
the second round the runtime gets SIGKILL when half of the rollouts are in, its processes are awaited, and it is started again on
the same port and state folder, while the client goes on. Then everything is ended and what is left is counted: processes (every
orphan becomes a child of this one), session folders, sockets, temporary files, mounts. Linux only.

    python benchmarks/rollouts.py [--quick] [--rollouts N] [--json FILE]

`--quick` sends 75 rollouts a round, otherwise 1,000.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.client import Deadlines, RolloutClient, WatchSettings
from agentcore_rl_toolkit.client.testing import TEST_CREDENTIALS
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.gateway.config import ADMIN_KEY_ENV
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine, Seen
from agentcore_rl_toolkit.store import open_store

AGENT = Path(__file__).parents[1] / "examples" / "strands_math_agent" / "arithmetic_app.py"
BUCKET = "rollouts"
ADMIN_KEY = secrets.token_urlsafe(16)  # its file would lie in the services' own temporary folder
MODEL_CALLS = 2  # of one rollout
PR_SET_CHILD_SUBREAPER = 36


class MathModel(ScriptedEngine):
    """Asks the calculator for the problem in the first user message, and then says what it answered."""

    def _sample(self, seen: Seen, chat: bool) -> list[dict[str, Any]]:
        messages = seen.body["messages"]
        last = messages[-1]
        if last["role"] == "tool":
            self.replies.append({"content": f"The answer is {text_of(last)}"})
        else:
            arguments = json.dumps({"expression": text_of(last)})
            call = {"id": f"c{len(self.requests)}", "type": "function"}
            self.replies.append({"tool_calls": [{**call, "function": {"name": "calculator", "arguments": arguments}}]})
        return super()._sample(seen, chat)


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(block.get("text", "") for block in content)


class Stack:
    """The servers of one round, and everything they may leave behind. ``folder`` holds all of their files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "t"  # short: sockets live below it
        self.temporary.mkdir()
        self.state = folder / "state"
        self.environment = {**os.environ, **TEST_CREDENTIALS, "TMPDIR": str(self.temporary), ADMIN_KEY_ENV: ADMIN_KEY}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.roots: list[str] = []

    async def start(self, name: str, *command: str) -> dict[str, Any]:
        ready = self.folder / f"{name}.json"
        ready.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "agentcore_rl_toolkit.cli", *command, "--ready-file", str(ready)]
        with (self.folder / f"{name}.log").open("ab") as output:
            process = self.processes[name] = subprocess.Popen(
                [*argv, "--parent-pid", str(os.getpid())],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
            )
        deadline = time.monotonic() + 120
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} did not start:\n{(self.folder / f'{name}.log').read_text()}")
            await asyncio.sleep(0.02)
        answer: dict[str, Any] = json.loads(ready.read_text())
        return answer

    async def start_runtime(self, port: int = 0) -> dict[str, Any]:
        options = ["--port", str(port), "--state-dir", str(self.state), "--store", str(self.folder / BUCKET)]
        limits = ["--memory-mb", "1024", "--stop-grace", "5"]
        info = await self.start("runtime", "runtime", "serve", "--agent", f"math={AGENT}", *options, *limits)
        self.roots.append(json.loads((self.state / "server.json").read_text())["root"])
        return info

    async def stop_all(self) -> None:
        for process in reversed(self.processes.values()):
            if process.poll() is None:
                process.terminate()
            await asyncio.to_thread(process.wait, 60)

    # -- what is left
    def left(self) -> dict[str, list[str]]:
        """Everything there should be nothing of, once all servers have ended."""
        temporary = [str(p) for p in self.temporary.rglob("*") if p != self.temporary / f"agentcore-rl-{os.getuid()}"]
        sessions = self.state / "sessions"
        marked = str(self.folder)
        return {
            "processes": descendants(os.getpid()),
            "session folders": [str(p) for p in sessions.glob("*/*")],
            "temporary files": temporary,
            "sockets": [line for line in Path("/proc/net/unix").read_text().splitlines() if marked in line],
            "mounts": [line for line in Path("/proc/self/mounts").read_text().splitlines() if marked in line],
        }


def descendants(pid: int) -> list[str]:
    """Living processes below ``pid``: with it as subreaper, whatever was started by it or by what it started."""
    parents: dict[int, list[tuple[int, str]]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = Path(entry.path, "stat").read_text()
                fields = stat.rsplit(")", 1)[1].split()
                if fields[0] not in "ZX":
                    command = Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    parents.setdefault(int(fields[1]), []).append((int(entry.name), command[:200]))
    found, heads = [], [pid]
    while heads:
        for child, command in parents.get(heads.pop(), []):
            found.append(f"{child} {command}")
            heads.append(child)
    return found


async def alone(stack: Stack) -> float:
    """Wait until the runtime's processes have followed it. Returns how many seconds that took; 30: some have not."""
    others = {str(p.pid) for name, p in stack.processes.items() if name != "runtime"}
    started = time.monotonic()
    while (waited := time.monotonic() - started) < 30 and any(
        one.split()[0] not in others for one in descendants(os.getpid())
    ):
        await asyncio.sleep(0.02)
    return waited


def problems(count: int) -> list[dict[str, Any]]:
    made = []
    for n in range(count):
        a, b, c = 3 + n % 89, 2 + n % 17, n
        made.append({"prompt": f"{a} * {b} + {c}", "answer": str(a * b + c)})
    return made


def session_state(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/_local/sessions", timeout=30) as reply:
        answer: dict[str, Any] = json.loads(reply.read())
    return answer


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def one_round(name: str, count: int, at_once: int, *, kill: bool, folder: Path) -> dict[str, Any]:
    """Start the stack, send the rollouts, end the stack, count."""
    stack = Stack(folder)
    async with MathModel(token_s=0.005) as model:
        try:
            gateway_info = await stack.start(
                "gateway", "gateway", "serve", "--engine", "vllm", "--upstream", model.url, "--store", str(folder / "g")
            )
            info = await stack.start_runtime()
            found = await rollouts(stack, model, gateway_info["url"], info, name, count, at_once, kill=kill)
        finally:
            await stack.stop_all()
    for _ in range(100):  # what was told to end may take a moment; what is left after ten seconds is left
        left = stack.left()
        if not any(left.values()):
            break
        await asyncio.sleep(0.1)
    for what, items in left.items():
        for item in items[:5]:
            print(f"  left of {name}: {what}: {item}")
    return {**found, **{what: len(items) for what, items in left.items()}}


async def rollouts(
    stack: Stack,
    model: ScriptedEngine,
    gateway_url: str,
    info: dict[str, Any],
    name: str,
    count: int,
    at_once: int,
    *,
    kill: bool,
) -> dict[str, Any]:
    arn, url = info["agents"]["math"], info["url"]
    gateway = GatewayClient(gateway_url, admin_key=ADMIN_KEY)
    opened: dict[str, str] = {}

    async def prepare(session_id: str, attempt: int) -> dict[str, Any]:
        [session] = await gateway.create_sessions_async([session_id])
        opened[session_id] = session.base_url
        return {"base_url": session.base_url, "api_key": session.api_key, "model_id": "scripted"}

    started = time.monotonic()
    fds_before = open_files(info["pid"])
    bucket = f"file://{stack.folder / BUCKET}"
    store = open_store(bucket)
    client = RolloutClient(
        arn,
        bucket,
        name,
        endpoint_url=url,
        tps_limit=200,
        model_id="scripted",
        on_failure="retry",
        retries=5,
        max_retry_attempts=30,  # tries against a runtime that is not there: until it is up again
        watch=WatchSettings(heartbeat_s=1.0, lost_after_s=8.0, store=store),
        deadlines=Deadlines(start_s=60, confirm_s=5, run_s=120, stop_s=30),
    )
    items: list[Any] = []
    killed_sessions = 0
    orphans_s = 0.0
    restart: asyncio.Task[dict[str, Any]] | None = None
    ids = [f"problem-{n}" for n in range(count)]
    batch = client.run_batch_async(problems(count), at_once, input_ids=ids, prepare=prepare, log_interval=0)
    async for item in batch:
        items.append(item)
        if kill and restart is None and len(items) >= count // 2:
            killed_sessions = len(await asyncio.to_thread(lambda: session_state(url)["sessions"]))
            stack.processes["runtime"].send_signal(signal.SIGKILL)
            await asyncio.to_thread(stack.processes["runtime"].wait)
            orphans_s = await alone(stack)
            restart = asyncio.create_task(stack.start_runtime(int(url.rpartition(":")[2])))
    wall_s = time.monotonic() - started
    if restart is not None:
        info = await restart
    client_stats = client.stats
    await client.aclose()
    deadline = time.monotonic() + 30
    while (live := (await asyncio.to_thread(session_state, url))["sessions"]) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    for session in live[:5]:
        print(f"  left of {name}: session {session}")
    fds_after = open_files(info["pid"])
    if kill:
        fds_before = fds_after  # of another process: nothing to compare with

    outcomes = Counter(str(item.outcome) for item in items)
    keys = {o.key for o in await asyncio.to_thread(lambda: list(store.list(f"{name}/")))}
    records = {key for key in keys if key.endswith(".json")}
    claimed = {f"{name}/{item.input_id}/{item.session_id}.json" for item in items if item.success}
    captures = await gateway.fetch_async([item.session_id for item in items if item.success])
    whole = [
        c
        for c in captures.values()
        if len(c.turns) == MODEL_CALLS and not c.errors and all(t.trainable for t in c.turns)
    ]
    await gateway.delete_async(list(opened))
    await gateway.aclose()
    return {
        "round": name,
        "kill": kill,
        "rollouts": count,
        "seconds": wall_s,
        "per_s": count / wall_s,
        "outcomes": dict(outcomes),
        "ok": outcomes.get("ok", 0),
        "without outcome": count - len({item.index for item in items}),
        "wrong reward": sum(item.result is None or item.result.get("rewards") != 1.0 for item in items),
        "ok without record": len(claimed - records),
        "ok without its turns": outcomes.get("ok", 0) - len(whole),
        "model calls": len(model.calls),
        "signs of life left in the store": sum(key.endswith(".alive") for key in keys),
        "sessions used": len(opened),
        "retried": client_stats.get("retried", 0),
        "killed with the runtime": killed_sessions,
        "orphans gone after the kill, s": orphans_s,
        "sessions at the runtime": len(live),
        "descriptors grown": max(0, fds_after - fds_before),
    }


def check(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One check per promise: nothing lost, nothing left."""
    checks: list[dict[str, Any]] = []
    for row in rows:

        def add(name: str, value: float, target: float, ok: bool, row: dict[str, Any] = row) -> None:
            checks.append({"name": f"{row['round']}: {name}", "value": value, "target": target, "ok": ok})

        add("rollouts that ended ok", row["ok"], row["rollouts"], row["ok"] == row["rollouts"])
        for name in ("without outcome", "wrong reward", "ok without record", "ok without its turns"):
            add(f"rollouts {name}", row[name], 0, row[name] == 0)
        add("sessions left at the runtime", row["sessions at the runtime"], 0, row["sessions at the runtime"] == 0)
        for name in ("processes", "session folders", "temporary files", "sockets", "mounts"):
            add(f"{name} left", row[name], 0, row[name] == 0)
        if row["kill"]:
            killed, seconds = row["killed with the runtime"], row["orphans gone after the kill, s"]
            add("sessions killed with it, at least", killed, 1, killed >= 1)
            add("seconds until the killed runtime's processes are gone", seconds, 5, seconds <= 5)
        else:  # a few connections may still be kept by callers
            add("descriptors the runtime keeps", row["descriptors grown"], 40, row["descriptors grown"] <= 40)
    return checks


async def main_async(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    count = options.rollouts or (75 if options.quick else 1_000)
    for name, kill in (("undisturbed", False), ("runtime killed", True)):
        folder = Path(tempfile.mkdtemp(prefix="rollouts-", dir="/tmp"))
        try:
            rows.append(await one_round(re.sub(" ", "-", name), count, options.at_once, kill=kill, folder=folder))
        finally:
            if options.keep:
                print(f"files of {name}: {folder}")
            else:
                shutil.rmtree(folder, ignore_errors=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="75 rollouts a round, less than 50 seconds")
    parser.add_argument("--rollouts", type=int, help="rollouts a round")
    parser.add_argument("--at-once", type=int, default=16, help="rollouts in flight")
    parser.add_argument("--json", type=Path, help="write rows and checks to this file")
    parser.add_argument("--keep", action="store_true", help="keep the servers' files and logs")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ.update(TEST_CREDENTIALS)
    rows = asyncio.run(main_async(options))
    for row in rows:
        print(
            f"{row['round']}: {row['rollouts']} rollouts in {row['seconds']:.1f} s ({row['per_s']:.1f}/s), "
            f"{', '.join(f'{n} {k}' for k, n in row['outcomes'].items())}; {row['sessions used']} sessions, "
            f"{row['killed with the runtime']} killed with the runtime; {row['model calls']} model calls"
        )
    checks = check(rows)
    for one in checks:
        print(f"{'ok  ' if one['ok'] else 'FAIL'} {one['name']}: {one['value']:g} (target {one['target']:g})")
    if options.json:
        options.json.write_text(json.dumps({"quick": options.quick, "rows": rows, "checks": checks}, indent=2) + "\n")
    sys.exit(0 if all(one["ok"] for one in checks) else 1)


if __name__ == "__main__":
    main()
