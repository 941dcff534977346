"""Containers for agents given by path: an empty image with the machine's programs and the agent's environment, read-only."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...contract import AS_IS
from ...isolation.cover import Cover
from ...isolation.project import Project, link_files
from ...isolation.sandbox import interpreter_paths, project_of
from ..agents.agent import Agent
from .client import ContainerEngine

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
AS_IS_STARTER = "agentcore_rl_toolkit.app.deployed"  # a module of the agent's environment
IMAGE = "localhost/agentcore-rl/host:2"
PACKAGE = Path(__file__).resolve().parents[2]
TMP_BYTES = 2**30
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_EMPTY = ("dev", "etc", "home", "mnt", "opt", "proc", "root", "run", "sys", "tmp", "usr", "var")
# Of /etc only what programs need to run. The engine brings hosts, hostname and resolv.conf.
_ETC = (
    *("alternatives", "ca-certificates", "ca-certificates.conf", "group", "ld.so.cache", "ld.so.conf", "ld.so.conf.d"),
    *("localtime", "mime.types", "nsswitch.conf", "os-release", "passwd", "pki", "protocols", "services", "ssl"),
    "timezone",
)


async def prepare(engine: ContainerEngine) -> str:
    """Load the empty image and return its id. Raises: EngineError."""
    if await engine.find_image(IMAGE) is None:
        async with engine.asked() as docker:
            await docker.images.import_image(_image(_empty_layer(), IMAGE))
    return await engine.fetch(IMAGE)


def shown(agent: Agent) -> list[Path]:
    """Return the paths of this machine that the agent's script needs. Blocks."""
    etc = [Path("/etc") / name for name in _ETC]
    top = [Path("/", name) for name in _SYSTEM if not Path("/", name).is_symlink()]
    system = [Path("/usr"), *top, *etc, Path("/opt"), Path("/nix/store")]
    return [*interpreter_paths(agent.interpreter), PACKAGE, project_of(agent.script), *system]


def add(
    agent: Agent,
    directory: Path,
    settings: dict[str, Any],
    env: dict[str, str],
    cover: Cover,
    copied: Sequence[Path] = (),
) -> None:
    """Add the settings with which a container runs the agent's script. Fill the session's folder, too. Blocks."""
    (directory / "tmp").mkdir(mode=0o700)
    project = Project.of(agent.script)
    link_files(project.shown, str(directory), [*map(str, copied)])
    env |= {"HOME": str(directory), "PWD": str(directory), "TMPDIR": f"{directory}/tmp"}
    env.setdefault("PYTHONPATH", os.pathsep.join(project.import_paths))
    what = ["-m", project.module] if project.package else [str(agent.script)]
    if env.get(AS_IS):
        what = ["-m", AS_IS_STARTER, *what]
    host = settings["HostConfig"]
    cover.make_mount_point(os.path.realpath(directory))
    paths = {path for path in shown(agent) if path.exists()}
    outermost = sorted(path for path in paths if paths.isdisjoint(path.parents))
    mounts = {str(path): mount(path) for path in outermost}
    mounts |= {found["Target"]: found for found in host["Mounts"]}
    mounts |= {path: mount(path, source=source) for path, source in cover.mounts.items() if os.path.exists(source)}
    tmp_bytes = TMP_BYTES if "Memory" not in host else min(TMP_BYTES, host["Memory"] // 2)  # it is memory
    settings |= {"Cmd": [str(agent.interpreter), *what], "Entrypoint": [], "WorkingDir": str(directory)}
    host |= {
        "Mounts": [*mounts.values(), mount(directory, read_only=False)],
        "CapDrop": ["ALL"],
        "ReadonlyRootfs": True,
        "Tmpfs": {"/tmp": f"rw,nosuid,nodev,size={tmp_bytes}"},
    }
    if os.geteuid() != 0:
        settings["User"] = f"{os.getuid()}:{os.getgid()}"


def mount(path: Path | str, *, source: str | None = None, read_only: bool = True) -> dict[str, Any]:
    """Show a path of this machine in a container. Unlike `Binds` this allows colons in names."""
    return {"Type": "bind", "Source": source or str(path), "Target": str(path), "ReadOnly": read_only}


def _empty_layer() -> bytes:
    """Return a root file system of empty folders, and of the links that this machine has in place of its /bin and /lib."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in _EMPTY:
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(folder)
        for name in _SYSTEM:
            if os.path.islink(f"/{name}"):
                tar.add(f"/{name}", arcname=name)
    return out.getvalue()


def _image(layer: bytes, name: str) -> bytes:
    """Return an image of one layer, as an archive that engines load. Source: Docker Image Specification v1.2."""
    config = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
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
