"""The tasks of OfficeBench, as its repository lays them out: `tasks/1-1/subtasks/0.json` and `tasks/1-1/testbed/`.

They are not part of this project, and the README shows how to get them. `OFFICEBENCH_TASKS` is their folder. The default is
`tasks` in the folder of the agent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import TaskError

TASKS_VARIABLE = "OFFICEBENCH_TASKS"
BESIDE = Path(__file__).parents[1] / "tasks"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A call of an evaluation function."""

    function: str
    args: Mapping[str, Any]
    file_beside: str | None = None  # six checks have `file` outside of `args`, where the benchmark's code does not look


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: the request, its user and date, and the checks."""

    task_id: str  # "2-15/0": the second of three levels, its 15th folder, subtask 0
    text: str
    username: str
    date: str
    weekday: str
    time: str
    checks: tuple[Check, ...]
    folder: Path

    @property
    def level(self) -> int:
        """Return the number of applications that the task needs: 1, 2 or 3."""
        return int(self.task_id[0])

    @property
    def testbed(self) -> Path:
        """The files that the task begins with; some tasks have none."""
        return self.folder / "testbed"

    def published_file(self, name: str) -> Path:
        """A file that an evaluation compares with: a reference, or a file of the testbed as it was before the rollout.

        The published paths lead out of the benchmark's own output folder: `../../../../reference/x`,
        `../../../../cache/0/testbed/data/x`. Never the workspace's copy, which the policy may have changed.
        """
        parts = [part for part in PurePosixPath(name).parts if part not in ("..", ".")]
        if parts[:1] == ["reference"]:
            path = self.folder.joinpath(*parts)
        elif parts[:1] == ["cache"] and parts[2:3] == ["testbed"]:
            path = self.testbed.joinpath(*parts[3:])
        else:
            path = self.testbed.joinpath(*parts)
        if not path.is_file():
            raise TaskError(f"task {self.task_id} compares with {name}, which is not there ({path})")
        return path


def tasks_folder(given: Path | str | None = None) -> Path:
    """Return the folder of tasks: ``given``, `OFFICEBENCH_TASKS`, or `tasks` in the folder of the agent, in this order.

    Raises: TaskError with the variable to set.
    """
    folder = Path(given or os.environ.get(TASKS_VARIABLE) or BESIDE)
    if next(folder.glob("*/subtasks/*.json"), None) is None:
        raise TaskError(
            f"{folder} contains no tasks: set {TASKS_VARIABLE} to OfficeBench's folder `tasks` (README: The tasks)"
        )
    return folder.resolve()


def load_task(task_id: str, folder: Path | str | None = None) -> Task:
    """Read a task. Raises: TaskError if no task has this id, or if it is incomplete."""
    root = tasks_folder(folder)
    number, _, subtask = task_id.partition("/")
    path = root / number / "subtasks" / f"{subtask}.json"
    if PurePosixPath(task_id).parts != (number, subtask) or ".." in (number, subtask) or not path.is_file():
        raise TaskError(f"there is no task {task_id!r} in {root}")
    try:
        told = json.loads(path.read_text())
        checks = []
        for check in told["evaluation"]:
            function = check["function"].removeprefix("evaluate_")
            checks.append(Check(function=function, args=dict(check["args"]), file_beside=check.get("file")))
        return Task(
            task_id=task_id,
            text=told["task"],
            username=told["username"],
            date=told["date"],
            weekday=told["weekday"],
            time=told["time"],
            checks=tuple(checks),
            folder=root / number,
        )
    except (KeyError, TypeError, ValueError) as e:
        raise TaskError(f"task {task_id} cannot be read: {type(e).__name__}: {e}") from e


def task_ids(folder: Path | str | None = None) -> list[str]:
    """The ids of all tasks, in order of level, folder and subtask."""
    root = tasks_folder(folder)
    ids = [f"{path.parents[1].name}/{path.stem}" for path in root.glob("*/subtasks/*.json")]
    return sorted(ids, key=lambda task_id: [int(part) for part in task_id.replace("/", "-").split("-")])
