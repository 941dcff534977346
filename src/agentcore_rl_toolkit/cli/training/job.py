"""A training run: its settings, its folder, and the receivers of its events."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...backends.training.settings import Observer
from ...contract import Cause
from ...errors import ConfigError
from ..output.failures import Failure
from .settings import LocalRun

if TYPE_CHECKING:
    from rich.console import Console

    from .report import Report


@dataclasses.dataclass(frozen=True)
class Job:
    """A run: its settings and its folder."""

    settings: LocalRun
    run_dir: Path

    @cached_property
    def rows(self) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """(trained on, held out)."""
        return self.settings.rows()

    @property
    def total(self) -> int:
        """The number of rollouts that the run will start."""
        plan = self.settings.step
        evaluations = 2 + ((plan.steps - 1) // plan.eval_every if plan.eval_every else 0)
        return evaluations * len(self.rows[1]) + plan.steps * plan.groups * plan.rollouts


def example(name: str) -> Path:
    """Return a file of the examples, which are next to the sources in a clone and inside the package in a wheel."""
    package = Path(__file__).resolve().parents[2]
    for root in (package.parents[1] / "examples", package / "_examples"):
        if (root / name).exists():
            return root / name
    raise ConfigError(f"examples/{name} is not part of this installation; run it from a clone of the repository")


@contextlib.contextmanager
def observed(job: Job, console: Console) -> Iterator[tuple[Report, Observer]]:
    """Yield a receiver of a run's events, for the display, the files of its folder, and the trackers."""
    from .display import Display
    from .report import Report
    from .trackers import tracked

    report = Report(job.run_dir)

    def observe(event: str, facts: dict[str, Any]) -> None:
        match event:
            case "rollouts_started":
                display.rollouts_started(facts["phase"], facts["total"])
            case "rollout":
                rollout = facts["rollout"]
                tokens = rollout.trajectory.report.sampled_tokens if rollout.trajectory is not None else 0
                failed = rollout.cause in (Cause.AGENT, Cause.INFRASTRUCTURE)
                failure = Failure.of(rollout.outcome, rollout.reason, rollout.traceback) if failed else None
                display.rollout(rollout.cause, rollout.score, tokens, failure)
            case "step" | "evaluated":
                report.add(event, facts)
                track(event, facts)
                show = display.step if event == "step" else display.evaluated
                show(facts)
            case "begins":
                display.resumed(facts["rollouts_done"])

    with (
        tracked(job.settings.tracker, job.run_dir, job.settings.kept()) as track,
        Display(console, job.total, report.findings) as display,
    ):
        yield report, observe
