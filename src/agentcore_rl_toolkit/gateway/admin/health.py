"""What a gateway that is started again has to know though no stored call says it: the weight version and a pause.

It lies in one file of the store. An administrator's request is answered when what it changed is on the disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from ..calls.running import RunningCalls
from ..config import GatewayConfig
from ..errors import NOT_JSON

log = logging.getLogger(__name__)

NAME = "state.json"


class Lag:
    """How late timers run: the last one, and the one that was latest. Units: seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.most_s = 0.0

    def saw(self, late_s: float) -> None:
        self.now_s = late_s
        self.most_s = max(self.most_s, late_s)


class Samplers(Protocol):
    """Weights at Tinker: what is sampled, and its version."""

    wanted: tuple[str, int | None] | None

    def models(self) -> list[str]: ...
    async def use(self, model: str | None, version: int) -> None: ...


class State(msgspec.Struct, frozen=True, kw_only=True):
    """``sampler`` is what engine tinker samples as that version."""

    weight_version: int | None = None
    paused: Literal["hold", "reject"] | None = None
    sampler: str | None = None


class StateFile:
    """The state of a gateway in its store. ``directory`` None: the store is temporary, nothing is kept."""

    def __init__(self, directory: Path | None) -> None:
        self._path = None if directory is None else directory / NAME
        self._stored: State | None = None
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def take_up(self, config: GatewayConfig, running: RunningCalls, tinker: Samplers | None) -> None:
        """Go on with what was stored. What the configuration names wins, and is stored in its place."""
        stored = self._read()
        named = config.weight_version is not None or config.sampler is not None
        if stored is not None:
            running.paused = stored.paused
            same = config.weight_version is None and config.sampler in (None, stored.sampler)
            # A sampler's version is not that of another engine's weights.
            if same and (tinker is not None or stored.sampler is None):
                running.weight_version = stored.weight_version
                if tinker is not None and stored.sampler is not None:
                    tinker.wanted = (stored.sampler, stored.weight_version)
        if self._path is not None and named and _state_of(running, tinker) != stored:
            try:
                self._write(self._path, _state_of(running, tinker))
            except OSError as e:
                log.error("%s still says another weight version: %s", self._path, e)

    def _read(self) -> State | None:
        if self._path is None:
            return None
        try:
            self._stored = msgspec.json.decode(self._path.read_bytes(), type=State)
        except FileNotFoundError:
            return None
        except (OSError, *NOT_JSON) as e:
            log.error("%s cannot be read: the weight version is unknown, and a pause forgotten: %s", self._path, e)
        return self._stored

    async def keep(self, running: RunningCalls, tinker: Samplers | None) -> None:
        """Return when what holds now is on the disk. Raises: OSError."""
        if self._path is None:
            return
        # Written to the end also when the administrator hangs up: the next one comes after it.
        task = asyncio.get_running_loop().create_task(self._keep(self._path, running, tinker))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        await asyncio.shield(task)

    async def _keep(self, path: Path, running: RunningCalls, tinker: Samplers | None) -> None:
        async with self._lock:
            state = _state_of(running, tinker)
            if state != self._stored:
                await asyncio.to_thread(self._write, path, state)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s cannot be written: %s", self._path, error)

    def _write(self, path: Path, state: State) -> None:
        self._stored = None  # whether the old or the new one is on the disk is open until the end
        new = path.with_suffix(".new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(state))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._stored = state


def _state_of(running: RunningCalls, tinker: Samplers | None) -> State:
    models = tinker.models() if tinker is not None else []
    paused: Literal["hold", "reject"] | None = None
    if running.paused is not None:
        paused = "reject" if running.paused == "reject" else "hold"
    return State(weight_version=running.weight_version, paused=paused, sampler=models[0] if models else None)
