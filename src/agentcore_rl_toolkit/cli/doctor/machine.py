"""Checks of this machine and this installation. None of them loads a heavy library for longer than the check."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ..._installation import install_command
from .finding import Finding, fail, note, ok

LEAST_DISK = 2 * 2**30
# For each extra, a module that it installs, and the part that needs it. Training needs the first four.
EXTRAS = {
    "gateway": (("aiohttp", "msgspec", "tokenizers", "transformers"), "the model gateway"),
    "runtime": (("h11", "uvicorn"), "the local runtime"),
    "policy": (("torch", "transformers", "safetensors", "starlette"), "the built-in policy"),
    "local": (("rich", "strands"), "the quickstart"),
    "trl": (("trl", "datasets"), "training with TRL"),
    "tinker": (("tinker",), "training with Tinker"),
    "verl": (("verl", "transfer_queue"), "training with verl"),
    "containers": (("aiodocker",), "sessions in Docker or Podman"),
}
_OF_THIS_MACHINE = ("gateway", "runtime", "policy", "local")


def installation() -> Finding:
    from importlib.metadata import version

    where = Path(__file__).resolve().parents[2]
    text = f"{version('agentcore-rl-toolkit')} from {where}, Python {platform.python_version()} ({sys.executable})"
    return ok("toolkit", f"{text} on {platform.system()} {platform.machine()}")


def extras() -> list[Finding]:
    """Return a line for each extra that training here needs, and a note for each other extra that is missing."""
    found = []
    for extra, (modules, use) in EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if not missing:
            found.append(ok(f"extra {extra}", use))
            continue
        finding = fail if extra in _OF_THIS_MACHINE else note
        found.append(finding(f"extra {extra}", f"{use} needs {', '.join(missing)}", install_command(extra)))
    return found


def torch_build() -> Finding:
    """Ask in a separate process, because importing torch takes seconds and 200 MB."""
    if importlib.util.find_spec("torch") is None:
        return fail("torch", "not installed", install_command("policy"))
    code = "import torch; print(torch.__version__, torch.cuda.device_count(), torch.get_num_threads())"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        error = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return fail("torch", f"cannot be imported: {error}", f"install it again: {install_command('policy')}")
    version, devices, threads = done.stdout.split()
    return ok("torch", f"{version}, {devices} GPU, {threads} threads")


def isolation() -> Finding:
    try:
        from ...isolation.sandbox import no_sandbox
    except ModuleNotFoundError as e:
        return fail("isolation", f"no {e.name}", install_command("runtime"))
    why = no_sandbox()
    if why is None:
        return ok("isolation", "agents run in a Bubblewrap sandbox")
    return note("isolation", f"agents run without a sandbox ({why})", "docs/runtime.md lists what each tier needs")


def disk() -> Finding:
    free = {place: shutil.disk_usage(place).free for place in {Path.cwd(), Path(tempfile.gettempdir())}}
    text = ", ".join(f"{amount / 2**30:.0f} GB free in {where}" for where, amount in free.items())
    if min(free.values()) < LEAST_DISK:
        return fail("disk", text, "free some space: runs and sessions write to this folder")
    return ok("disk", text)


CHECKS = (
    ("toolkit", installation),
    ("extras", extras),
    ("torch", torch_build),
    ("isolation", isolation),
    ("disk", disk),
)
