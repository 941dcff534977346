"""The display of a run: a live panel in a terminal, an aligned table elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from ...client.evaluation import metrics_line
from ...contract import Cause
from ..output.failures import Failure, explain
from ..output.terminal import visible

SHOWN_STEPS = 16
NOTHING_TO_LEARN = (
    "note: in step {step} no group had different rewards, so nothing was learned from it. The rollouts of an input "
    "are compared with each other: give part of the reward for part of the work, more --rollouts, or a model that succeeds at "
    "times."
)
NOTHING_USABLE = "note: in step {step} no rollout could be used, so nothing was learned from it."
SHOWN_REWARDS = 64  # of the rollouts that ended last
COLUMNS = (
    *("reward", "of ok", "tool use", "tokens", "lost", "agent errors", "policy failed", "logprob gap"),
    *("versions behind", "wait + train s", "tokens/s", "memory", "metrics"),
)
HEADER_EVERY = 20  # rows of the table in a file or pipe
WIDTHS = {"": 16, "reward": 11, "of ok": 11, "tokens": 8, "tokens/s": 11}  # if wider than the name


def share(value: float | None) -> str:
    """A reward or a share in percent. A reward beyond 0 to 1 is shown as it is."""
    if value is None:
        return "-"
    return f"{100 * value:.0f} %" if 0 <= value <= 1 else f"{value:.3g}"


def failures(causes: Mapping[str, int]) -> tuple[str, str, str]:
    """How many rollouts the infrastructure, the agent's own code and the policy failed."""
    infrastructure, agent, policy = (str(causes.get(c, 0)) for c in (Cause.INFRASTRUCTURE, Cause.AGENT, Cause.POLICY))
    return infrastructure, agent, policy


def token_counts(facts: Mapping[str, Any]) -> str:
    """Describe how many tokens were sampled, how many of these were usable, and how many got a gradient."""
    parts = [f"{facts['sampled_tokens']:,} tokens sampled"]
    for name, kind in (("usable_tokens", "usable"), ("gradient_tokens", "with gradient")):
        count, of = facts.get(name), facts["sampled_tokens"]
        parts.append(f"- {kind}" if count is None else f"{count:,} {kind}" + (f" ({count / of:.0%})" if of else ""))
    return ", ".join(parts)


def share_of(value: float | None, n: int) -> str:
    """A share, and of how many."""
    return "-" if value is None else f"{share(value)} of {n}"


