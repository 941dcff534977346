"""CPU that each isolation tier adds to starting a session, for sessions forked from a template and for exec'd ones.

Workload: a template process that has imported asyncio, json and ssl forks sessions one after the other; each confines itself and
exits. CPU is user + system time of template and sessions together, per session; "fork only" is the floor that every session pays.
Not counted: what the kernel does later, in its own threads, to take a network namespace down.

Run: python benchmarks/isolation.py [--quick]      (as root, and as an ordinary user: the namespaces tier works differently)
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from agentcore_rl_toolkit.runtime.isolation import IsolationSpec, Limits, Tier, available_tiers, choose_tier
from agentcore_rl_toolkit.runtime.isolation.tiers import TIERS

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


def executed(tier: Tier | None, spec: IsolationSpec) -> None:
    argv = ["/bin/true"] if tier is None else tier.wrap_argv(["/bin/true"], spec)
    subprocess.run(argv, env={"PATH": "/usr/bin:/bin"}, check=True, stderr=subprocess.DEVNULL)


def measure(name: str, n: int, one: Callable[[], None]) -> None:
    one()
    before, began = cpu_s(), time.monotonic()
    for _ in range(n):
        one()
    print(f"| {name:46} | {(cpu_s() - before) / n * 1000:8.2f} | {(time.monotonic() - began) / n * 1000:8.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    n = 30 if parser.parse_args().quick else 200
    limits = Limits(memory_bytes=1 << 30, processes=200, cpus=1)
    print(
        f"as {'root' if os.geteuid() == 0 else 'an ordinary user'}, Python {sys.version.split()[0]}, {n} sessions each"
    )
    print(f"| {'start':46} | CPU ms   | wall ms  |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "sessions" / "one"
        folder.mkdir(parents=True)
        plain = IsolationSpec(session_dir=folder, name=f"bench-{os.getpid()}")
        gc.collect()
        gc.freeze()  # as the runtime's templates do
        measure("fork only", n, lambda: forked(None, plain))
        for name in [
            r.name for r in available_tiers() if r.available and r.name in ("namespaces", "landlock", "process")
        ]:
            tier = choose_tier(name)
            for label, changes in (
                ("", {}),
                (", limits", {"limits": limits}),
                (", own network", {"network": "loopback"}),
            ):
                spec = IsolationSpec(session_dir=folder, name=plain.name, **changes)
                if spec.network in tier.networks:
                    measure(f"forked, {name}{label}", n, lambda tier=tier, spec=spec: forked(tier, spec))  # type: ignore[misc]
        measure("exec of /bin/true only", n, lambda: executed(None, plain))
        for name in [
            r.name for r in available_tiers() if r.available and r.name in ("namespaces", "landlock", "gvisor")
        ]:
            tier = TIERS[name]
            alone = IsolationSpec(
                session_dir=folder, name=plain.name, network="host" if "host" in tier.networks else "none"
            )
            measure(f"exec, {name}", n // 5, lambda tier=tier, spec=alone: executed(tier, spec))  # type: ignore[misc]


if __name__ == "__main__":
    import logging

    logging.disable(logging.WARNING)
    main()
