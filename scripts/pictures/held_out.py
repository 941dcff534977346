"""Draw the held-out reward of a run with its intervals: `python scripts/pictures/held_out.py RUN OUT.svg`.

The points are the evaluations in the run's `metrics.jsonl`, and the bars their 95 % intervals. The thin line is the reward of
each step's training rollouts, which is another quantity: these rollouts were trained on.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from xml.sax.saxutils import escape

from agentcore_rl_toolkit.runs.folder import read_metrics

WIDTH, HEIGHT = 480, 330
LEFT, RIGHT, TOP, BOTTOM = 48, 456, 60, 280  # of the area with the points


def picture(run: Path) -> str:
    """Return the SVG of a run's folder."""
    events = read_metrics(run)
    held_out = [e for e in events if e["event"] == "evaluated"]
    steps = [e for e in events if e["event"] == "step" and e["reward"] is not None]
    last = max(e["version"] for e in held_out)

    def x(version: float) -> float:
        return LEFT + (RIGHT - LEFT) * version / last

    def y(reward: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * reward

    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<path class="grid" d="M{LEFT} {y(share):.1f}H{RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{share:g}</text>')
    for e in held_out:
        parts.append(
            f'<text class="tick" x="{x(e["version"]):.1f}" y="{BOTTOM + 20}" text-anchor="middle">{e["version"]}</text>'
        )
    middle = (LEFT + RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{BOTTOM + 40}" text-anchor="middle">training steps</text>')
    # The reward of a step is that of the policy before the step's update.
    points = " ".join(f"{x(e['step']):.1f},{y(e['reward']):.1f}" for e in steps)
    parts.append(f'<polyline class="train" points="{points}"/>')
    points = " ".join(f"{x(e['version']):.1f},{y(e['reward']):.1f}" for e in held_out)
    parts.append(f'<polyline class="line" points="{points}"/>')
    for e in held_out:
        low, high = e["reward_interval"]
        at = f"{x(e['version']):.1f}"
        parts.append(f'<path class="bar" d="M{at} {y(low):.1f}V{y(high):.1f}"/>')
        parts.append(f'<circle class="dot" cx="{at}" cy="{y(e["reward"]):.1f}" r="4"/>')
    first, final = held_out[0], held_out[-1]
    title = f"Reward on {final['scored']} problems that are never trained on"
    words = f"before {first['reward']:.2f}, after {final['reward']:.2f}; bars are 95 % intervals"
    legend = y(0.12)
    parts.append(f'<path class="line" d="M{RIGHT - 250} {legend - 22:.1f}h22"/>')
    parts.append(f'<circle class="dot" cx="{RIGHT - 239}" cy="{legend - 22:.1f}" r="4"/>')
    parts.append(f'<text x="{RIGHT - 220}" y="{legend - 17.5:.1f}">held-out problems</text>')
    parts.append(f'<path class="train" d="M{RIGHT - 250} {legend:.1f}h22"/>')
    parts.append(f'<text x="{RIGHT - 220}" y="{legend + 4.5:.1f}">rollouts that the step trains on</text>')
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">
<title>{escape(title)}: {escape(words)}</title>
<style>
svg{{--page:#ffffff;--text:#1f2328;--faint:#59636e;--grid:#d1d9e0;--line:#0969da;--train:#bc4c00}}
@media (prefers-color-scheme:dark){{
svg{{--page:#0d1117;--text:#f0f6fc;--faint:#9198a1;--grid:#3d444d;--line:#58a6ff;--train:#f0883e}}}}
text{{font:14px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:var(--text)}}
.head{{font-size:16px;font-weight:600}}
.tick{{font-size:13px;fill:var(--faint)}}
.page{{fill:var(--page);stroke:var(--grid)}}
.grid{{stroke:var(--grid);fill:none}}
.line{{stroke:var(--line);stroke-width:2;fill:none}}
.bar{{stroke:var(--line);stroke-width:1.5;fill:none}}
.dot{{fill:var(--line)}}
.train{{stroke:var(--train);stroke-width:1.5;stroke-dasharray:4 3;fill:none}}
</style>
<rect class="page" x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>
<text class="head" x="16" y="26">{escape(title)}</text>
<text class="tick" x="16" y="45">{escape(words)}</text>
{chr(10).join(parts)}
</svg>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a run with held-out rows")
    parser.add_argument("out", type=Path, help="where the picture goes")
    options = parser.parse_args()
    options.out.write_text(picture(options.run))


if __name__ == "__main__":
    main()
