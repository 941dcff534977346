"""A run of 100,000 rollouts in the browser: first paint of its pages, and the frames while its list is scrolled.

    python benchmarks/view.py            # 100,000 rollouts
    python benchmarks/view.py --quick    # 5,000
    python benchmarks/view.py --rollouts 100000 --keep runs/large   # only make the run, to look at it

Needs chromium and playwright. Frames are measured in the page, from one animation frame to the next, while the list is moved
from its top to its end in 240 steps: every one shows rows that were not there before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.runs import Rollout, RunReader, RunWriter, TokenSequence

FIRST_PAINT_S, FRAME_MS = 1.0, 50.0
STEP, GROUP = 512, 8
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
SCROLL = """async () => {
  const box = document.querySelector(".rows"), times = [];
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  let last = await frame();
  for (let i = 1; i <= 240; i++) {
    box.scrollTop = (box.scrollHeight - box.clientHeight) * i / 240;
    const now = await frame();
    times.push(now - last);
    last = now;
  }
  return times;
}"""


def generate(folder: Path, count: int) -> float:
    """Make a run. Returns the seconds of CPU that it took."""
    rng, began_s = random.Random(0), time.process_time()
    outcomes = [("ok", None)] * 17 + [
        ("agent_error", "agent"),
        ("agent_error", "policy"),
        ("timeout", "infrastructure"),
    ]
    with RunWriter(folder) as run:
        for n in range(count):
            outcome, cause = rng.choice(outcomes)
            length = rng.randrange(40, 400)
            prompt = length // 2
            tokens = TokenSequence(
                ids=[rng.randrange(5000) for _ in range(length)],
                mask=[0] * prompt + [1] * (length - prompt),
                logprobs=[None] * prompt + [-rng.expovariate(2) for _ in range(length - prompt)],
                versions=[None] * prompt + [n // STEP] * (length - prompt),
                prompt_length=prompt,
            )
            call = {"function": {"name": rng.choice(["calculator", "search"]), "arguments": '{"q": "lamps"}'}}
            dialogue = [
                {"role": "user", "content": f"Question {n // GROUP}: how many lamps?"},
                {"role": "assistant", "tool_calls": [call]},
                {"role": "assistant", "content": f"There are {rng.randrange(1000)} lamps."},
            ]
            reward = float(rng.random() < 0.2 + 0.6 * n / count) if outcome == "ok" else None
            run.rollout(
                Rollout(
                    session_id=f"{rng.getrandbits(128):032x}",
                    phase="train",
                    step=n // STEP,
                    group=f"step-{n // STEP:04d}/{n // GROUP % (STEP // GROUP):04d}",
                    input_key=f"{n // GROUP % 500:016x}",
                    place=n % GROUP,
                    outcome=outcome,
                    cause=cause,
                    mask_reason=None if outcome == "ok" else "outcome",
                    reward=reward,
                    score=reward if outcome == "ok" else None if cause == "infrastructure" else 0.0,
                    dialogue=dialogue,
                    sequences=[tokens],
                    fidelity={"turns": 2, "sampled_tokens": length - prompt, "trained_tokens": length - prompt},
                    elapsed_s=rng.random() * 30,
                )
            )
            if n % 1000 == 999:
                run.flush()
    return time.process_time() - began_s


def measure(folder: Path) -> dict[str, float]:
    """Milliseconds: first paint and content of pages, and the longest frame of a scroll through the list."""
    from playwright.sync_api import sync_playwright

    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch, RunReader(folder) as run:
        ready = Path(scratch) / "ready.json"
        command = [sys.executable, "-W", "ignore", "-m", "agentcore_rl_toolkit", "view", str(folder), "--no-open"]
        command += ["--ready-file", str(ready), "--parent-pid", str(os.getpid())]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server, sync_playwright() as driver:
            while not ready.exists():
                assert server.poll() is None
                time.sleep(0.05)
            url = json.loads(ready.read_text())["url"]
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
            try:
                page = browser.new_page(viewport={"width": 1300, "height": 900})
                pages = {
                    "run": "",
                    "rollouts": "/rollouts?sort=reward",
                    "search": "/rollouts?text=question+77",
                    "rollout": f"/rollout/{run.count() // 2}",
                }
                for name, address in pages.items():
                    page.goto("about:blank")
                    began_s = time.perf_counter()
                    page.goto(f"{url}/#/run/{folder.name}{address}")
                    page.wait_for_selector("#page[data-ready] h1")
                    found[f"{name}: content"] = 1000 * (time.perf_counter() - began_s)
                    paint = page.evaluate(
                        "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
                    )
                    if paint is not None:
                        found[f"{name}: first paint"] = paint
                page.goto("about:blank")
                page.goto(f"{url}/#/run/{folder.name}/rollouts?sort=reward")
                page.wait_for_selector(".rows .row")
                times = sorted(page.evaluate(SCROLL))
                found["scroll: longest frame"], found["scroll: median frame"] = times[-1], times[len(times) // 2]
            finally:
                browser.close()
                server.terminate()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5,000 rollouts")
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--keep", type=Path, help="make the run here and measure nothing")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    count = 5000 if options.quick else options.rollouts
    if options.keep is not None:
        print(f"{options.keep}: {count} rollouts, {generate(options.keep, count):.0f} s of CPU")
        return
    if shutil.which("chromium") is None:
        sys.exit("chromium is needed: make packages")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "large"
        cpu_s = generate(folder, count)
        size_mb = sum(f.stat().st_size for f in folder.iterdir()) / 2**20
        rows.append({"what": "write: CPU a rollout", "value": 1000 * cpu_s / count, "unit": "ms"})
        rows.append({"what": "write: file", "value": size_mb, "unit": "MB"})
        measured = measure(folder)
    rows += [{"what": name, "value": value, "unit": "ms"} for name, value in measured.items()]
    checks = [
        {"name": name, "value": value, "target": f"<= {limit}", "ok": value <= limit}
        for name, limit in [(n, 1000 * FIRST_PAINT_S) for n in measured if "paint" in n or "content" in n]
        + [("scroll: longest frame", FRAME_MS)]
        for value in [measured[name]]
    ]
    print(f"{count} rollouts")
    for row in rows:
        print(f"{row['what']:<28}{row['value']:>10.1f} {row['unit']}")
    for check in checks:
        print(f"{'ok' if check['ok'] else 'MISSED':<8}{check['name']} {check['target']} ms")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "checks": checks}))


if __name__ == "__main__":
    main()
