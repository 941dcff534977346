"""The files of a run's folder: `config.json`, `metrics.jsonl`, `rollouts.sqlite`, `run.lock`."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .._servers.locks import close_in_children
from ..contract import redact, redact_urls
from ..errors import AgentCoreRLError, ConfigError

CONFIG, METRICS, ROLLOUTS, LOCK, SUMMARY = "config.json", "metrics.jsonl", "rollouts.sqlite", "run.lock", "summary.json"
FAILED = "failed"  # the event that a run ends with when it fails
RECENT_S = 60.0


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from training or evaluating in a run's folder. The kernel drops the lock when this process ends.

    An exception that ends the block is written to the run as the reason of its failure. A ConfigError that ends it before it
    changes an earlier run, such as a run that cannot be continued, leaves that run as it is.
    Of the processes of one distributed job (``RANK``) the first has the lock for all.
    Raises: ConfigError with the process that holds the lock.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file:
        close_in_children(file)
        for left in range(5, -1, -1):  # another process may have it for a moment, as it looks for a run to resume
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not left:
                    file.seek(0)
                    raise ConfigError(
                        f"the run {folder} is in use by process {file.read().strip() or 'of unknown id'}: wait until it ends, "
                        "stop it, or choose another folder"
                    ) from None
            time.sleep(0.1)
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        earlier, written = is_run(folder), _written(folder)
        try:
            yield
        except Exception as e:
            if file.closed:  # a forked child's exception does not end the run
                raise
            unchanged = earlier and written == _written(folder) and _last_event(folder).get("event") != FAILED
            if unchanged and isinstance(e, ConfigError):
                raise
            reason = str(e) if isinstance(e, AgentCoreRLError) else f"{type(e).__name__}: {e}"
            with contextlib.suppress(OSError):  # the disk may be full
                append_event(folder, FAILED, {"reason": reason.partition("\n")[0][:2000]})
            raise
        finally:
            if not file.closed:
                file.truncate(0)


def status(folder: Path) -> str:
    """Return "running", "finished", "stopped at N of M" (steps), "stopped", or "failed: " with the reason.

    A run is running while a process holds its lock. A run without a lock file is running if it was written in the last minute.
    An ended run with a summary of fewer steps than planned has stopped at a step.
    """
    lock = folder / LOCK
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "running"
    except OSError:  # there is none, or this file system has no locks
        pass
    last = _last_event(folder)
    if last.get("event") == FAILED:
        return f"failed: {last['reason']}"
    if not (folder / SUMMARY).exists():
        return "running" if not lock.exists() and time.time() - written_s(folder) < RECENT_S else "stopped"
    done, planned = (read_object(folder / name).get("steps") for name in (SUMMARY, CONFIG))
    early = isinstance(done, int) and isinstance(planned, int) and done < planned
    return f"stopped at {done} of {planned}" if early else "finished"


def stamp(folder: Path, *more: str) -> tuple[Any, ...]:
    """Return the status, and what changes when something is written to the run, or to ``more`` of its files."""
    return status(folder), *_written(folder, ROLLOUTS, f"{ROLLOUTS}-wal", CONFIG, *more)


def _written(folder: Path, *more: str) -> list[tuple[str, int, int]]:
    names = (METRICS, SUMMARY, *more)
    return [(name, found.st_size, found.st_mtime_ns) for name, found in _stats(folder, names)]


def _stats(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield those of the files that have content: a reader of a run that is written makes an empty log."""
    for name in names:
        with contextlib.suppress(OSError):
            found = os.stat(f"{folder}/{name}")
            if found.st_size:
                yield name, found


def make_folder(root: Path, name: str) -> Path:
    """Make the first of `name`, `name-2`, `name-3`, ... that does not exist. No two callers get the same one."""
    root.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = root / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError


def is_run(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in (ROLLOUTS, METRICS))  # a private folder is none


def find_runs(root: Path) -> list[Path]:
    """Return folders of runs: `root` itself, or those directly in it or in its `runs/`, the newest first."""
    if is_run(root):
        return [root]
    places = [root, root / "runs"]
    found = {path for place in places if place.is_dir() for path in place.iterdir() if path.is_dir() and is_run(path)}
    return sorted(found, key=written_s, reverse=True)


def find_run(name: str | Path | None) -> Path:
    """Return the folder of a run by path, by name under `runs/`, or (None) the newest one. Raises: ConfigError."""
    if name is None:
        found = [path for path in find_runs(Path.cwd()) if (path / ROLLOUTS).exists()]  # a run of `sft` has none
        if not found:
            raise ConfigError("there is no run under runs/; `agentcore-rl quickstart` makes one, or name a folder")
        return found[0]
    for path in (Path(name), Path("runs") / name):
        if is_run(path):
            return path
    raise ConfigError(f"{name} is not a run: there is no such folder with {ROLLOUTS} or {METRICS}, here or under runs/")


def written_s(folder: Path) -> float:
    """Return the time at which the run was last written."""
    names = (ROLLOUTS, f"{ROLLOUTS}-wal", METRICS)
    return max((found.st_mtime for _, found in _stats(folder, names)), default=0.0)


def _object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object. What is none, such as a line that is only half written, is an empty one."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object of a run's folder. If there is none, it is empty."""
    with contextlib.suppress(OSError):
        return _object(file.read_bytes())
    return {}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the settings with which the run was started, empty if they are missing."""
    return read_object(folder / CONFIG)


def write_config(folder: Path, values: Mapping[str, Any], *, replace: bool = False) -> None:
    """Write the settings of a run. A resumed run keeps its own unless ``replace`` is set.

    Secrets in URLs and under the names of secrets are left out.
    """
    if replace or not (folder / CONFIG).exists():
        clean = redact(json.loads(json.dumps(dict(values), default=str)))
        (folder / CONFIG).write_text(redact_urls(json.dumps(clean, indent=2)) + "\n")


def _last_event(folder: Path) -> dict[str, Any]:
    """Return the last complete line of `metrics.jsonl`, which is shorter than 64 KB, without reading the others."""
    with contextlib.suppress(OSError), (folder / METRICS).open("rb") as file:
        file.seek(-min(2**16, file.seek(0, os.SEEK_END)), os.SEEK_END)
        return next(filter(None, map(_object, reversed(file.read().splitlines()))), {})
    return {}


def append_event(folder: Path, event: str, facts: Mapping[str, Any]) -> None:
    """Append one line to `metrics.jsonl`. Raises: OSError; TypeError, ValueError if the facts are no JSON."""
    line = json.dumps({"event": event, **facts}, default=str).encode() + b"\n"
    with (folder / METRICS).open("a+b") as file:
        file.seek(max(0, file.tell() - 1))
        file.write(line if file.read() in (b"", b"\n") else b"\n" + line)  # a full disk may have cut the last line


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the events of `metrics.jsonl`. A last line that is not complete is left out."""
    try:
        lines = (folder / METRICS).read_bytes().splitlines()
    except OSError:
        return []
    return [event for line in lines if (event := _object(line))]
