"""The parts of a training run: settings, folder, loop, clients, and the receivers of its events."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...contract import Cause
from ...errors import ConfigError
from ..output.failures import Failure
from .settings import LocalRun

if TYPE_CHECKING:
    from rich.console import Console

    from .report import Report

LOOP = "grpo_loop/train.py"
Observer = Callable[[str, dict[str, Any]], None]  # of the events of a training


@dataclasses.dataclass(frozen=True)
class Job:
    """A run: its settings and its folder."""

    settings: LocalRun
    run_dir: Path

    @cached_property
    def loop(self) -> ModuleType:
        return load_loop()

    @cached_property
    def config(self) -> Any:
        """The settings as the loop has them."""
        return self.settings.loop_config(self.loop)

    @cached_property
    def rows(self) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """(trained on, held out)."""
        return self.settings.rows()

    @property
    def total(self) -> int:
        """The number of rollouts that the run will start."""
        settings = self.settings
        evaluations = 2 + ((settings.steps - 1) // settings.eval_every if settings.eval_every else 0)
        return evaluations * len(self.rows[1]) + settings.steps * settings.groups * settings.rollouts


def example(name: str) -> Path:
    """A file of the examples: beside the sources in a clone, inside the package when installed from a wheel."""
    package = Path(__file__).resolve().parents[2]
    for root in (package.parents[1] / "examples", package / "_examples"):
        if (root / name).exists():
            return root / name
    raise ConfigError(f"examples/{name} is not part of this installation; clone the repository and run it from there")


def load_loop() -> ModuleType:
    """The loop as a module."""
    path = example(LOOP)
    spec = importlib.util.spec_from_file_location(f"agentcore_rl_example_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def observed(job: Job, console: Console) -> Iterator[tuple[Report, Observer]]:
    """A receiver of a run's events: the display, the files of its folder, the trackers."""
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
                report.drop_steps_from(facts["steps_done"])
                display.resumed(facts["rollouts_done"])

    with (
        tracked(job.settings.tracker, job.run_dir, dataclasses.asdict(job.config)) as track,
        Display(console, job.total) as display,
    ):
        yield report, observe
