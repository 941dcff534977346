"""Start AppWorld's server for one rollout, in the environment of AppWorld.

AppWorld needs pydantic 1, so it cannot share an environment with the agent. A server holds one world, and a new world deletes
the outputs of other worlds with the same task. Therefore each rollout has its own server, and its own root folder with a link to
the shared data.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import AppWorldError

PYTHON_VARIABLE = "APPWORLD_PYTHON"
ROOT_VARIABLE = "APPWORLD_ROOT"
BESIDE = Path(__file__).parents[1]  # where the README's commands put both
START_S = 300.0  # importing AppWorld takes some seconds of CPU; the rest is for a busy machine
LOG_TAIL = 2_000


def installation() -> tuple[str, Path]:
    """Return AppWorld's Python and data folder: `APPWORLD_PYTHON` and `APPWORLD_ROOT`, or those in the folder of the agent.

    Raises: AppWorldError with the missing setting or download.
    """
    python = os.environ.get(PYTHON_VARIABLE) or str(BESIDE / ".appworld-env" / "bin" / "python")
    root = Path(os.environ.get(ROOT_VARIABLE) or BESIDE / "appworld-root")
    if not Path(python).is_file():
        raise AppWorldError(f"set {PYTHON_VARIABLE} to the Python of the environment with AppWorld (README: AppWorld)")
    if not (root / "data" / "tasks").is_dir():
        raise AppWorldError(
            f"set {ROOT_VARIABLE} to the folder with AppWorld's `data`; `appworld download data --root FOLDER` gets it"
        )
    return python, root.resolve()


@contextmanager
def running_server(python: str, root: Path) -> Iterator[str]:
    """Start a server and give its URL. At the end, remove the server and its files.

    Raises: AppWorldError with the end of its log if it does not start.
    """
    home = Path(tempfile.mkdtemp(prefix="appworld-"))
    (home / "data").symlink_to(root / "data")
    ready, log = home / "ready.json", home / "server.log"
    environment = {
        **{name: os.environ[name] for name in ("PATH", "LANG", "HOME") if name in os.environ},
        "APPWORLD_ROOT": str(home),
        "APPWORLD_CACHE": str(home / "cache"),
        "IPYTHONDIR": str(home / "ipython"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    script = Path(__file__).with_name("serve.py")
    process = None
    try:
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [python, str(script), str(ready), str(os.getpid())],
                cwd=home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        yield _wait(process, ready, log)
    except AppWorldError as e:
        tail = log.read_text(errors="replace")[-LOG_TAIL:] if log.exists() else ""
        print(f"AppWorld's server: {e}\n{tail}", file=sys.stderr)
        raise
    finally:
        if process is not None:
            _end(process)
        shutil.rmtree(home, ignore_errors=True)


def _wait(process: subprocess.Popen[bytes], ready: Path, log: Path) -> str:
    deadline = time.monotonic() + START_S
    while not ready.exists():
        if process.poll() is not None:
            raise AppWorldError(
                f"the server ended with {process.returncode}: {log.read_text(errors='replace')[-LOG_TAIL:]}"
            )
        if time.monotonic() > deadline:
            raise AppWorldError(f"the server did not listen within {START_S:.0f} s")
        time.sleep(0.05)
    return str(json.loads(ready.read_text())["url"])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group of the server."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
