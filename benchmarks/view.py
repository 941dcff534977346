"""A run of 100,000 rollouts in the browser: first paint of its pages, filters and orders, and frames while its list is scrolled.

    python benchmarks/view.py            # 100,000 rollouts
    python benchmarks/view.py --quick    # 5,000
    python benchmarks/view.py --rollouts 100000 --keep runs/large   # only make the run, to look at it

Needs chromium and playwright. The run is made once and kept in build/ for the next time.

Frames are measured in the page, from one animation frame to the next, in two scrolls: like a wheel (90 pixels a frame) and like a
dragged bar (from the top to the end in 240 frames, every one of which shows rows that were not there before). The same count of
frames of an empty page stands beside: what the browser takes without any work of ours. Work of the page itself is what the
browser reports as long tasks: more than 50 ms without a chance to draw. Other programs make frames longer and never shorter,
so each scroll is done up to --passes times, and the pass with the shortest longest frame counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.runs import ROLLOUTS, Rollout, RunReader, RunWriter, TokenSequence, write_config

FIRST_PAINT_MS, FRAME_MS, ANSWER_MS = 1000.0, 50.0, 500.0
STEP, GROUP = 512, 8
FORMS = 200  # different dialogues and token sequences; all rollouts differ in their rows
CACHE = Path(__file__).resolve().parents[1] / "build" / "benchmarks"
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
SCROLL = """async ([way, frames]) => {
  const box = document.querySelector(".rows") ?? { scrollTop: 0, scrollHeight: 0, clientHeight: 0 }, times = [], tasks = [];
  const observer = new PerformanceObserver((list) => tasks.push(...list.getEntries().map((e) => e.duration)));
  observer.observe({ type: "longtask" });
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  for (let i = 0; i < 5; i++) await frame();
  let last = await frame();
  for (let i = 1; i <= frames; i++) {
    box.scrollTop = way === "wheel" ? box.scrollTop + 90 : (box.scrollHeight - box.clientHeight) * i / frames;
    const now = await frame();
    times.push(now - last);
    last = now;
  }
  await new Promise((done) => setTimeout(done, 100));
  observer.disconnect();
  return { times, tasks, shown: document.querySelectorAll(".rows .row").length };
}"""
WORDS = ("lamp", "shop", "price", "total", "count", "shelf", "order", "seven", "because", "therefore", "check", "sum")


def forms(rng: random.Random) -> list[Rollout]:
    """Rollouts whose parts stand for all: 1,000 characters of dialogue, 40 to 400 tokens."""
    made = []
    for n in range(FORMS):
        length = rng.randrange(40, 400)
        prompt = length // 2
        tokens = TokenSequence(
            ids=[rng.randrange(5000) for _ in range(length)],
            mask=[0] * prompt + [1] * (length - prompt),
            logprobs=[None] * prompt + [-rng.expovariate(2) for _ in range(length - prompt)],
            versions=[None] * prompt + [n] * (length - prompt),
            prompt_length=prompt,
        )
        call = {"function": {"name": rng.choice(["calculator", "search"]), "arguments": '{"q": "lamps"}'}}
        thought = " ".join(rng.choice(WORDS) for _ in range(160))
        dialogue = [
            {"role": "user", "content": f"Question {n}: how many lamps?"},
            {"role": "assistant", "content": thought, "tool_calls": [call]},
            {"role": "tool", "content": str(n)},
            {"role": "assistant", "content": f"There are {rng.randrange(1000)} lamps."},
        ]
        report = {"turns": 2, "sampled_tokens": length - prompt, "trained_tokens": length - prompt}
        made.append(
            Rollout(
                session_id=f"form-{n}",
                phase="train",
                group="forms",
                outcome="ok",
                dialogue=dialogue,
                sequences=[tokens],
                fidelity=report,
                stages={"queue": 0.1, "start": 0.05, "run": 3.0},
            )
        )
    return made


def generate(folder: Path, count: int) -> float:
    """Make a run: `FORMS` rollouts by the writer that every run has, all others as rows of them. Returns seconds of CPU."""
    rng, began_s = random.Random(0), time.process_time()
    with RunWriter(folder) as run:
        for form in forms(rng):
            run.rollout(form)
    write_config(folder, {"made by": "benchmarks/view.py", "rollouts": count})
    outcomes = [("ok", None)] * 17
    outcomes += [("agent_error", "agent"), ("agent_error", "policy"), ("timeout", "infrastructure")]
    with contextlib.closing(sqlite3.connect(folder / ROLLOUTS)) as database:
        columns = [row[1] for row in database.execute("PRAGMA table_info(rollouts)") if row[1] != "id"]
        rows = [
            dict(zip(columns, row, strict=True))
            for row in database.execute(f"SELECT {', '.join(columns)} FROM rollouts")
        ]
        parts = _by_rollout(database, "SELECT rollout, name, data FROM parts")
        tools = _by_rollout(database, "SELECT rollout, name, calls FROM tools")
        texts = _by_rollout(database, "SELECT rollout, text FROM texts")
        for table in ("rollouts", "parts", "tools", "texts"):
            database.execute(f"DELETE FROM {table}")
        into = f"INSERT INTO rollouts (id, {', '.join(columns)}) VALUES (?{', ?' * len(columns)})"
        for start in range(0, count, 5000):
            batch = []
            for n in range(start, min(start + 5000, count)):
                outcome, cause = rng.choice(outcomes)
                reward = float(rng.random() < 0.2 + 0.6 * n / count) if outcome == "ok" else None
                row = dict(rows[n % FORMS])
                row |= {
                    "session_id": f"{rng.getrandbits(128):032x}",
                    "step": n // STEP,
                    "grp": f"step-{n // STEP:04d}/{n // GROUP % (STEP // GROUP):04d}",
                    "input_key": f"{n // GROUP % 500:016x}",
                    "place": n % GROUP,
                    "outcome": outcome,
                    "cause": cause,
                    "mask_reason": None if outcome == "ok" else "outcome",
                    "reward": reward,
                    "score": reward if outcome == "ok" else None if cause == "infrastructure" else 0.0,
                    "advantage": None if reward is None else reward - 0.5,
                    "gap_max": rng.expovariate(100),
                    "elapsed_s": rng.random() * 30,
                    "ended_s": 1.7e9 + n / 10,
                }
                batch.append((n + 1, *row.values()))
            numbers = [row[0] for row in batch]
            form = [(i - 1) % FORMS + 1 for i in numbers]
            database.executemany(into, batch)
            many = "INSERT INTO parts (rollout, name, data) VALUES (?, ?, ?)"
            database.executemany(many, ((i, *part) for i, f in zip(numbers, form, strict=True) for part in parts[f]))
            database.executemany(
                "INSERT INTO tools VALUES (?, ?, ?)",
                ((i, *tool) for i, f in zip(numbers, form, strict=True) for tool in tools[f]),
            )
            database.executemany(
                "INSERT INTO texts VALUES (?, ?)",
                ((i, f"Input {(i - 1) // GROUP}. {texts[f][0][0]}") for i, f in zip(numbers, form, strict=True)),
            )
            database.commit()
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return time.process_time() - began_s


def _by_rollout(database: sqlite3.Connection, sql: str) -> dict[int, list[tuple[Any, ...]]]:
    found: dict[int, list[tuple[Any, ...]]] = {}
    for rollout, *rest in database.execute(sql):
        found.setdefault(rollout, []).append(tuple(rest))
    return found


def kept(count: int) -> Path:
    """The run of this size, made at the first call and again when the format or this file changed."""
    import hashlib

    from agentcore_rl_toolkit.runs import schema

    code = Path(__file__).read_bytes() + Path(schema.__file__).read_bytes()
    folder = CACHE / f"view-{count}-{hashlib.sha256(code).hexdigest()[:12]}"
    if not folder.is_dir():
        for old in CACHE.glob(f"view-{count}-*"):
            shutil.rmtree(old)
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            print(f"making {count} rollouts: {generate(Path(scratch) / 'run', count):.1f} s of CPU")
            (Path(scratch) / "run").rename(folder)
    return folder


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Address of `agentcore-rl view` on this run, in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        ready = Path(scratch) / "ready.json"
        command = [sys.executable, "-W", "ignore", "-m", "agentcore_rl_toolkit", "view", str(folder), "--no-open"]
        command += ["--ready-file", str(ready), "--parent-pid", str(os.getpid())]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            while not ready.exists():
                assert server.poll() is None
                time.sleep(0.05)
            try:
                yield json.loads(ready.read_text())["url"]
            finally:
                server.terminate()


QUESTIONS = {
    "all, newest first": "sort=id&descending=1",
    "sorted by reward": "sort=reward",
    "sorted by gap, largest first": "sort=gap_max&descending=1",
    "sorted by tokens": "sort=sampled_tokens",
    "one step, worst first": "step=7&phase=train&sort=reward",
    "outcome": "outcome=timeout",
    "cause, sorted by seconds": "outcome=cause:policy&sort=elapsed_s",
    "tool": "tool=search",
    "no tool": "tool=",
    "reward and length": "reward_to=0.5&tokens_from=150&sort=reward",
    "text, rare": "text=input+77.",
    "text, everywhere": "text=therefore+check",
    "text that nobody said": "text=no+such+words",
}


def answers(url: str, name: str) -> dict[str, float]:
    """Milliseconds of the server's answer to each filter and order, asked for the first time; and of later pages."""
    found: dict[str, float] = {}
    base, key = url.split("/?")
    where = f"{base}/api/runs/{name}"
    for what, words in QUESTIONS.items():
        found[f"answer: {what}"] = _asked_ms(f"{where}/rollouts?{words}&limit=100&{key}")
    middle = f"{where}/rollouts?sort=reward&offset={{}}&limit=100&{key}"
    found["answer: a later page"] = max(_asked_ms(middle.format(offset)) for offset in (1000, 50_000, 90_000))
    found["answer: the run"] = _asked_ms(f"{where}?{key}")
    return found


