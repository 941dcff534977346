"""Scores of rollouts by a function of the user, in the client's process. Agents never see the function or its known answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import math
import sys
import threading
import types
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._portal import Portal
from ..contract import ANSWER_FIELD, INFO_FIELD, REFERENCE_FIELD, is_finite, short
from ..errors import ConfigError, ScorerError, text_of

SCORE_TIMEOUT_S = 120.0
BLOCKED_S = 1.0  # if nothing begins on a loop for this time, a scorer blocks it, and a new loop is used
_portals = [Portal("scorer")]  # the last loop is used
# Fields of a record that are not the agent's answer.
_NO_ANSWER = (
    *("rewards", "reward", "turn_rewards", "metrics", "status_code", "stop_reason", "outcome"),
    *("payload", "input_id", "s3_bucket", "result_key"),
)


def answer_of(record: Mapping[str, Any]) -> Any:
    """Return the agent's result. An agent with a rollout function returns rewards and metrics too; they are left out."""
    if ANSWER_FIELD in record:
        return record[ANSWER_FIELD]
    return {name: v for name, v in record.items() if name not in _NO_ANSWER and not name.startswith(("_", INFO_FIELD))}


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """A function ``score(payload, answer, reference, trajectory)``, sync or async.

    It gets the row without ``_reference``, the agent's answer, the row's ``_reference``, and the messages of the model calls as
    the gateway recorded them. It returns a number, or a dict with `reward` and metrics. Its deadline is ``timeout_s``.
    """

    function: Callable[..., Any]
    name: str
    timeout_s: float = SCORE_TIMEOUT_S

    async def score(
        self, payload: Mapping[str, Any], record: Mapping[str, Any], trajectory: Sequence[Mapping[str, Any]]
    ) -> dict[str, float]:
        """Return ``reward`` and metrics of a rollout. Raises: ScorerError."""
        row = {name: value for name, value in payload.items() if name != REFERENCE_FIELD}
        given = row, answer_of(record), payload.get(REFERENCE_FIELD), list(trajectory)
        arguments = copy.deepcopy(given)  # a function may change its arguments
        try:
            async with asyncio.timeout(self.timeout_s):
                found, error = await asyncio.wrap_future(self._in_thread(arguments))
            if error is None and inspect.isawaitable(found):
                found, error = await self._on_loop(found)
        except TimeoutError:
            raise ScorerError(f"the scorer {self.name} took longer than {self.timeout_s:g} s") from None
        except RuntimeError as e:
            raise ScorerError(
                f"the scorer {self.name} cannot be started: {e}"
            ) from e  # the process can start no thread
        if error is not None:
            raise ScorerError(f"the scorer {self.name} raised {type(error).__name__}: {text_of(error)}") from error
        return self._checked(found)

    def _in_thread(self, arguments: tuple[Any, ...]) -> concurrent.futures.Future[_Outcome]:
        """Start the function in a thread, which cannot be ended."""
        future: concurrent.futures.Future[_Outcome] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()

        def work() -> None:
            try:
                future.set_result((self.function(*arguments), None))
            except BaseException as e:  # also SystemExit; as a result, since futures cannot hold a StopIteration
                future.set_result((None, e))

        threading.Thread(target=work, name="scorer", daemon=True).start()
        return future

    async def _on_loop(self, awaitable: Awaitable[Any]) -> _Outcome:
        """Await on the loop that all scorers share. The deadline counts from the moment that the loop begins with it."""
        while True:
            portal = _portals[-1]
            begun: concurrent.futures.Future[None] = concurrent.futures.Future()
            work = portal.submit(_work(awaitable, begun))
            try:
                await asyncio.wait([asyncio.wrap_future(begun)], timeout=BLOCKED_S)
            except BaseException:
                work.cancel()
                raise
            if not begun.cancel():
                break
            if portal is _portals[-1]:
                _portals[:] = [Portal("scorer")]
        async with asyncio.timeout(self.timeout_s):
            return await asyncio.wrap_future(work)

    def _checked(self, found: Any) -> dict[str, float]:
        try:
            values = dict(found) if isinstance(found, Mapping) else {"reward": found}
            numbers = {str(name): _number(value) for name, value in values.items()}
        except Exception as e:  # any class of the user's code
            raise ScorerError(f"the result of the scorer {self.name} cannot be read: {text_of(e)}") from e
        reward = numbers.pop("reward", None)
        if reward is None or not is_finite(reward):
            raise ScorerError(
                f"the scorer {self.name} returned {short(found)}: return a finite number, or a dict with `reward`"
            )
        metrics = {name: value for name, value in numbers.items() if value is not None and is_finite(value)}
        dropped = sum(value is not None for value in numbers.values()) - len(metrics)
        return {**metrics, **({"metrics_not_finite": float(dropped)} if dropped else {}), "reward": reward}


_Outcome = tuple[Any, BaseException | None]  # the result of a function, or its error


async def _work(awaitable: Awaitable[Any], begun: concurrent.futures.Future[None]) -> _Outcome:
    if not begun.set_running_or_notify_cancel():
        return None, None  # another loop has the future
    begun.set_result(None)
    try:
        return await awaitable, None
    except BaseException as e:  # also SystemExit, which would end the loop
        return None, e


def _number(value: Any) -> float | None:
    """Convert a number, also of numpy and torch, to float. Anything else is None."""
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # more than one element
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
    """Return the files of a scorer that sessions must not see: its source, and its compiled code."""
    if spec is None:
        return []
    place = split_spec(spec)[0]
    if not place.endswith(".py"):
        with _from_here():
            try:
                found = importlib.util.find_spec(place)
            except Exception:  # `scorer_at` reports the error
                found = None
        if found is None or not found.has_location or found.origin is None:
            return []
        place = found.origin
    path = Path(place)
    return [path, *path.parent.glob(f"__pycache__/{path.stem}.*.pyc")]


@contextlib.contextmanager
def _from_here() -> Iterator[None]:
    """Find modules in the working directory. Write no bytecode, which sessions could read, and send prints to stderr."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.dont_write_bytecode = before


@functools.lru_cache
def scorer_at(spec: str, timeout_s: float = SCORE_TIMEOUT_S) -> Scorer:
    """Load the scorer FILE:FUNCTION or MODULE:FUNCTION. Raises: ConfigError."""
    place, name = split_spec(spec)
    try:
        with _from_here():
            if place.endswith(".py"):
                module = types.ModuleType(f"agentcore_rl_scorer_{Path(place).stem}")
                module.__file__ = place
                code = compile(Path(place).read_bytes(), place, "exec")
                sys.path.insert(0, str(Path(place).parent))
                sys.modules[module.__name__] = module
                exec(code, module.__dict__)
            else:
                module = importlib.import_module(place)
    except (Exception, SystemExit) as e:
        raise ConfigError(f"--score {spec} could not be loaded: {type(e).__name__}: {text_of(e)}") from e
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"--score {spec}: {place} has no function {name}")
    try:
        inspect.signature(function).bind(*range(4))
    except TypeError as e:
        raise ConfigError(
            f"--score {spec}: {name} must take (payload, answer, reference, trajectory), it takes "
            f"{inspect.signature(function)}"
        ) from e
    except ValueError:  # a function without a signature
        pass
    return Scorer(function=function, name=f"{Path(place).name}:{name}", timeout_s=timeout_s)
