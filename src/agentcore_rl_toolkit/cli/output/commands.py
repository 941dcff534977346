"""Commands and paths in a form that can be pasted into a shell."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def program(name: str = "agentcore-rl") -> str:
    """Return how the caller's shell finds a program of this environment: its name if PATH leads there, otherwise its path."""
    own = Path(sys.executable).parent / name
    found = shutil.which(name)
    if not own.exists() or (found is not None and os.path.samefile(Path(found).parent, own.parent)):
        return name
    near = nearby(own)
    return near if "/" in near else f"./{near}"


def nearby(path: Path) -> str:
    """Return a path as a word of a shell's command, relative to the current folder if it lies in it."""
    whole = Path(os.path.abspath(path))
    return shlex.quote(str(whole.relative_to(Path.cwd()) if whole.is_relative_to(Path.cwd()) else whole))
