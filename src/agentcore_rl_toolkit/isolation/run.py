"""Run by `boot`: ``probe DIR`` and ``probe-loader DIR``. Standard library only."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .spec import IsolationSpec
from .tiers import TIERS


def main(what: str, directory: str) -> None:
    """Try the namespaces tier once, and exit with 0 if it works."""
    folder, namespaces = Path(directory), TIERS["namespaces"]
    if what == "probe-loader":
        sessions, home = folder / "sessions", folder / "home" / "own"
        folder = sessions / "one"
        for path in (folder, home):
            path.mkdir(parents=True)
        namespaces.confine_loader(IsolationSpec(session_dir=home, writable=(sessions,), network="none", name="loader"))
    spec = IsolationSpec(session_dir=folder, network="none", name="agentcore-rl-probe")
    pid = namespaces.fork(spec)
    if pid == 0:
        namespaces.confine_child(spec)
        os._exit(0 if os.getpid() == 1 else 3)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
