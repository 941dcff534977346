"""Write docs/metrics.md from the list in `agentcore_rl_toolkit.runs.step_metrics`."""

from __future__ import annotations

import argparse
from pathlib import Path

from agentcore_rl_toolkit.runs.step_metrics import STEP_METRICS, StepMetric

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
HEAD = """# Metrics

The training loop writes these numbers for each step and each evaluation. They have the same names in `metrics.jsonl`, in
[the view](view.md), and in the trackers, where `train/` or `eval/` stands before them. A number that is not known is left out or
`null`, never 0. The loop is the one of `agentcore-rl train`, Tinker and SageMaker; the other trainers log their own numbers, and
those that mean the same get the names of this page.

`reward` and `reward_ok` compare runs. `kl_sampler`, `clip_fraction` and `logprob_gap` say whether an update can be trusted.
`reward_spread_within` and the shares of groups say whether there was anything to learn.
[Troubleshooting](troubleshooting.md) has the next steps.

`python scripts/metrics_page.py` writes this page from the code.
"""


def page() -> str:
    """Return the whole page."""
    sections = []
    for heading, metrics in STEP_METRICS.items():
        rows = "\n".join(_row(metric) for metric in metrics)
        sections.append(f"\n## {heading}\n\n| name | value | what to watch |\n|---|---|---|\n{rows}\n")
    return HEAD + "".join(sections)


def _row(metric: StepMetric) -> str:
    only = " Evaluations only." if metric.of == "evaluated" else ""
    return f"| `{metric.name}` | {metric.formula}{only} | {metric.watch} |".replace("  |", " |")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())