def _asked_ms(address: str) -> float:
    began_s = time.perf_counter()
    with urllib.request.urlopen(address, timeout=60) as reply:
        reply.read()
    return 1000 * (time.perf_counter() - began_s)


def measure(folder: Path, passes: int) -> dict[str, float]:
    """Milliseconds by what they are of."""
    from playwright.sync_api import sync_playwright

    found: dict[str, float] = {}
    with served(folder) as url, RunReader(folder) as run, sync_playwright() as driver:
        found |= answers(url, folder.name)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        try:
            page = browser.new_page(viewport={"width": 1300, "height": 900})
            page.goto(url)  # the browser's own start is not the page's
            page.wait_for_selector("#page[data-ready] h1")
            pages = {
                "run": "",
                "rollouts": "/rollouts?sort=reward",
                "search": "/rollouts?text=input+77",
                "rollout": f"/rollout/{run.count() // 2}",
                "group": f"/group/{run.count() // 2}",
            }
            paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
            for name, address in pages.items():
                times = []
                for _ in range(passes):
                    page.goto("about:blank")
                    began_s = time.perf_counter()
                    page.goto(f"{url}#/run/{folder.name}{address}")
                    page.wait_for_selector("#page[data-ready] h1")
                    times.append((page.evaluate(paint), 1000 * (time.perf_counter() - began_s)))
                painted = [p for p, _ in times if p is not None]
                if painted:
                    found[f"{name}: first paint"] = min(painted)
                found[f"{name}: content"] = min(c for _, c in times)
            for way in ("wheel", "bar"):
                scrolls, empty = [], []
                for _ in range(passes):
                    page.goto("about:blank")
                    empty.append(max(page.evaluate(SCROLL, ["wheel", 240])["times"]))
                    page.goto(f"{url}#/run/{folder.name}/rollouts?sort=reward")
                    page.wait_for_selector(".rows .row")
                    scrolls.append(page.evaluate(SCROLL, [way, 240]))
                    assert scrolls[-1]["shown"] > 0
                    if max(scrolls[-1]["times"]) <= FRAME_MS and not scrolls[-1]["tasks"]:
                        break
                best = min(scrolls, key=lambda s: max(s["times"]))
                times = sorted(best["times"])
                found[f"scroll, {way}: longest frame"] = times[-1]
                found[f"scroll, {way}: median frame"] = times[len(times) // 2]
                found[f"scroll, {way}: longest task"] = min(max(s["tasks"], default=0.0) for s in scrolls)
                found[f"scroll, {way}: longest frame of an empty page"] = max(empty)
        finally:
            browser.close()
    return found


def checked(measured: dict[str, float]) -> list[dict[str, Any]]:
    """What the figures have to hold."""
    limits = {
        "first paint": FIRST_PAINT_MS,
        "content": FIRST_PAINT_MS,
        "longest frame": FRAME_MS,
        "longest task": FRAME_MS,
    }
    found = []
    for name, value in measured.items():
        limit = ANSWER_MS if name.startswith("answer") else limits.get(name.rpartition(": ")[2])
        if limit is not None:
            found.append({"name": name, "value": value, "target": f"<= {limit:g}", "ok": value <= limit})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5,000 rollouts, one pass")
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--passes", type=int, default=5, help="how often a page is opened, and at most a list scrolled")
    parser.add_argument("--keep", type=Path, help="make the run here and measure nothing")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    count = 5000 if options.quick else options.rollouts
    if options.keep is not None:
        print(f"{options.keep}: {count} rollouts, {generate(options.keep, count):.0f} s of CPU")
        return
    if shutil.which("chromium") is None:
        sys.exit("chromium is needed: make packages")
    folder = kept(count)
    size_mb = sum(f.stat().st_size for f in folder.iterdir()) / 2**20
    measured = measure(folder, 2 if options.quick else options.passes)
    rows: list[dict[str, Any]] = [{"what": "file", "value": size_mb, "unit": "MB"}]
    rows += [{"what": name, "value": value, "unit": "ms"} for name, value in measured.items()]
    checks = checked(measured)
    print(f"{count} rollouts")
    for row in rows:
        print(f"{row['what']:<48}{row['value']:>10.1f} {row['unit']}")
    for check in checks:
        if not check["ok"]:
            print(f"MISSED  {check['name']}: {check['value']:.0f} ms, {check['target']}")
    print(f"{sum(c['ok'] for c in checks)} of {len(checks)} figures hold")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "checks": checks}))


if __name__ == "__main__":
    main()
