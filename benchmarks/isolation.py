"""CPU that each isolation tier adds to starting a session.

Workload: a template process that has imported asyncio, json and ssl forks sessions one after the other; each confines itself and
exits. CPU is user + system time of template and sessions together, per session; "fork only" is the floor that every session pays.
Not counted: what the kernel does later, in its own threads, to take a network namespace down.

Where a container engine is present, sessions in containers as well, through a whole runtime: see `containers`.

Run: python benchmarks/isolation.py [--quick] [--json FILE]      (as root, and as an ordinary user: namespaces work differently)
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import json
import os
import resource
import ssl
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.isolation import IsolationSpec, Limits, Tier, available_tiers, choose_tier
from agentcore_rl_toolkit.runtime.local import LocalRuntime

AGENT = """
import http.server, socketserver
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "21")
        self.end_headers()
        self.wfile.write(b'{"status": "Healthy"}')
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()
class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = allow_reuse_address = True
Server(("0.0.0.0", 8080), Handler).serve_forever()
"""
PRELOADED = (asyncio, json, ssl)


def cpu_s() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def forked(tier: Tier | None, spec: IsolationSpec) -> None:
    pid = os.fork() if tier is None else tier.fork(spec)
    if pid == 0:
        code = 1
        try:
            if tier is not None:
                tier.confine_child(spec)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the session ended with {status}"
    if tier is not None:
        tier.release(spec)


class Table:
    """Rows, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, cpu_ms: float, wall_ms: float) -> None:
        self.rows.append({"start": name, "cpu_ms": round(cpu_ms, 2), "wall_ms": round(wall_ms, 2)})
        print(f"| {name:46} | {cpu_ms:8.2f} | {wall_ms:8.2f} |", flush=True)

    def measure(self, name: str, n: int, one: Callable[[], None]) -> None:
        one()
        before, began = cpu_s(), time.monotonic()
        for _ in range(n):
            one()
        self.add(name, (cpu_s() - before) / n * 1000, (time.monotonic() - began) / n * 1000)

    def cpu_ms(self, name: str) -> float | None:
        return next((row["cpu_ms"] for row in self.rows if row["start"] == name), None)


def check(name: str, value: float, target: float) -> dict[str, Any]:
    """One target: at most so much."""
    return {"name": name, "value": round(value, 2), "target": f"<= {target:g}", "ok": value <= target}


def forks(table: Table, n: int) -> None:
    limits = Limits(memory_bytes=1 << 30, processes=200, cpus=1)
    here = {r.name for r in available_tiers() if r.available}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "sessions" / "one"
        folder.mkdir(parents=True)
        plain = IsolationSpec(session_dir=folder, name=f"bench-{os.getpid()}")
        gc.collect()
        gc.freeze()  # as the runtime's templates do
        table.measure("fork only", n, lambda: forked(None, plain))
        for name in ("namespaces", "landlock", "process"):
            if name not in here:
                continue
            tier = choose_tier(name)
            for label, changes in (
                ("", {}),
                (", limits", {"limits": limits}),
                (", own network", {"network": "loopback"}),
            ):
                spec = IsolationSpec(session_dir=folder, name=plain.name, **changes)
                if spec.network in tier.networks:
                    table.measure(f"forked, {name}{label}", n, functools.partial(forked, tier, spec))


def containers(table: Table, tier: str, n: int, idle_s: float) -> float:
    """Sessions of a small agent through a whole runtime, one after the other.

    The CPU is that of Podman's service with its helpers, where the runtime started one; the containers' own is not in it.
    Returns: percent of a core that the service takes for each session that does nothing.
    """
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "agent.py"
        script.write_text(AGENT)
        with LocalRuntime(
            {"idle": script}, ["--isolation", tier, "--init-timeout", "120", "--stop-grace", "0"]
        ) as runtime:
            service = service_of(runtime.pid)
            url = f"{runtime.url}/runtimes/{urllib.parse.quote(runtime.arns['idle'], safe='')}/invocations"
            before, began = process_cpu_s(service), time.monotonic()
            for number in range(n):
                headers = {"x-amzn-bedrock-agentcore-runtime-session-id": f"{number:040}"}
                request = urllib.request.Request(url, b"{}", headers, method="POST")
                urllib.request.urlopen(request, timeout=150).read()
            wall_ms = (time.monotonic() - began) / n * 1000
            table.add(f"container, {tier}", (process_cpu_s(service) - before) / n * 1000, wall_ms)
            before = process_cpu_s(service)
            time.sleep(idle_s)
            return (process_cpu_s(service) - before) / idle_s / n * 100


def service_of(pid: int) -> int | None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next((int(c) for c in children if b"podman" in Path(f"/proc/{c}/cmdline").read_bytes()), None)


def process_cpu_s(pid: int | None) -> float:
    """With the processes that it started and waited for."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="Write the rows, and a check per target, to this file.")
    arguments = parser.parse_args()
    n = 30 if arguments.quick else 200
    who = "root" if os.geteuid() == 0 else "an ordinary user"
    print(f"as {who}, Python {sys.version.split()[0]}, {n} sessions each")
    print(f"| {'start':46} | CPU ms   | wall ms  |\n|---|---|---|")
    table = Table()
    forks(table, n)
    here = {r.name for r in available_tiers() if r.available}
    checks = []
    if "docker" in here:
        idle = containers(table, "docker", 5 if arguments.quick else 20, 5.0 if arguments.quick else 20.0)
        print(f"\nthe engine's service takes {idle:.2f} % of a core for each idle container session")
        checks.append(check("engine's service per idle container session, % of a core", idle, 2.0))
    if "gvisor" in here and not arguments.quick:
        containers(table, "gvisor", 5, 1.0)
    floor, confined = table.cpu_ms("fork only"), table.cpu_ms("forked, namespaces")
    if floor is not None and confined is not None:
        checks.append(check("CPU that namespaces add to a fork, ms", confined - floor, 15.0))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"rows": table.rows, "checks": checks}, indent=1))


if __name__ == "__main__":
    import logging

    logging.disable(logging.WARNING)
    main()
