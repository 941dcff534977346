"""What sessions of the local runtime cost: start, memory, idleness, one warm call.

Workload: two agents, one on the bare SDK that does nothing ("simple") and one that makes a Strands agent and an OpenAI client per
call, as a model call of Strands does, which reads the CA certificates ("strands"). A session is started by its first invocation
and ended by a stop, over HTTP, as a client would. CPU is read from the kernel's scheduler statistics, so it nearly holds on a
busy machine; wall times do not. What is repeated (starts per second, warm calls) counts by its least disturbed round, because
neighbours' use of the caches shows in CPU too.

    python benchmarks/runtime.py [--quick] [--json FILE] [--isolation auto|process|none]

`--quick` takes less than 50 seconds; without it 1,000 sessions are held idle (10 GB of memory).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

HEAD = "from bedrock_agentcore.runtime import BedrockAgentCoreApp\n"
STRANDS = "import openai\nfrom strands import Agent, tool\nfrom strands.models.openai import OpenAIModel\n"
WORK = """arguments = {"api_key": "none", "base_url": "http://127.0.0.1:1/v1"}
    Agent(model=OpenAIModel(client_args=arguments, model_id="m"), callback_handler=None)
    async with openai.AsyncOpenAI(**arguments):  # Strands makes one per model call
        pass"""
BODY = """
app = BedrockAgentCoreApp()

@app.entrypoint
async def main(payload):
    WORK
    return {"ok": True}

if __name__ == "__main__":
    app.run()
"""
WARM_CALLERS = 8  # at the same time, each with a session of its own
TARGETS = {
    "forked start, CPU ms, simple": 50,
    "forked start, CPU ms, strands": 150,
    "sessions started per second, simple": 20,
    "memory of an idle session, MB, simple": 14,
    "idle CPU of 1,000 sessions, % of a core": 15,
    "one look at 1,000 sessions, server CPU ms": 100,
    "warm invoke, server CPU ms": 0.97,
}


class Runtime:
    """A runtime process with one agent."""

    def __init__(self, folder: Path, name: str, source: str, *options: str) -> None:
        agent = folder / f"{name}_agent.py"
        agent.write_text(source)
        ready = folder / f"{name}-{len(list(folder.iterdir()))}.json"
        command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "runtime", "serve", "--callers", "any"]
        self.process = subprocess.Popen(
            [*command, "--agent", f"{name}={agent}", "--ready-file", str(ready), *options], stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the runtime did not start")
            time.sleep(0.02)
        info = json.loads(ready.read_text())
        self.address = urlsplit(info["url"])
        self.path = f"/runtimes/{quote(info['agents'][name], safe='')}"
        self.isolation = info["isolation"]

    def local(self, what: str) -> Any:
        with urllib.request.urlopen(f"http://{self.address.netloc}/_local/{what}", timeout=30) as reply:
            return json.loads(reply.read())

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.address.netloc}/_local/metrics", timeout=30) as reply:
            return str(reply.read().decode())

    def template_pid(self) -> int:
        return int(self.local("status")["templates"][0]["pid"])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


class Caller:
    """One kept connection: the cheapest client that speaks enough HTTP."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    async def open(self) -> Caller:
        self.reader, self.writer = await asyncio.open_connection(
            self.runtime.address.hostname, self.runtime.address.port
        )
        return self

    async def post(self, operation: str, session_id: str) -> None:
        head = (
            f"POST {self.runtime.path}/{operation} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"x-amzn-bedrock-agentcore-runtime-session-id: {session_id}\r\ncontent-length: 2\r\n\r\n{{}}"
        )
        self.writer.write(head.encode())
        reply = await self.reader.readuntil(b"\r\n\r\n")
        status = int(reply.split(None, 2)[1])
        length = next(int(x[15:]) for x in reply.lower().split(b"\r\n") if x.startswith(b"content-length:"))
        body = await self.reader.readexactly(length)
        if status != 200:
            raise SystemExit(f"{operation} answered {status}: {body.decode()}")


