"""Scores of rollouts by a function of the user, in the client's process. Agents never see the function or its known answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import functools
import importlib
import inspect
import sys
import threading
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._portal import Portal
from ..contract import ANSWER_FIELD, REFERENCE_FIELD, is_finite, short
from ..errors import ConfigError, ScorerError, text_of
from ..isolation.project import Project

SCORE_TIMEOUT_S = 120.0
_portal = Portal("scorer")  # the loop of all async scorers, so that their clients keep their connections
# Fields of a record that are not the agent's answer.
_NO_ANSWER = "rewards reward turn_rewards metrics status_code stop_reason outcome payload input_id s3_bucket result_key"


def answer_of(record: Mapping[str, Any]) -> Any:
    """Return the agent's result. An agent with a rollout function returns rewards and metrics too; they are left out."""
    if ANSWER_FIELD in record:
        return record[ANSWER_FIELD]
    return {name: v for name, v in record.items() if name not in _NO_ANSWER.split() and not name.startswith("_")}


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """A function ``score(payload, answer, reference, trajectory)``, sync or async.

    It gets the row without ``_reference``, the agent's answer, the row's ``_reference``, and the messages of the model calls as
    the gateway recorded them. It returns a number, or a dict with `reward` and metrics. ``file`` is the source of its module.
    """

    function: Callable[..., Any]
    name: str
    timeout_s: float = SCORE_TIMEOUT_S
    file: Path | None = None

    async def score(
        self, payload: Mapping[str, Any], record: Mapping[str, Any], trajectory: Sequence[Mapping[str, Any]]
    ) -> dict[str, float]:
        row = {name: value for name, value in payload.items() if name != REFERENCE_FIELD}
        given = row, answer_of(record), payload.get(REFERENCE_FIELD), list(trajectory)
        result: concurrent.futures.Future[Any] = concurrent.futures.Future()
        result.set_running_or_notify_cancel()

        def work() -> None:
            try:
                result.set_result(self.function(*copy.deepcopy(given)))  # it may change its arguments
            except BaseException as e:  # a future cannot hold StopIteration, and SystemExit would end a loop
                result.set_exception(self._failure(e))

        try:
            threading.Thread(target=work, name="scorer", daemon=True).start()  # a thread cannot be ended
            async with asyncio.timeout(self.timeout_s):
                found = await asyncio.wrap_future(result)
                if inspect.isawaitable(found):
                    found = await asyncio.wrap_future(_portal.submit(self._awaited(found)))
            return self._checked(found)
        except ScorerError:
            raise
        except TimeoutError:
            text = f"the scorer {self.name} took longer than {self.timeout_s:g} s"
            # An async function has returned its coroutine. A sync one runs in its own thread.
            if result.done() and _portal.started and (running := asyncio.current_task(_portal.loop)) is not None:
                await asyncio.sleep(0.1)
                if asyncio.current_task(_portal.loop) is running:
                    text += f"; the async scorer {running.get_name()} blocks the loop of all async scorers: without "
                    text += "`async`, it gets a thread"
            raise ScorerError(text) from None
        except Exception as e:  # no thread can be started, or a number of the user's own class raises
            raise self._failure(e) from e

    async def _awaited(self, awaitable: Awaitable[Any]) -> Any:
        task = asyncio.current_task()
        assert task is not None
        task.set_name(self.name)
        try:
            return await awaitable
        except BaseException as e:
            if isinstance(e, asyncio.CancelledError) and task.cancelling():
                raise  # its deadline has passed
            raise self._failure(e) from e

    def _failure(self, error: BaseException) -> ScorerError:
        failure = ScorerError(f"the scorer {self.name} raised {type(error).__name__}: {text_of(error)}")
        failure.__cause__ = error
        return failure

    def _checked(self, found: Any) -> dict[str, float]:
        values = found if isinstance(found, Mapping) else {"reward": found}
        numbers = {str(name): number for name, value in values.items() if (number := _number(value)) is not None}
        metrics = {name: number for name, number in numbers.items() if is_finite(number)}
        if "reward" not in metrics:
            raise ScorerError(
                f"the scorer {self.name} returned {short(found)}: return a finite number, or a dict with `reward`"
            )
        dropped = len(numbers) - len(metrics)
        return metrics | ({"metrics_not_finite": float(dropped)} if dropped else {})


def _number(value: Any) -> float | None:
    """Convert a number, also of numpy and torch, to float. Anything else is None."""
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # more than one element
        return None


def split_spec(spec: str) -> tuple[str, str]:
    """Split FILE:FUNCTION into file or module, and function (default: `score`). A file's path becomes absolute."""
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        place, name = spec, "score"
    return (str(Path(place).resolve()) if place.endswith(".py") else place), name


def checked_spec(spec: str | None) -> str | None:
    """Return FILE:FUNCTION or MODULE:FUNCTION of a scorer that can be loaded, with an absolute path. Raises: ConfigError."""
    if spec is not None:
        spec = ":".join(split_spec(spec))
        scorer_at(spec)
    return spec


def scorer_files(spec: str | None) -> list[Path]:
    """Return the files of a scorer that sessions must not see: its source, and its compiled code. Raises: ConfigError."""
    file = None if spec is None else scorer_at(spec).file
    return [] if file is None else [file, *file.parent.glob(f"__pycache__/{file.stem}.*.pyc")]


def scorer_at(spec: str, timeout_s: float = SCORE_TIMEOUT_S) -> Scorer:
    """Load the scorer FILE:FUNCTION or MODULE:FUNCTION, once in a process. Raises: ConfigError."""
    place, name = split_spec(spec)
    try:
        module = _module_at(place)
    except (Exception, SystemExit) as e:
        raise ConfigError(f"--score {spec} could not be loaded: {type(e).__name__}: {text_of(e)}") from e
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"--score {spec}: {place} has no function {name}")
    try:
        inspect.signature(function).bind(*range(4))
    except (TypeError, ValueError) as e:
        raise ConfigError(f"--score {spec}: {name} must take (payload, answer, reference, trajectory): {e}") from e
    file = getattr(module, "__file__", None)
    return Scorer(function=function, name=f"{Path(place).name}:{name}", timeout_s=timeout_s, file=file and Path(file))


@functools.cache
def _module_at(place: str) -> types.ModuleType:
    """Import a file or module like an agent's. Write no bytecode, which sessions could read, and send prints to stderr."""
    project, before = Project.of(Path.cwd() / place), sys.dont_write_bytecode
    sys.path[:0] = [*project.import_paths, str(Path.cwd())]
    sys.dont_write_bytecode = True
    try:
        with contextlib.redirect_stdout(sys.stderr):
            if not place.endswith(".py"):
                return importlib.import_module(place)
            module = types.ModuleType(f"agentcore_rl_scorer_{Path(place).stem}")
            module.__file__, module.__package__ = place, project.package
            sys.modules[module.__name__] = module
            exec(compile(Path(place).read_bytes(), place, "exec"), module.__dict__)
            return module
    finally:
        sys.dont_write_bytecode = before