class Display:
    """Takes the events of the training loop and keeps the picture up to date."""

    def __init__(self, console: Console, total_rollouts: int) -> None:
        self._console = console
        self._total = total_rollouts
        self._done_before = 0
        self._done = 0
        self._started = time.monotonic()
        self._tokens = 0
        self._lost = 0
        self._to_come = 0
        self._rewards: deque[float] = deque(maxlen=SHOWN_REWARDS)
        self._rows: list[tuple[str, ...]] = []
        self._ended = 0  # with `_failures`: since the last row
        self._failures: list[Failure] = []
        self._explained: set[str] = set()
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=40), MofNCompleteColumn(), console=console
        )
        self._task = self._bar.add_task("starting", total=1)
        self._live = Live(console=console, refresh_per_second=4, transient=False, get_renderable=self._render)

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def resumed(self, rollouts_done: int) -> None:
        """Count the rollouts of the earlier part of the run as done; the time estimate uses only the new ones."""
        self._done = self._done_before = rollouts_done

    def rollouts_started(self, phase: str, total: int) -> None:
        self._to_come = total
        self._rewards.clear()
        self._bar.reset(self._task, description=phase, total=total)

    def rollout(self, cause: str | None, score: float | None, tokens: int, failure: Failure | None = None) -> None:
        """One has ended. ``failure``: why agent or infrastructure failed it."""
        self._ended += 1
        self._failures += [failure] if failure is not None else []
        self._done += 1
        self._tokens += tokens
        self._lost += cause == Cause.INFRASTRUCTURE
        self._to_come -= 1
        if score is not None:
            self._rewards.append(score)
        self._bar.advance(self._task)

    def step(self, facts: dict[str, Any]) -> None:
        gap, rates, memory = facts["logprob_gap"], facts.get("sampled_tokens_per_s"), facts.get("peak_memory_gb")
        self._row(
            f"step {facts['step'] + 1}",
            share(facts["reward"]),
            share(facts["reward_ok"]),
            share(facts["tool_use"]),
            str(facts["sampled_tokens"]),
            *failures(facts["causes"]),
            "-" if gap is None else f"{gap:.0e}",
            "-" if facts.get("staleness_mean") is None else f"{facts['staleness_mean']:.1f}",
            f"{facts['rollout_s']:.1f} + {facts['train_s']:.1f}",
            "-" if rates is None else f"{rates:.0f} + {facts['trained_tokens_per_s']:.0f}",
            "-" if memory is None else f"{memory:.1f} GB",
            escape(visible(metrics_line(facts["metrics"]))),
        )
        self._explain()
        unusable = facts["reward"] is None or facts.get("usable") == 0
        note = NOTHING_USABLE if unusable else NOTHING_TO_LEARN
        if facts["groups_that_differ"] == 0 and note not in self._explained:
            self._explained.add(note)
            self._console.print(note.format(step=facts["step"] + 1), highlight=False, soft_wrap=True)

    def evaluated(self, facts: dict[str, Any]) -> None:
        self._row(
            f"held out, {facts['when']}",
            share_of(facts["reward"], facts["scored"]),
            share_of(facts["reward_ok"], facts["ok"]),
            share(facts["tool_use"]),
            "-",
            *failures(facts["causes"]),
            *["-"] * 5,
            escape(visible(metrics_line(facts["metrics"]))),
        )
        self._explain()

    def _explain(self) -> None:
        """Say why rollouts failed since the last time, each reason once."""
        failures, ended, self._failures, self._ended = self._failures, self._ended, [], 0
        text = explain(failures, ended) if failures else ""
        explanation = text.partition("; ")[2].partition(": ")[2]
        if text and explanation not in self._explained:
            self._explained.add(explanation)
            self._console.print(f"note: {visible(text)}", highlight=False, markup=False, soft_wrap=True)

    def _row(self, *cells: str) -> None:
        self._rows.append(cells)
        if not self._console.is_terminal:
            if (len(self._rows) - 1) % HEADER_EVERY == 0:
                self._print_row("", *COLUMNS[:-1], "eta", COLUMNS[-1])
            self._print_row(*cells[:-1], self._eta(), cells[-1])

    def _print_row(self, first: str, *cells: str) -> None:
        """Print a line of the table for a file or pipe. The last cell, the agent's metrics, has no fixed width."""
        names = (*COLUMNS[:-1], "eta")
        aligned = [cell.rjust(WIDTHS.get(name, len(name))) for name, cell in zip(names, cells[:-1], strict=True)]
        line = "  ".join([first.ljust(WIDTHS[""]), *aligned, cells[-1]]).rstrip()
        self._console.print(line, highlight=False, soft_wrap=True)

    def _eta(self) -> str:
        fresh = self._done - self._done_before
        if not fresh:
            return "?"
        left = (self._total - self._done) * (time.monotonic() - self._started) / fresh
        return f"{int(left // 60)}:{int(left % 60):02d}"

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("")
        for name in COLUMNS:
            table.add_column(name, justify="right")
        for row in self._rows[-SHOWN_STEPS:]:
            table.add_row(*row)
        reward = sum(self._rewards) / len(self._rewards) if self._rewards else None
        now = Text(
            f"to come {max(0, self._to_come)}   reward lately {share(reward)}   tokens {self._tokens:,}"
            f"   lost {self._lost}   eta {self._eta()}",
            style="dim",
        )
        return Group(table, self._bar, now)
