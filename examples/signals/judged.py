"""Train the agent of the quickstart with its coded reward, and with only a judge: `python examples/signals/judged.py`.

The judge is `judge_server.py`, which is right for about 90 % of the answers. The coded reward on held-out inputs measures both,
and runs with the judge never train on it. The exit code is 1 if the mean of the judge is more than 0.05 below that of the code.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from judge_server import right_mostly, server

HERE = Path(__file__).parent
MOST_APART = 0.05


def quickstart(out: Path, seed: int, *settings: str) -> list[dict]:
    """Train, and return the events of the run."""
    words = [sys.executable, "-m", "agentcore_rl_toolkit", "quickstart", "--steps", "12", "--out", str(out)]
    words += ["--set", f"seed={seed}", *(word for setting in settings for word in ("--set", setting))]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--right", type=float, default=0.9, help="share of the answers that the judge is right about [%(default)s]"
    )
    parser.add_argument("--by", nargs="+", choices=["code", "judge"], default=["code", "judge"], help="[both]")
    parser.add_argument("--out", type=Path, default=Path("runs/judged"), help="[%(default)s]")
    given = parser.parse_args()
    found: dict[str, list[float]] = {"code": [], "judge": []}
    print("reward by  seed  before  after  judge's calls  tokens read  seconds", flush=True)
    for seed in given.seeds:
        judge = server(right_mostly(given.right, seed))
        threading.Thread(target=judge.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{judge.server_port}/v1"
        by_judge = (f"judge={HERE / 'rubric.md'}", f"judge_url={url}", "judge_model=scripted")
        for name in given.by:
            settings = by_judge if name == "judge" else ()
            began_s = time.monotonic()
            events = quickstart(given.out / f"{name}-{seed}", seed, *settings)
            after, before = (
                next(e["metrics"].get("agent_reward", e["reward"]) for e in events if e.get("when") == when)
                for when in ("after", "before")
            )
            found[name].append(after)
            usage = [e.get("judge") or {} for e in events]
            calls, read = (sum(u.get(what, 0) for u in usage) for what in ("calls", "prompt_tokens"))
            took_s = time.monotonic() - began_s
            print(f"{name:<9}{seed:>6}{before:>8.3f}{after:>7.3f}{calls:>15}{read:>13}{took_s:>9.0f}", flush=True)
        judge.shutdown()
    means = {name: statistics.fmean(values) for name, values in found.items() if values}
    print(f"mean of {len(given.seeds)} seeds: {', '.join(f'{name} {mean:.3f}' for name, mean in means.items())}")
    return int(len(means) == 2 and means["code"] - means["judge"] > MOST_APART)


if __name__ == "__main__":
    sys.exit(main())
