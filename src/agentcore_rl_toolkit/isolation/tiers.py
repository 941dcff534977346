"""The isolation tiers of the local runtime, and a check which of them this machine has.

``process``: one Bubblewrap sandbox per agent version; its sessions are forks of the template inside it. ``none``: no sandbox.
``container``: a container per session, in Docker or Podman. The first one protects this user's files from a policy's mistakes;
code that is not trusted belongs into the last one, or on AgentCore.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from typing import Literal

from ..errors import ConfigError
from .sandbox import BWRAP_S, command

TierName = Literal["process", "none", "container"]
TIERS: tuple[TierName, ...] = ("process", "none", "container")
INSTALL = "on Debian and Ubuntu: apt-get install bubblewrap"


def choose_tier(wanted: str = "auto") -> tuple[TierName, str | None]:
    """The tier to use, and why it is weaker than the default where it is. ``auto``: process, or none without Bubblewrap. Blocks.

    Raises: ConfigError on an unknown tier, or one that was named and is not available.
    """
    if wanted == "auto":
        why = no_sandbox()
        return ("process", None) if why is None else ("none", why)
    name = next((tier for tier in TIERS if tier == wanted), None)
    if name is None:
        raise ConfigError(f"isolation must be {', '.join(TIERS)} or auto, got {wanted!r}")
    why = no_sandbox() if name == "process" else None
    if why is not None:
        raise ConfigError(f"isolation {name!r} is not available here: {why}")
    return name, None


@functools.cache
def no_sandbox() -> str | None:
    """Why Bubblewrap cannot make a sandbox here, found out by making one; None when it can."""
    if not sys.platform.startswith("linux"):
        return "Bubblewrap exists on Linux only"
    if shutil.which("bwrap") is None:
        return f"bwrap is not installed; {INSTALL}"
    try:
        done = subprocess.run([*command(), "true"], capture_output=True, text=True, timeout=BWRAP_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"bwrap: {e}"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"bwrap ended with status {done.returncode}"
