"""The view of a large run and of many runs: seconds of each page's data, CPU of an idle page, memory of the command line.

Workload: one run of 50,000 rollouts of 6 turns with 8 KB of text each (500 steps of 100), and 500 runs of 64 rollouts.
`--quick` makes 2,000 rollouts and 60 runs. A real `agentcore-rl view` serves them. Prints each number with its target, and exits
with 1 if one is missed (not with `--quick`). `--folder` keeps the runs for the next time.

    python benchmarks/view.py [--quick] [--folder DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import http.cookiejar
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from agentcore_rl_toolkit.runs import Rollout, RunWriter, TokenSequence

TURNS, CHARACTERS, GROUP, STEP = 6, 8000, 10, 100
NEEDLES = 50  # rollouts with a word that the others lack
PROGRAM = [sys.executable, "-W", "ignore", "-m", "agentcore_rl_toolkit.cli"]
IDLE_S = 12.0


def write(folder: Path, rollouts: int, words: list[str], *, turns: int, characters: int) -> None:
    """Write a run whose writer gets as many rollouts as it takes."""
    rng = random.Random(folder.name)
    with RunWriter(folder) as run:
        for n in range(rollouts):
            text = " ".join(rng.choices(words, k=characters // 8))
            if n % max(1, rollouts // NEEDLES) == 0:
                text = f"{text[: len(text) // 2]} rare-needle {text[len(text) // 2 :]}"
            size = len(text) // turns
            dialogue: list[dict[str, Any]] = []
            calls = []
            for turn in range(turns):
                call = {"function": {"name": ("search", "read")[turn % 2], "arguments": "{}"}}
                dialogue += [
                    {"role": "assistant", "content": text[turn * size : (turn + 1) * size], "tool_calls": [call]}
                ]
                dialogue += [{"role": "tool", "content": "found"}]
                times = {"started_s": n + turn, "finished_s": n + turn + 0.5, "first_token_s": None}
                calls.append({"turn_id": f"{n}-{turn}", "finish_reason": "stop", "parse_status": "parsed", **times})
            reward = float(rng.random() < 0.4)
            tokens = TokenSequence(ids=range(n % 50, n % 50 + 200), mask=[0] * 100 + [1] * 100, logprobs=[-0.5] * 200)
            run.rollout(
                Rollout(
                    session_id=f"{folder.name}-{n}",
                    phase="train",
                    step=n // STEP,
                    group=str(n // GROUP),
                    input_key=str(n // GROUP % 400),
                    place=n % GROUP,
                    outcome="ok",
                    reward=reward,
                    score=reward,
                    dialogue=dialogue,
                    calls=calls,
                    sequences=[tokens],
                    stages={"run": 6.0},
                    elapsed_s=6.0,
                    ended_s=float(n + 6),
                    fidelity={"turns": turns, "sampled_tokens": 100, "trained_tokens": 100},
                )
            )
            if n % 1000 == 999:
                assert run.flush(3600)
            if n % STEP == STEP - 1:
                run.event("step", {"step": n // STEP, "reward": 0.4, "loss": 0.1, "entropy": 1.0, "kl_sampler": 0.001})
    assert run.lost == 0
    (folder / "summary.json").write_text("{}")


@contextlib.contextmanager
def served(work: Path) -> Iterator[tuple[Any, psutil.Process]]:
    """A function that gets a path of the view of a folder, and the view's process."""
    ready = work / "ready.json"
    ready.unlink(missing_ok=True)
    process = subprocess.Popen([*PROGRAM, "view", "--no-open", "--ready-file", str(ready)], cwd=work, stdout=-3)
    try:
        while not ready.exists():
            time.sleep(0.05)
        url = urllib.parse.urlsplit(json.loads(ready.read_text())["url"])
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
        opener.open(url.geturl()).read()
        yield lambda path: opener.open(f"{url.scheme}://{url.netloc}/{path}", timeout=120), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def timed(get: Any, path: str) -> float:
    began = time.perf_counter()
    get(path).read()
    return time.perf_counter() - began


