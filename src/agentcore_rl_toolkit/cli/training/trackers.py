"""Experiment trackers: TensorBoard, Weights & Biases, MLflow. Only the chosen tracker's library is loaded.

All get the numbers of `metrics.jsonl` under the same names for every trainer: `train/...` for a step, `eval/...` for an
evaluation. A resumed run continues the same tracked run, which records whether the run ended well.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..._installation import missing_extra
from ...errors import ConfigError

PROJECT = "agentcore-rl"
Log = Callable[[Mapping[str, float], int], object]  # numbers, and the steps of training so far


@contextlib.contextmanager
def _tensorboard(run_dir: Path, settings: Mapping[str, Any]) -> Iterator[Log]:
    """Log to event files under ``tensorboard/`` of the run's folder."""
    from torch.utils.tensorboard import SummaryWriter

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    writer: Any
    with SummaryWriter(str(run_dir / "tensorboard")) as writer:
        yield log


@contextlib.contextmanager
def _wandb(run_dir: Path, settings: Mapping[str, Any]) -> Iterator[Log]:
    """Log to a run of `wandb`, with its own variables (WANDB_MODE=offline, WANDB_PROJECT, WANDB_ENTITY, WANDB_API_KEY)."""
    import wandb

    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_dir.name,
            id=re.sub(r"[^A-Za-z0-9_-]", "-", run_dir.name)[:120],
            resume="allow",
            dir=str(run_dir),
            config=dict(settings),
            settings=wandb.Settings(console="off", quiet=True),  # wandb must not capture or repeat our display
        )
    except wandb.errors.Error as e:
        raise ConfigError(f"wandb did not start: {e}. WANDB_MODE=offline writes to the run's folder only") from e
    code = 1
    try:
        yield lambda values, step: run.log(dict(values), step=step)
        code = 0
    finally:
        run.finish(exit_code=code)


@contextlib.contextmanager
def _mlflow(run_dir: Path, settings: Mapping[str, Any]) -> Iterator[Log]:
    """Log to a run of MLflow, at MLFLOW_TRACKING_URI if that is set, otherwise in ``mlflow/`` of the run's folder."""
    import mlflow

    if "MLFLOW_TRACKING_URI" not in os.environ:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 asks for it before it writes to files
        mlflow.set_tracking_uri((run_dir / "mlflow").as_uri())
    kept = run_dir / "mlflow_run_id"  # a resumed run continues with it
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    known = kept.read_text().strip() if kept.exists() else None
    with mlflow.start_run(run_id=known, run_name=run_dir.name) as run:
        if known is None:
            kept.write_text(run.info.run_id + "\n")
            mlflow.log_params({name: str(value)[:6000] for name, value in settings.items()})
        yield lambda values, step: mlflow.log_metrics(dict(values), step=step)


# By the name of their library and of its extra.
TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}


def check_installed(names: Sequence[str]) -> None:
    """Raise MissingExtraError with the command that installs a missing tracker, before anything has started."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise missing_extra(f"tracker {name} needs the package {name!r}", name)


@contextlib.contextmanager
def tracked(
    names: Sequence[str], run_dir: Path, settings: Mapping[str, Any]
) -> Iterator[Callable[[str, Mapping[str, Any]], None]]:
    """Yield one function for all trackers of a run. It takes the `step` and `evaluated` events of `metrics.jsonl`."""
    check_installed(names)
    with contextlib.ExitStack() as exits:
        logs = [exits.enter_context(TRACKERS[name](run_dir, settings)) for name in names]

        def event(event: str, facts: Mapping[str, Any]) -> None:
            group, at = ("train", facts["step"] + 1) if event == "step" else ("eval", facts["version"])
            values = {f"{group}/{name}": value for name, value in numbers(facts) if name not in ("step", "version")}
            for log in logs:
                log(values, at)

        yield event


def numbers(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name, number) of an event, nested ones with a slash. Missing and infinite values are left out, never zero."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{prefix}{name}", float(value)
