"""Scores of rollouts by a function of the user, in the client's process: agents never see it, nor the answers it knows."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import importlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._portal import Portal
from ..contract import ANSWER_FIELD, INFO_FIELD, REFERENCE_FIELD, is_finite, short
from ..errors import ConfigError, ScorerError, text_of

SCORE_TIMEOUT_S = 120.0
_portal = Portal("scorer")
# Of a record: what is not the agent's answer.
_NO_ANSWER = (
    *("rewards", "reward", "turn_rewards", "metrics", "status_code", "stop_reason", "outcome"),
    *("payload", "input_id", "s3_bucket", "result_key"),
)


def answer_of(record: Mapping[str, Any]) -> Any:
    """What the agent returned. Of an agent with a rollout function, the entries that are no rewards or metrics."""
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
        arguments = row, answer_of(record), payload.get(REFERENCE_FIELD), list(trajectory)
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                found = await asyncio.wrap_future(self._start(arguments))
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise ScorerError(f"the scorer {self.name} was cancelled") from None
        except BaseException as e:
            if isinstance(e, TimeoutError) and limit.expired():
                raise ScorerError(f"the scorer {self.name} took longer than {self.timeout_s:g} s") from None
            raise ScorerError(f"the scorer {self.name} raised {type(e).__name__}: {text_of(e)}") from e
        return self._checked(found)

    def _start(self, arguments: tuple[Any, ...]) -> concurrent.futures.Future[Any]:
        """Start the function: an async one on a loop that all calls share, a sync one in a thread, which cannot be ended."""
        if inspect.iscoroutinefunction(self.function):
            return _portal.submit(self.function(*arguments))
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()

        async def wait(result: Any) -> Any:
            return await result

        def work() -> None:
            try:
                found = self.function(*arguments)
                future.set_result(_portal.submit(wait(found)).result() if inspect.isawaitable(found) else found)
            except BaseException as e:  # also SystemExit of the user's code
                future.set_exception(e)

        threading.Thread(target=work, name="scorer", daemon=True).start()
        return future

    def _checked(self, found: Any) -> dict[str, float]:
        values = dict(found) if isinstance(found, Mapping) else {"reward": found}
        number: Any = values.get("reward")
        number = number.item() if hasattr(number, "item") else number  # numpy and torch
        if not (isinstance(number, bool) or is_finite(number)):
            raise ScorerError(
                f"the scorer {self.name} returned {short(found)}: return a finite number, or a dict with `reward`"
            )
        metrics = {str(k): float(v) for k, v in values.items() if isinstance(v, bool) or is_finite(v)}
        return {**metrics, "reward": float(number)}


def split_spec(spec: str) -> tuple[str, str]:
    """The file or module of FILE:FUNCTION, and the function: `score` unless it is named. A file's path becomes absolute."""
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        place, name = spec, "score"
    return (str(Path(place).resolve()) if place.endswith(".py") else place), name


def scorer_files(spec: str | None) -> list[Path]:
    """The files of a scorer that sessions must not see: its source, and what Python compiled of it."""
    if spec is None or not (place := split_spec(spec)[0]).endswith(".py"):
        return []
    path = Path(place)
    return [path, *path.parent.glob(f"__pycache__/{path.stem}.*.pyc")]


@functools.lru_cache
def scorer_at(spec: str, timeout_s: float = SCORE_TIMEOUT_S) -> Scorer:
    """Load the scorer FILE:FUNCTION or MODULE:FUNCTION. Raises: ConfigError."""
    place, name = split_spec(spec)
    folder = str(Path(place).parent if place.endswith(".py") else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if place.endswith(".py"):
            # No bytecode is written: sessions could read it.
            module = types.ModuleType(f"agentcore_rl_scorer_{Path(place).stem}")
            module.__file__ = place
            code = compile(Path(place).read_bytes(), place, "exec")
            sys.modules[module.__name__] = module
            exec(code, module.__dict__)
        else:
            module = importlib.import_module(place)
    except Exception as e:
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
