"""The display of a run: an aligned table, and in a terminal a progress bar below it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ...backends.training.settings import StepSettings
from ...client.evaluation import metrics_line
from ...contract import Cause
from ...errors import AgentCoreRLError
from ...runs.diagnosis import Finding
from ..output.failures import Failure, explain
from ..output.terminal import visible

SHOWN_REWARDS = 64  # latest rollouts for the recent reward
HEADER_EVERY = 20  # rows of the table
LOOK_S = 10.0  # limit of the last diagnosis at the end
PROGRESS_S = 30.0  # pause between two lines in a file or pipe
FIRST = 18  # characters of a row's name, such as "held out, step-100"
# Name, characters, and the least width of a terminal with this column. A file has all columns.
COLUMNS = (
    *(
        ("reward", 12, 80),
        ("usable", 7, 80),
        ("differ", 6, 80),
        ("gradient", 9, 80),
        ("seconds", 10, 80),
        ("eta", 6, 80),
    ),
    *(("of ok", 12, 120), ("tool use", 8, 120), ("failed", 14, 120), ("gap", 6, 160), ("behind", 6, 160)),
    *(("tokens/s", 13, 160), ("memory", 8, 160), ("metrics", 0, 160)),
)


def share(value: float | None) -> str:
    """Format a reward or a share in percent. A reward outside 0 to 1 stays as it is."""
    if value is None:
        return "-"
    return f"{100 * value:.0f} %" if 0 <= value <= 1 else f"{value:.3g}"


def failures(causes: Mapping[str, int]) -> str:
    """Return how many rollouts failed for each cause, without causes that have none."""
    names = {Cause.INFRASTRUCTURE: "lost", Cause.AGENT: "agent", Cause.POLICY: "policy", Cause.SCORER: "scorer"}
    return ", ".join(f"{causes[cause]} {name}" for cause, name in names.items() if causes.get(cause))


def token_counts(facts: Mapping[str, Any]) -> str:
    """Describe how many tokens were sampled, how many of these were usable, and how many got a gradient."""
    parts = [f"{facts['sampled_tokens']:,} tokens sampled"]
    for name, kind in (("usable_tokens", "usable"), ("gradient_tokens", "with gradient")):
        count, of = facts.get(name), facts["sampled_tokens"]
        parts.append(f"- {kind}" if count is None else f"{count:,} {kind}" + (f" ({count / of:.0%})" if of else ""))
    return ", ".join(parts)


def share_of(value: float | None, n: int) -> str:
    """Format a share, and its total."""
    return "-" if value is None else f"{share(value)} of {n}"


def rollouts_of(plan: StepSettings, held_out: int) -> int:
    """Return the number of rollouts of a run, with those of its evaluations."""
    evaluations = 2 + ((plan.steps - 1) // plan.eval_every if plan.eval_every else 0)
    return evaluations * held_out + plan.steps * plan.groups * plan.rollouts


class Display:
    """Takes the events of the training loop and shows them.

    ``findings`` returns reasons why the run does not learn. A thread calls it after each step and evaluation.
    """

    def __init__(
        self, console: Console, total_rollouts: int, findings: Callable[[], Sequence[Finding]] = lambda: ()
    ) -> None:
        self._console, self._total, self._findings_of = console, total_rollouts, findings
        self._done_before = self._done = self._tokens = self._lost = self._rows = 0
        self._started = self._printed_s = time.monotonic()
        self._rewards: deque[float] = deque(maxlen=SHOWN_REWARDS)
        self._ended: list[Failure | None] = []  # the reasons of failures since the last row
        self._explained: set[str] = set()
        self._looking: threading.Thread | None = None
        width = console.width if console.is_terminal else max(least for *_, least in COLUMNS)
        self._columns = [(name, size) for name, size, least in COLUMNS if least <= max(width, 80)]
        shown = (TextColumn("{task.description}"), BarColumn(bar_width=16), MofNCompleteColumn())
        state = TextColumn("{task.fields[state]}", style="dim")
        self._bar = Progress(*shown, state, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("starting", total=1, state="")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._looking is not None:
            self._looking.join(LOOK_S)
        self._bar.stop()

    def observe(self, event: str, facts: dict[str, Any]) -> None:
        """Show an event of the training loop."""
        match event:
            case "begins":  # the time estimate uses only the rollouts that are new in a resumed run
                self._done = self._done_before = facts["rollouts_done"]
            case "rollouts_started":
                self._rewards.clear()
                self._bar.reset(self._task, description=facts["phase"], total=facts["total"])
            case "rollout":
                rollout = facts["rollout"]
                tokens = rollout.trajectory.report.sampled_tokens if rollout.trajectory is not None else 0
                failed = rollout.cause not in (None, Cause.POLICY)
                failure = Failure.of(rollout.outcome, rollout.reason, rollout.traceback) if failed else None
                self.rollout(rollout.cause, rollout.score, tokens, failure)
            case "step":
                self.step(facts)
            case "evaluated":
                self.evaluated(facts)

    def rollout(self, cause: str | None, score: float | None, tokens: int, failure: Failure | None = None) -> None:
        """Count a rollout that has ended. ``failure`` is the reason, except for failures of the policy."""
        self._ended.append(failure)
        self._done += 1
        self._tokens += tokens
        self._lost += cause == Cause.INFRASTRUCTURE
        if score is not None:
            self._rewards.append(score)
        reward = sum(self._rewards) / len(self._rewards) if self._rewards else None
        lost = f"   lost {self._lost}" if self._lost else ""
        state = f"recent reward {share(reward)}   tokens {self._tokens:,}{lost}   eta {self._eta()}"
        self._bar.update(self._task, advance=1, state=state)
        if not self._console.is_terminal and time.monotonic() - self._printed_s > PROGRESS_S:
            self._print(f"{self._done} of {self._total} rollouts, {state}")

    def step(self, facts: dict[str, Any]) -> None:
        gap, rates, memory = facts["logprob_gap"], facts.get("sampled_tokens_per_s"), facts.get("peak_memory_gb")
        gradient, behind = facts.get("gradient_tokens"), facts.get("staleness_mean")
        groups = facts.get("groups")
        self._row(
            f"step {facts['step'] + 1}",
            facts,
            reward=share(facts["reward"]),
            usable="" if facts.get("usable") is None else f"{facts['usable']}/{facts['rollouts']}",
            differ=f"{facts['groups_that_differ']}" + (f"/{groups}" if groups else ""),
            gradient="" if gradient is None else f"{gradient:,}",
            seconds=f"{facts['rollout_s']:.1f}+{facts['train_s']:.1f}",
            gap="" if gap is None else f"{gap:.0e}",
            behind=f"{behind:.1f}" if behind else "",
            memory="" if memory is None else f"{memory:.1f} GB",
            **{"of ok": share(facts["reward_ok"]), "tool use": share(facts["tool_use"])},
            **{"tokens/s": "" if rates is None else f"{rates:.0f}+{facts['computed_tokens_per_s']:.0f}"},
        )

    def evaluated(self, facts: dict[str, Any]) -> None:
        self._row(
            f"held out, {facts['when']}",
            facts,
            reward=share_of(facts["reward"], facts["scored"]),
            **{"of ok": share_of(facts["reward_ok"], facts["ok"]), "tool use": share(facts["tool_use"])},
        )

    def _row(self, name: str, facts: Mapping[str, Any], **cells: str) -> None:
        """Print a line of the table. The last cell, the agent's metrics, has no fixed width."""
        cells |= {"failed": failures(facts["causes"]), "metrics": visible(metrics_line(facts["metrics"]))}
        rows = [{"": name, "eta": self._eta(), **cells}]
        if self._rows % HEADER_EVERY == 0:
            rows.insert(0, {column: column for column, _ in self._columns})
        self._rows += 1
        for row in rows:
            shown = [row.get(column, "").rjust(size) for column, size in self._columns]
            self._print("  ".join([row.get("", "").ljust(FIRST), *shown]).rstrip())
        self._explain()
        self._look()

    def _print(self, line: str) -> None:
        self._printed_s = time.monotonic()
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _explain(self) -> None:
        """Print why rollouts failed since the last call, each reason once."""
        failures = [failure for failure in self._ended if failure is not None]
        text = explain(failures, len(self._ended)) if failures else ""
        self._ended.clear()
        explanation = text.partition("; ")[2].partition(": ")[2]
        if text and explanation not in self._explained:
            self._explained.add(explanation)
            self._print(f"note: {visible(text)}")

    def _look(self) -> None:
        """Start a diagnosis, unless the last one is still running, and print each finding once."""

        def look() -> None:
            with contextlib.suppress(AgentCoreRLError, OSError):  # a run that cannot be read must not end
                for finding in self._findings_of():
                    if finding.name not in self._explained:
                        self._explained.add(finding.name)
                        self._print(f"! {visible(finding.text)}\n  {finding.advice}")

        if self._looking is None or not self._looking.is_alive():
            self._looking = threading.Thread(target=look, name="agentcore-rl-diagnosis", daemon=True)
            self._looking.start()

    def _eta(self) -> str:
        fresh = self._done - self._done_before
        if not fresh:
            return "?"
        left = (self._total - self._done) * (time.monotonic() - self._started) / fresh
        return f"{int(left // 60)}:{int(left % 60):02d}"
