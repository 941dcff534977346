"""Experiment trackers beside `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow. Only the chosen tracker's library is loaded.

All get the same numbers under the same names, whatever trains: `train/...` for a step, `eval/...` for an evaluation. A resumed
run goes on with the same tracked run.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..._installation import missing_extra
from ...errors import ConfigError

PROJECT = "agentcore-rl"


class Tracker:
    """Where the numbers of a run go. ``step`` is the number of finished training steps."""

    def resumed(self, steps_done: int) -> None:
        """The run goes on after so many steps."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def close(self, *, finished: bool) -> None:
        raise NotImplementedError


class TensorBoard(Tracker):
    """Event files under ``tensorboard/`` of the run's folder."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"))
        lines = "".join(f"| {name} | {value} |\n" for name, value in settings.items())
        self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{lines}")

    def resumed(self, steps_done: int) -> None:
        """Hide what the interrupted run wrote after its last checkpoint: those steps come again."""
        from torch.utils.tensorboard import SummaryWriter

        folder = self._writer.log_dir
        self._writer.close()
        self._writer = SummaryWriter(folder, purge_step=steps_done + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, finished: bool) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """A run of `wandb`; its own variables apply (WANDB_MODE=offline, WANDB_PROJECT, WANDB_ENTITY, WANDB_API_KEY)."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=run_dir.name,
                id=re.sub(r"[^A-Za-z0-9_-]", "-", run_dir.name)[:120],
                resume="allow",
                dir=str(run_dir),
                config=dict(settings),
                settings=wandb.Settings(console="off", quiet=True),  # our display is not to be captured nor repeated
            )
        except wandb.errors.Error as e:
            raise ConfigError(f"wandb did not start: {e}. WANDB_MODE=offline writes to the run's folder only") from e
        for pattern in ("train/*", "eval/*"):  # steps of ours: a resumed run repeats the last of them at times
            self._run.define_metric(pattern, step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({"step": step, **values})

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class MLflow(Tracker):
    """A run of MLflow: at MLFLOW_TRACKING_URI where that is set, else in files under ``mlflow/`` of the run's folder."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 asks for it before it writes to files
            uri = (run_dir / "mlflow").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        kept = run_dir / "mlflow_run_id"  # the run goes on with it when it is resumed
        if kept.exists():
            self._id = kept.read_text().strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        self._id = self._client.create_run(number, run_name=run_dir.name).info.run_id
        kept.write_text(self._id + "\n")
        self._client.log_batch(self._id, params=[Param(key, str(value)[:6000]) for key, value in settings.items()])

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now_ms, step) for name, value in values.items()])

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self._id, status="FINISHED" if finished else "KILLED")


# By the name of their library and of its extra.
TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]]
TRACKERS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def check_installed(names: Sequence[str]) -> None:
    """Raises: MissingExtraError naming the command that installs what is missing, before anything has started."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise missing_extra(f"tracker {name} needs the package {name!r}", name)


class Trackers:
    """All trackers of a run as one. As a context manager it closes them, as finished only when the block ended well."""

    def __init__(self, names: Sequence[str], run_dir: Path, settings: Mapping[str, Any]) -> None:
        check_installed(names)
        self._trackers = [TRACKERS[name](run_dir, settings) for name in names]
        self._steps_done = 0

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for tracker in self._trackers:
            tracker.close(finished=kind is None)

    def resumed(self, steps_done: int) -> None:
        """The run goes on after so many steps."""
        self._steps_done = steps_done
        for tracker in self._trackers:
            tracker.resumed(steps_done)

    def event(self, event: str, facts: Mapping[str, Any]) -> None:
        """Pass on a `step` or `evaluated` event, as `metrics.jsonl` gets it."""
        if event == "step":
            self._steps_done = int(facts["step"]) + 1
        group = "train" if event == "step" else "eval"
        values = {f"{group}/{name}": value for name, value in numbers(facts) if name not in ("step", "version")}
        at = facts.get("version", self._steps_done)
        for tracker in self._trackers:
            tracker.log(values, at)


def numbers(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) of an event, nested ones with a slash. What is absent or no finite number is left out, never zero."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{prefix}{name}", float(value)
