"""Containers for agents given by path: the machine's own programs and the agent's environment, read-only, in an empty image.

With an image of the user's choice only the agent's folder and its environment come from this machine; the image then has to
have the system libraries that the environment's interpreter was built against.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from ...errors import LocalRuntimeError
from ...isolation.spec import Limits
from ..agents.agent import Agent
from ..config import IsolationConfig
from ..sessions.node import SessionOrder
from .client import Engine
from .images import ARCHITECTURES, fetch

IMAGE = "localhost/agentcore-rl/host:2"
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_EMPTY = ("dev", "etc", "home", "mnt", "opt", "proc", "root", "run", "sys", "tmp", "usr", "var")
# Of /etc only what programs need to run; the engine brings hosts, hostname and resolv.conf.
_ETC = (
    "alternatives",
    "ca-certificates",
    "ca-certificates.conf",
    "group",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "passwd",
    "pki",
    "protocols",
    "services",
    "ssl",
    "timezone",
)
_ASK = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path]))"
MAX_LINKS = 200


class HostFiles:
    """What containers of path agents are made from. ``prepare`` per agent version, then `fill` and `settings` per session."""

    def __init__(self, config: IsolationConfig) -> None:
        self._config = config
        self._interpreters: dict[Path, list[Path]] = {}

    async def prepare(self, engine: Engine, agent: Agent) -> str:
        """The id of the image to use. Raises: LocalRuntimeError, EngineError."""
        self._interpreters[agent.python] = await asyncio.to_thread(_paths_of, agent.python)
        if self._config.image is not None:
            return await fetch(engine, self._config.image)
        if await engine.image(IMAGE) is None:
            await engine.load_image(_image(_empty_layer(), IMAGE))
        return await fetch(engine, IMAGE)

    def fill(self, order: SessionOrder) -> None:
        """The session's folder: its temporary folder, and links to the agent's files. Blocks."""
        (order.directory / "tmp").mkdir(mode=0o700)
        folder = order.agent.script.parent
        for name in sorted(os.listdir(folder))[:MAX_LINKS]:
            if not name.startswith(".") and name not in ("__pycache__", "tmp"):
                (order.directory / name).symlink_to(folder / name)

    def settings(self, order: SessionOrder, settings: dict[str, Any], env: dict[str, str]) -> None:
        """Add to a container's settings what makes it run the agent's script; ``env`` gets the session's folders."""
        agent, c = order.agent, self._config
        directory = str(order.directory)
        env |= {"HOME": directory, "PWD": directory, "TMPDIR": f"{directory}/tmp"}
        read_only = [*self._interpreters[agent.python], agent.script.parent, *c.read_only]
        if c.image is None:
            read_only += _system()
        binds = [f"{path}:{path}:ro" for path in _outermost(read_only)]
        binds += [f"{path}:{path}" for path in (order.directory, *c.writable)]
        tmp_bytes = Limits().tmp_bytes or 2**30
        if c.memory_bytes is not None:  # it is memory: full before the session is killed for it
            tmp_bytes = min(tmp_bytes, c.memory_bytes // 2)
        settings |= {
            "Cmd": [str(agent.python), str(agent.script)],
            "Entrypoint": [],
            "WorkingDir": directory,
        }
        settings["HostConfig"] |= {
            "Binds": [*settings["HostConfig"].get("Binds", ()), *binds],
            "CapDrop": ["ALL"],
            "ReadonlyRootfs": True,
            "Tmpfs": {"/tmp": f"rw,nosuid,nodev,size={tmp_bytes}"},
        }
        if os.geteuid() != 0:
            settings["User"] = f"{os.getuid()}:{os.getgid()}"


def _paths_of(python: Path) -> list[Path]:
    """Where an interpreter and what it can import lies."""
    try:
        done = subprocess.run([str(python), "-c", _ASK], capture_output=True, text=True, timeout=60, check=True)
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        raise LocalRuntimeError(f"cannot run {python}: {e}") from e
    package = Path(__file__).resolve().parents[2]
    paths = [Path(p) for p in found if os.path.isabs(p) and os.path.exists(p) and p not in ("/", "/tmp")]
    if Path(sys.executable) == python:
        paths.append(package)
    return [p for p in paths if not p.is_relative_to("/usr")] if Path("/usr") not in paths else paths


def _system() -> list[Path]:
    etc = [Path("/etc") / name for name in _ETC if (Path("/etc") / name).exists()]
    top = [Path("/", name) for name in _SYSTEM if not Path("/", name).is_symlink() and Path("/", name).exists()]
    extra = [Path(p) for p in ("/opt", "/nix/store") if Path(p).exists()]
    return [Path("/usr"), *top, *etc, *extra]


def _outermost(paths: list[Path]) -> list[Path]:
    """Each path once, and none that lies below another: the outer mount shows it already."""
    unique = sorted(set(paths))
    return [p for p in unique if not any(p != other and p.is_relative_to(other) for other in unique)]


def _empty_layer() -> bytes:
    """A root file system of empty folders, and of the links that this machine has in place of its /bin and /lib."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in _EMPTY:
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(folder)
        for name in _SYSTEM:
            link = Path("/", name)
            if link.is_symlink():
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(link)
                tar.addfile(entry)
    return out.getvalue()


def _image(layer: bytes, name: str) -> bytes:
    """An image of one layer, as an archive that engines load. Source: Docker Image Specification v1.2."""
    config = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    files = {"config.json": config, "manifest.json": manifest}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, data in {"layer.tar": layer, **{k: json.dumps(v).encode() for k, v in files.items()}}.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()
