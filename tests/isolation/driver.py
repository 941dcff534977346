"""A minimal launcher for the tests: forks sessions through a tier, runs a piece of code in each, tells what came of them.

Run by path in any interpreter; one JSON order on stdin, one JSON answer on stdout. A session's code calls ``say(value)`` once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def package(root: str) -> tuple[Any, Any]:
    spec = importlib.util.spec_from_file_location("boot", os.path.join(root, "isolation", "boot.py"))
    boot: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(boot)  # type: ignore[union-attr]
    return boot.load("isolation.tiers"), boot.load("isolation.spec")


def run_session(order: dict[str, Any], tier: Any, spec: Any, out: int, known: dict[str, Any]) -> None:
    """In the forked child. Never returns."""
    code = 1
    try:
        tier.confine_child(spec)
        entries: list[Any] = []

        def say(value: Any) -> None:
            entries.append(value)
            os.write(out, json.dumps(value).encode() + b"\n")

        exec(compile(order["code"], "<session>", "exec"), {"say": say, "out": out, **known})
        code = 0 if entries else 5
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 6
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def spec_of(spec_module: Any, values: dict[str, Any]) -> Any:
    for name in ("cwd", "relay"):
        values[name] = None if values[name] is None else Path(values[name])
    values["system"] = None if values["system"] is None else tuple(map(Path, values["system"]))
    values["endpoints"] = tuple(values["endpoints"])
    values["limits"] = spec_module.Limits(**values["limits"])
    return spec_module.IsolationSpec(**values)


def main() -> None:
    order = json.load(sys.stdin)
    tiers, spec_module = package(order["root"])
    tier = tiers.TIERS[order["tier"]]
    answers: list[dict[str, Any]] = []
    running: list[tuple[int, Any]] = []
    known: dict[str, Any] = {"DRIVER_PID": os.getpid()}
    for session in order["sessions"]:
        spec = spec_of(spec_module, session["spec"])
        if session.get("env") is not None:
            object.__setattr__(spec, "env", session["env"])
        read, write = os.pipe()
        before = resource.getrusage(resource.RUSAGE_CHILDREN), time.process_time()
        if session.get("into") is not None:
            pid = tier.fork_into(running[session["into"]][0], spec)
            if pid == 0:
                try:
                    os.write(write, json.dumps(eval(session["code"])).encode() + b"\n")
                finally:
                    os._exit(0)
        else:
            pid = os.fork() if session.get("plain_fork") else tier.fork(spec)
            if pid == 0:
                run_session(session, tier, spec, write, known)
        os.close(write)
        running.append((pid, spec))
        answer: dict[str, Any] = {"pid": pid, "reported": None, "alive_after": None}
        answers.append(answer)
        data = b""
        deadline = time.monotonic() + session.get("timeout_s", 120)
        while not data.endswith(b"\n") and select.select([read], [], [], max(0, deadline - time.monotonic()))[0]:
            piece = os.read(read, 65536)
            if not piece:
                break
            data += piece
        answer["reported"] = json.loads(data) if data.strip() else None
        known["OTHER_PID"] = pid
        known["OTHER_DIR"] = str(spec.session_dir)
        if not session.get("stays"):
            answer["status"] = wait(pid, session.get("timeout_s", 120))
        del before
    for (pid, spec), answer in zip(running, answers, strict=True):
        if "status" not in answer:
            done, status = os.waitpid(pid, os.WNOHANG)
            answer["alive_after"] = done == 0
            if done == 0:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
            answer["status"] = os.waitstatus_to_exitcode(status)
        tier.release(spec)
    json.dump(answers, sys.stdout)


def wait(pid: int, limit_s: float) -> int | str:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "killed by the driver"


if __name__ == "__main__":
    main()
