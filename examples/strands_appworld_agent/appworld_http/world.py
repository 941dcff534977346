"""A world of AppWorld's environment server (0.1.3): initialize, execute code, evaluate, close."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from .errors import AppWorldError

EXECUTION_S = 100  # what the server gives one piece of code, its own default
ANSWER_S = 60.0  # what a call may take beyond that
MAX_SHOWN = 20_000


@dataclass(frozen=True)
class Task:
    """The request, its user and its date."""

    task_id: str
    instruction: str
    first_name: str
    last_name: str
    email: str
    phone_number: str
    datetime: str


@dataclass(frozen=True)
class Evaluation:
    """The result of the task's tests: requirements with their labels. Tests with the label ``no_op_pass`` also pass if nothing
    is done."""

    success: bool
    num_tests: int
    passes: tuple[dict[str, Any], ...]
    failures: tuple[dict[str, Any], ...]


class World:
    """A client for the world of one task. Use as a context manager; entering it initializes the world.

    Raises: AppWorldError when the server cannot be reached, answers with an error, or not in time.
    """

    def __init__(self, url: str, task_id: str, *, max_interactions: int = 100) -> None:
        self.task_id = task_id
        self._max_interactions = max_interactions
        self._http = httpx.Client(base_url=url, timeout=EXECUTION_S + ANSWER_S, trust_env=False)
        self.task: Task

    def __enter__(self) -> World:
        try:
            told = self._call(
                "initialize",
                experiment_name="rollout",
                max_interactions=self._max_interactions,
                timeout_seconds=EXECUTION_S,
            )
            person = told["supervisor"]
            self.task = Task(
                task_id=told["task_id"],
                instruction=told["instruction"],
                first_name=person["first_name"],
                last_name=person["last_name"],
                email=person["email"],
                phone_number=person["phone_number"],
                datetime=told["datetime"],
            )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The world ends with its server, which ends with the rollout."""
        self._http.close()

    def execute(self, code: str) -> str:
        """Run code in the world, and return its output or traceback, without the middle of a long one."""
        output = str(self._call("execute", code=code))
        if len(output) <= MAX_SHOWN:
            return output
        return f"{output[: MAX_SHOWN // 2]}\n... {len(output) - MAX_SHOWN} characters left out ...\n{output[-MAX_SHOWN // 2 :]}"

    def is_complete(self) -> bool:
        """Return True if `apis.supervisor.complete_task` was called."""
        return bool(self._call("task_completed"))

    def evaluate(self) -> Evaluation:
        """Apply the task's tests to the state that the world is in."""
        told = self._call("evaluate", suppress_errors=True)
        return Evaluation(bool(told["success"]), int(told["num_tests"]), tuple(told["passes"]), tuple(told["failures"]))

    def _call(self, method: str, **body: Any) -> Any:
        try:
            response = self._http.post(f"/{method}", json={"task_id": self.task_id, **body})
        except httpx.HTTPError as e:
            raise AppWorldError(f"/{method} of {self.task_id} was not answered: {type(e).__name__}: {e}") from e
        if response.status_code != 200:
            raise AppWorldError(
                f"/{method} of {self.task_id} was answered with {response.status_code}: {response.text[:500]}. "
                "A 500 of /initialize mostly means that the task is not in APPWORLD_ROOT/data/tasks"
            )
        try:
            return response.json()["output"]
        except (ValueError, KeyError, TypeError) as e:
            raise AppWorldError(f"/{method} of {self.task_id} has no output: {response.text[:500]}") from e
