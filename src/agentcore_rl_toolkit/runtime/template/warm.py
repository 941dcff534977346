"""Do once in the template what every session would do again: late imports, and reading certificate bundles.

Some libraries import most of themselves at first use, that is after the fork, in every session. Two things help. A short table
names such modules of common libraries; those of a library that the agent has loaded are imported with it. And the first sessions
report which modules they had to import, which the template then imports too (tried in a throw-away fork first: a module that
starts threads, prints or fails stays out).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import ssl
import sys
from collections.abc import Callable, Iterable
from typing import Any

from ..launcher import linux

# Loaded library -> modules it imports on first use.
LATE_IMPORTS = {
    "anyio": ("anyio._backends._asyncio",),
    "anthropic": ("anthropic.resources.messages",),
    "httpx": ("httpcore", "h11"),
    "openai": ("openai.resources", "openai.resources.chat.completions", "openai.lib.streaming.chat"),
    "uvicorn": ("uvicorn.loops.auto", "uvloop"),
    "agentcore_rl_toolkit.app": ("agentcore_rl_toolkit.store.local",),
}
_PROBE_TIMEOUT_S = 30
_THREADS_END_S = 2.0
STUDENTS = 8
PIPE_BUF = 4096  # several sessions write to one pipe: a line must stay below that to stay whole
NAMES_PER_LINE = 30
REPORT_AFTER_S = (0.3, 0.7, 2.0, 5.0, 15.0)  # between reports
_CERTIFICATE_USES = ("wrap_socket", "wrap_bio", "get_ca_certs", "cert_store_stats")


def late_imports() -> list[str]:
    """Modules of the table whose library is loaded and that are not."""
    return [
        m for library, names in LATE_IMPORTS.items() if library in sys.modules for m in names if m not in sys.modules
    ]


def import_quietly(names: Iterable[str]) -> list[str]:
    """Import what can be imported; returns those that did not import."""
    failed = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # another version of the library, or one without this part
            failed.append(name)
    return failed


def safe_to_import(names: list[str]) -> list[str]:
    """The names that import in a fork of this process without starting threads. Costs one fork."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        good = []
        try:
            os.close(read)
            signal.alarm(_PROBE_TIMEOUT_S)
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 1)
            os.dup2(null, 2)
            for name in names:
                imported = not import_quietly([name])
                if not linux.without_threads(_THREADS_END_S):
                    break
                if imported:
                    good.append(name)
            os.write(write, json.dumps(good).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    names_ok: list[str] = json.loads(text) if text else []
    return names_ok


def defer_certificates() -> None:
    """Let TLS contexts read their certificate bundle at first use.

    HTTP clients make a TLS context whether they need one or not, and reading the usual bundle takes 20 ms of CPU, twice or more
    per session, also for agents that only talk to plain http:// endpoints. A missing file still fails at once.
    """
    load: Callable[..., None] = ssl.SSLContext.load_verify_locations

    def load_verify_locations(self: ssl.SSLContext, cafile: Any = None, capath: Any = None, cadata: Any = None) -> None:
        if cafile is None or cadata is not None or not os.path.isfile(cafile):
            load(self, cafile, capath, cadata)
        else:
            self.__dict__.setdefault("_deferred_certificates", []).append((cafile, capath))

    def wrapped(name: str) -> Callable[..., Any]:
        use = getattr(ssl.SSLContext, name)

        def use_with_certificates(self: ssl.SSLContext, *args: Any, **kwargs: Any) -> Any:
            for cafile, capath in self.__dict__.pop("_deferred_certificates", ()):
                load(self, cafile, capath)
            return use(self, *args, **kwargs)

        use_with_certificates.__name__ = name
        return use_with_certificates

    ssl.SSLContext.load_verify_locations = load_verify_locations  # type: ignore[method-assign]
    for name in _CERTIFICATE_USES:
        setattr(ssl.SSLContext, name, wrapped(name))


class Learning:
    """The template's memory of what its first sessions imported."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self._pending = b""
        self._students = 0

    def student(self) -> Student | None:
        """In a forked session: what reports for it, for the first few sessions; None for the others."""
        os.close(self.read_fd)
        if self._students >= STUDENTS:
            os.close(self._write_fd)
            return None
        return Student(self._write_fd)

    def count_session(self) -> None:
        self._students += 1

    def take_reports(self) -> None:
        """Import what sessions reported, as far as that is safe."""
        try:
            self._pending += os.read(self.read_fd, 1_000_000)
        except BlockingIOError:
            return
        *lines, self._pending = self._pending.split(b"\n")
        self._pending = self._pending[-PIPE_BUF:]  # no whole line is longer
        names = [name for line in lines for name in _names(line) if name not in sys.modules]
        if names:
            import_quietly(safe_to_import(list(dict.fromkeys(names))))
            gc.freeze()


def _names(line: bytes) -> list[str]:
    """Module names of a report. A session writes it, so it may be anything."""
    try:
        names = json.loads(line)
    except (ValueError, RecursionError):
        return []
    return [name for name in names if isinstance(name, str) and name.isascii()] if isinstance(names, list) else []


class Student:
    """Runs in a session: tells the template, a few times in its first seconds, which modules it imported since the fork."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._known = set(sys.modules)
        self._delays = list(REPORT_AFTER_S)

    def watch(self, loop: Any) -> None:
        loop.call_later(self._delays.pop(0), self._tell, loop)

    def _tell(self, loop: Any) -> None:
        new = [name for name in list(sys.modules) if name not in self._known and _importable(name)]
        self._known.update(new)
        try:
            for start in range(0, len(new), NAMES_PER_LINE):
                os.write(self._fd, json.dumps(new[start : start + NAMES_PER_LINE]).encode() + b"\n")
        except OSError:
            return
        if self._delays:
            self.watch(loop)
        else:
            os.close(self._fd)


def _importable(name: str) -> bool:
    module = sys.modules.get(name)
    return (
        name != "__main__"
        and len(name) < 120
        and getattr(module, "__spec__", None) is not None
        and "<locals>" not in name
    )