def cpu_ms(pid: int) -> float:
    """CPU of all threads of a process so far."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    return total / 1e6


def private_mb(pid: int) -> float:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_")) / 1024


def session_id(number: int) -> str:
    return f"benchmark{number:031d}"


async def start_cost(runtime: Runtime, count: int) -> dict[str, float]:
    """Start, call once and stop sessions one after another."""
    caller = await Caller(runtime).open()
    await caller.post("invocations", session_id(0))  # the first one teaches the template what to import
    await asyncio.sleep(1.5)
    template, server = runtime.template_pid(), runtime.process.pid
    before = cpu_ms(template), cpu_ms(server)
    walls = []
    for number in range(1, count + 1):
        started = time.monotonic()
        await caller.post("invocations", session_id(number))
        walls.append(1e3 * (time.monotonic() - started))
    starts = [cpu_ms(s["pid"]) for s in runtime.local("sessions")["sessions"] if s["session_id"] != session_id(0)]
    template_ms = (cpu_ms(template) - before[0]) / count
    server_ms = (cpu_ms(server) - before[1]) / count
    for number in range(count + 1):
        await caller.post("stopruntimesession", session_id(number))
    await settled(runtime)
    lives = [s["cpu_s"] * 1e3 for s in runtime.local("sessions")["ended"]][-count:]
    return {
        "session_ms": statistics.median(starts) + template_ms,
        "server_ms": server_ms,
        "template_ms": template_ms,
        "life_ms": statistics.median(lives),
        "wall_ms": statistics.median(walls),
    }


async def settled(runtime: Runtime) -> None:
    """Wait until every session that ended is really gone."""
    for _ in range(600):
        ended = runtime.local("sessions")["ended"]
        if all(s.get("cpu_s") is not None for s in ended):
            return
        await asyncio.sleep(0.05)
    raise SystemExit("sessions did not end")


async def start_rate(runtime: Runtime, count: int, concurrency: int, first: int) -> float:
    """Sessions started, called once and stopped per second."""
    numbers = iter(range(first, first + count))

    async def worker() -> None:
        caller = await Caller(runtime).open()
        for number in numbers:
            await caller.post("invocations", session_id(number))
            await caller.post("stopruntimesession", session_id(number))

    started = time.monotonic()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return count / (time.monotonic() - started)


async def idle_cost(runtime: Runtime, count: int, seconds: float) -> tuple[float, float, float]:
    """Hold sessions. Returns median private MB of one; per 1,000 sessions, the CPU of all in percent of a core and the server's
    CPU ms for one look at all of them (`/_local/sessions` and `/_local/metrics`).
    """
    caller = await Caller(runtime).open()
    for number in range(20_000, 20_000 + count):
        await caller.post("invocations", session_id(number))
    await asyncio.sleep(25 if count >= 500 else 2)  # past the one ping that follows an invocation
    pids = [s["pid"] for s in runtime.local("sessions")["sessions"]]
    assert len(pids) >= count
    memory = statistics.median(private_mb(pid) for pid in pids)
    everything = [*pids, runtime.template_pid(), runtime.process.pid]
    before, started = sum(map(cpu_ms, everything)), time.monotonic()
    await asyncio.sleep(seconds)
    used_ms, wall_s = sum(map(cpu_ms, everything)) - before, time.monotonic() - started
    looks = []
    for _ in range(5):
        seen = cpu_ms(runtime.process.pid)
        runtime.local("sessions")
        assert f'_sessions{{state="idle"}} {len(pids)}' in runtime.metrics()
        looks.append(cpu_ms(runtime.process.pid) - seen)
    for number in range(20_000, 20_000 + count):
        await caller.post("stopruntimesession", session_id(number))
    await settled_count(runtime)
    return memory, used_ms / 10 / wall_s * 1_000 / len(pids), min(looks) * 1_000 / len(pids)


async def settled_count(runtime: Runtime) -> None:
    for _ in range(2_400):
        if not runtime.local("status")["sessions"] and not runtime.local("status")["templates"][0]["sessions"]:
            return
        await asyncio.sleep(0.05)
    raise SystemExit("sessions did not end")


async def warm_cost(runtime: Runtime, rounds: int, count: int, callers: int) -> tuple[float, float]:
    """CPU ms of the server and of the sessions for one call to a session that is there, in the least disturbed round."""
    names = [session_id(30_000 + 100 * callers + i) for i in range(callers)]
    connections = [await Caller(runtime).open() for _ in names]
    for caller, name in zip(connections, names, strict=True):
        await caller.post("invocations", name)
    pids = [s["pid"] for s in runtime.local("sessions")["sessions"] if s["session_id"] in names]

    async def calls(caller: Caller, name: str) -> None:
        for _ in range(count // callers):
            await caller.post("invocations", name)

    found = []
    for _ in range(rounds):
        before = cpu_ms(runtime.process.pid), sum(map(cpu_ms, pids))
        await asyncio.gather(*map(calls, connections, names))
        after = cpu_ms(runtime.process.pid), sum(map(cpu_ms, pids))
        found.append(((after[0] - before[0]) / count, (after[1] - before[1]) / count))
    for caller, name in zip(connections, names, strict=True):
        await caller.post("stopruntimesession", name)
    return min(found)


def measure(options: argparse.Namespace) -> dict[str, float | str]:
    """All numbers."""
    quick = options.quick
    extra = ("--isolation", options.isolation)
    out: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for agent, source in (
            ("simple", HEAD + BODY.replace("WORK", "pass")),
            ("strands", HEAD + STRANDS + BODY.replace("WORK", WORK)),
        ):
            for mode, label in (("exec", "cold"), ("fork", "forked")):
                count = (2 if label == "cold" else 8) if quick else (8 if label == "cold" else 60)
                runtime = Runtime(
                    folder, agent, source, "--set", f"start_mode={'exec' if mode == 'exec' else 'auto'}", *extra
                )
                try:
                    cost = asyncio.run(start_cost(runtime, count))
                    out["isolation"] = runtime.isolation
                    out[f"{label} start, CPU ms, {agent}"] = cost["session_ms"]
                    out[f"{label} start, wall ms, {agent}"] = cost["wall_ms"]
                    if label == "forked":
                        out[f"whole life with one call, CPU ms, {agent}"] = cost["life_ms"]
                        out[f"server's share of it, CPU ms, {agent}"] = cost["server_ms"]
                        rounds = range(10_000, 10_000 + (2 if quick else 5) * 1_000, 1_000)
                        rates = [asyncio.run(start_rate(runtime, 30 if quick else 100, 8, first)) for first in rounds]
                        out[f"sessions started per second, {agent}"] = max(rates)
                        by_cpu = (
                            1e3 * (os.cpu_count() or 1) / (cost["life_ms"] + cost["template_ms"] + cost["server_ms"])
                        )
                        out[f"the same if nothing else used the cores, {agent}"] = by_cpu
                        held = (30 if agent == "simple" else 8) if quick else (1_000 if agent == "simple" else 200)
                        memory, idle, look = asyncio.run(idle_cost(runtime, held, 4 if quick else 30))
                        out[f"memory of an idle session, MB, {agent}"] = memory
                        if agent == "simple":
                            out["idle CPU of 1,000 sessions, % of a core"] = idle
                            out["one look at 1,000 sessions, server CPU ms"] = look
                            lone = asyncio.run(warm_cost(runtime, 10 if quick else 50, 200, 1))
                            out["warm invoke, server CPU ms"], out["warm invoke, agent CPU ms"] = lone
                            busy = asyncio.run(warm_cost(runtime, 10 if quick else 50, 320, WARM_CALLERS))
                            out[f"the same with {WARM_CALLERS} callers at once"] = busy[0]
                finally:
                    runtime.close()
    return out


def check(numbers: dict[str, float | str]) -> list[dict[str, Any]]:
    """The targets, against what was measured."""
    checks = []
    for name, target in TARGETS.items():
        value = float(numbers[name])
        ok = value >= target if "per second" in name else value <= target
        checks.append({"name": name, "value": value, "target": target, "ok": ok})
    return checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sessions, less than 50 seconds")
    parser.add_argument("--json", type=Path, help="write rows and checks to this file")
    parser.add_argument("--isolation", default="auto")
    options = parser.parse_args()
    started = time.monotonic()
    numbers = measure(options)
    numbers["seconds taken"] = time.monotonic() - started
    checks = check(numbers)
    if options.json:
        rows = [{"what": name, "value": value} for name, value in numbers.items()]
        options.json.write_text(json.dumps({"quick": options.quick, "rows": rows, "checks": checks}, indent=2) + "\n")
    print(f"local runtime, isolation {numbers.pop('isolation')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'':<52}{'measured':>10}{'target':>10}")
    missed = {one["name"] for one in checks if not one["ok"]}
    for name, value in numbers.items():
        sign = ">=" if "per second" in name else "<="
        target = f"{sign} {TARGETS[name]:g}" if name in TARGETS else ""
        print(f"{name:<52}{value:>10.2f}{target:>10}{'  MISSED' if name in missed else ''}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
