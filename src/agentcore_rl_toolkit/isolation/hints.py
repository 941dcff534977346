"""Adds a hint to an agent's error about a path outside of the sandbox. Standard library only, Python 3.10.

Inside, a file that the sandbox hides looks as if it did not exist. The runtime names the visible folders in a variable.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

VARIABLE = "AGENTCORE_RL_SANDBOX"
UNSET = "The session has no variable "
_NAMED = re.compile(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b")
_SQLITE = ("unable to open database file", "attempt to write a readonly database")


def describe(readable: Iterable[object], writable: Iterable[object], *, store: object = None) -> str:
    """Return the value of the variable for these paths. ``store`` is a writable folder that looks different in each session."""
    shown, changed = ([str(path) for path in paths] for paths in (readable, writable))
    return json.dumps({"readable": shown, "writable": changed, "store": str(store or "")})


def add(**facts: str) -> None:
    """Add facts to the variable of this process."""
    os.environ[VARIABLE] = json.dumps({**json.loads(os.environ.get(VARIABLE, "{}")), **facts})


def hint(error: BaseException, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a hint for this error, or None outside of a sandbox, and if the sandbox is not the reason."""
    unset = _unset(error, environment)
    if unset is not None:
        return f"{UNSET}{unset}. Give it with --session-env {unset}, or --env-file FILE"
    shown = _visible(environment)
    if shown is None:
        return None
    readable, writable, no_view = shown["readable"], shown["writable"], shown.get("no_view")
    writing = "With --writable DIR, sessions write to a folder that they share."
    if no_view:
        writing = f"It is read-only, because the kernel gives a session no view ({no_view}). {writing}"
        writing += " With --copy PATH, each session gets a copy."
    if type(error).__name__ == "OperationalError" and any(text in str(error) for text in _SQLITE):
        return f"The sandbox of the session may be the reason. {writing}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and "view" in shown:
        return (
            f"A session may write {shown['view']} to the agent's project, /tmp, /dev/shm and the agent's home folder together, "
            "which are in memory. Large files belong in its current folder, in $TMPDIR, or in a folder of --writable DIR."
        )
    if isinstance(error, ModuleNotFoundError):
        hidden = [p for p in sys.path if os.path.isabs(p) and not os.path.exists(p) and not _below(p, readable)]
        what = f"{', '.join(hidden)}, which the sandbox does not show"
        missing = f"If {error.name} is a package, list it in requirements.txt or pyproject.toml of the agent."
        return f"The import path names {what}; add it with --readable DIR." if hidden else missing
    if not isinstance(error, OSError) or not isinstance(error.filename, (str, bytes)):
        return None
    path = os.path.abspath(os.fsdecode(error.filename))
    if _below(path, [*writable, os.getcwd()]):
        return None
    if not _below(path, readable):
        how = "add its folder with --readable DIR, or with --writable DIR to write there"
        return f"{path} is not in the sandbox of the session. If it exists on this machine, {how}."
    if isinstance(error, PermissionError) or error.errno in (30, 75):  # EROFS; EOVERFLOW: another user's file
        return f"{path} is read-only in the sandbox of the session. {writing}"
    return None


def is_private(folder: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if a session that writes to this folder writes to its sandbox only."""
    shown = _visible(environment)
    if shown is None:
        return False
    real, store = os.path.realpath(folder), os.path.realpath(shown.get("store") or "/none")
    writable = [*map(os.path.realpath, shown["writable"])]
    return not _below(real, writable) or (real != store and _below(real, [store]))


def _visible(environment: Mapping[str, str]) -> dict[str, Any] | None:
    try:
        shown: dict[str, Any] = json.loads(environment.get(VARIABLE, ""))
        return {**shown, "readable": list(shown["readable"]), "writable": list(shown["writable"])}
    except (ValueError, LookupError, TypeError):
        return None


def _unset(error: BaseException, environment: Mapping[str, str]) -> str | None:
    """Return the variable that an error in a session of the local runtime is about, if the session lacks it."""
    if VARIABLE not in environment and environment.get("AWS_ACCESS_KEY_ID") != "local":
        return None
    trace, found = error.__traceback__, _NAMED.search(str(error)) if "environment variable" in str(error) else None
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = found[0] if found else None
    if isinstance(error, KeyError) and trace is not None and trace.tb_frame.f_globals.get("__name__") == "os":
        name = str(error.args[0])
    return name if name is not None and name not in environment else None


def _below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)