def idle(get: Any, process: psutil.Process, path: str, every_s: float) -> float:
    """The share of a core that the view takes while a page looks for changes and nothing is written."""
    get(path).read()
    before, began_s = process.cpu_times(), time.monotonic()
    while time.monotonic() - began_s < IDLE_S:
        time.sleep(every_s)
        get(path).read()
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / (time.monotonic() - began_s)


def peak_mb(work: Path, *words: str) -> float:
    """The most memory of a command."""
    process = subprocess.Popen([*PROGRAM, *words], cwd=work, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, words
    return usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path, help="write rows and checks to this file")
    options = parser.parse_args()
    rollouts, runs = (2_000, 60) if options.quick else (50_000, 500)
    with contextlib.ExitStack() as exits:
        work = options.folder or Path(exits.enter_context(tempfile.TemporaryDirectory()))
        rows: list[tuple[str, float, float | None, str]] = []
        rng = random.Random(0)
        words = ["".join(rng.choices("abcdefghijklmnoprstuvw", k=rng.randint(3, 11))) for _ in range(20_000)]
        large, many = work / "large", work / "many"
        if not (large / "runs" / "one" / "summary.json").exists():
            began = time.perf_counter()
            write(large / "runs" / "one", rollouts, words, turns=TURNS, characters=CHARACTERS)
            each = (time.perf_counter() - began) / rollouts * 1000
            size = (large / "runs" / "one" / "rollouts.sqlite").stat().st_size / rollouts / 1024
            rows += [("writing a rollout", each, None, "ms"), ("size of a rollout", size, None, "KB")]
        for n in range(runs):
            if not (many / "runs" / f"run-{n}" / "summary.json").exists():
                write(many / "runs" / f"run-{n}", 64, words, turns=1, characters=200)
        with served(large) as (get, process):
            rows.append((f"first screen, {rollouts:,} rollouts", timed(get, "api/runs/one"), 0.6, "s"))
            sorted_ = "api/runs/one/rollouts?phase=train&sort=reward&descending=1&limit=100"
            rows.append(("list, sorted", min(timed(get, sorted_) for _ in range(3)), 0.05, "s"))
            rows.append(("list of a step", min(timed(get, f"{sorted_}&number=7") for _ in range(3)), 0.05, "s"))
            for name, text in (("a rare word", "rare-needle"), ("a frequent word", words[0]), ("two characters", "qu")):
                path = f"api/runs/one/rollouts?text={text}&limit=100"
                rows.append((f"search of the whole text, {name}", timed(get, path), 0.5, "s"))
            rows.append(
                ("idle page of a run", idle(get, process, "api/version?run=one", 1.0) * 100, 2.0, "% of a core")
            )
        with served(many) as (get, process):
            rows.append((f"list of {runs} runs", timed(get, "api/runs"), 1.0, "s"))
            rows.append(("list of runs again", timed(get, "api/runs"), 1.0, "s"))
            rows.append(("idle list of runs", idle(get, process, "api/version?run=", 5.0) * 100, 2.0, "% of a core"))
        rows.append(
            ("runs show train --json, all rollouts", peak_mb(large, "runs", "show", "train", "--json"), 150.0, "MB")
        )
        export = ("runs", "export", "--min-reward", "1", "--force")
        rows.append(("runs export", peak_mb(large, *export), 150.0, "MB"))
    checks = []
    for name, value, target, unit in rows:
        print(f"{name:44}{value:10.3f} {unit:12}{'' if target is None else f' target {target:g}'}".rstrip())
        if target is not None:
            checks.append({"name": f"{name}, {unit}", "value": value, "target": target, "ok": value <= target})
    missed = [check["name"] for check in checks if not check["ok"]]
    if missed:
        print("MISSED:", *missed, sep="\n  ")
    if options.json:
        table = [{"name": name, "value": value, "unit": unit} for name, value, _, unit in rows]
        options.json.write_text(json.dumps({"rows": table, "checks": checks}, indent=2) + "\n")
    if missed and not options.quick:
        sys.exit(1)


if __name__ == "__main__":
    main()
