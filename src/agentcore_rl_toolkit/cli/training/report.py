"""The files of a run besides its rollouts: `metrics.jsonl`, `summary.json`."""

from __future__ import annotations

import json
import random
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...contract import Cause
from ...runs import Query, RunReader, diagnose
from ...runs.diagnosis import Finding
from ...runs.folder import ROLLOUTS, SUMMARY, append_event, read_metrics
from ...stats.differences import change_of

# Held-out numbers as (name in a summary, name in an event, default): the mean over all inputs, with failures of agent and policy
# as 0, its 95 % interval, the mean over those that ended ok, and the number of rollouts.
HELD_OUT = (
    ("reward", "reward", None),
    ("interval", "reward_interval", None),
    ("scored", "scored", 0),
    ("reward_ok", "reward_ok", None),
    ("ok", "ok", 0),
    ("metrics", "metrics", None),
)


class Report:
    """Appends events, and reads them back from the files: a resumed run continues with them."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def add(self, event: str, facts: dict[str, Any]) -> None:
        """Append one `step` or `evaluated` event."""
        append_event(self.run_dir, event, facts)

    def summarize(self, *, exp_id: str, config: dict[str, Any], held_out: int, wall_s: float) -> dict[str, Any]:
        """Write and return `summary.json`. A share of nothing is None, not 0 or 1."""
        events = read_metrics(self.run_dir)
        steps = [e for e in events if e["event"] == "step"]
        evaluated = {e["when"]: e for e in events if e["event"] == "evaluated"}
        counts: dict[str, Counter[str]] = {"outcomes": Counter(), "causes": Counter(), "policy_failures": Counter()}
        for e in [*steps, *evaluated.values()]:
            for name, counter in counts.items():
                counter.update(e.get(name, {}))
        gaps = [e["logprob_gap"] for e in steps if e["logprob_gap"] is not None]
        sides = {when: evaluated.get(when, {}) for when in ("before", "after")}
        pairs = [(before["score"], after["score"]) for before, after in self._held_out()]
        kinds = ("sampled_tokens", "usable_tokens", "gradient_tokens")
        summary = {
            "exp_id": exp_id,
            # Steps that could teach something: the rewards differed in at least one group.
            "steps_that_taught": sum(bool(e.get("groups_that_differ")) for e in steps),
            **{
                f"held_out_{name}_{when}": sides[when].get(known, absent)
                for name, known, absent in HELD_OUT
                for when in sides
            },
            "held_out_problems": held_out,
            "held_out_change": change_of(pairs) if held_out else None,
            # All evaluations, by the version of the weights (the weights after k steps are version k).
            "held_out_rewards": {e["version"]: e["reward"] for e in evaluated.values() if "version" in e},
            **{f"tool_use_{when}": side.get("tool_use") for when, side in sides.items()},
            "steps": len(steps),
            "rollouts": counts["outcomes"].total(),
            "lost_rollouts": counts["causes"][Cause.INFRASTRUCTURE],
            **{name: dict(counter) for name, counter in counts.items()},
            **{name: sum(e[name] for e in steps) for name in kinds},
            "forked_rollout_branches": sum(e["branches"] for e in steps),
            "logprob_gap_max": max(gaps) if gaps else None,
            "wall_s": round(wall_s, 1),
            "config": config,
            "version": version("agentcore-rl-toolkit"),
        }
        (self.run_dir / SUMMARY).write_text(json.dumps(summary, indent=2, default=str) + "\n")
        return summary

    def _held_out(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the rollouts before and after of the held-out rows that have a score both times."""
        if not (self.run_dir / ROLLOUTS).exists():
            return []
        with RunReader(self.run_dir) as run:
            before, after = (
                {row["grp"].removeprefix(f"{when}/"): row for row in run.rollouts(Query(phase=when), limit=run.count())}
                for when in ("before", "after")
            )
        both = [(before[name], after[name]) for name in sorted(before.keys() & after.keys())]
        return [sides for sides in both if None not in (sides[0]["score"], sides[1]["score"])]

    def example(self, seed: int) -> list[tuple[str, dict[str, Any]]]:
        """Return the rollouts before and after of a random held-out row whose score changed; empty if none did."""
        changed = [sides for sides in self._held_out() if sides[0]["score"] != sides[1]["score"]]
        if not changed:
            return []
        sides = zip(("before", "after"), random.Random(seed).choice(changed), strict=True)
        with RunReader(self.run_dir) as run:
            return [(when, run.rollout(side["id"]) or {}) for when, side in sides]

    def findings(self) -> list[Finding]:
        """Return why the run does not learn. Raises: ConfigError when its rollouts cannot be read."""
        with RunReader(self.run_dir) as run:
            return diagnose(run)
