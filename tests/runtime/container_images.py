"""A container engine with a storage of its own for the tests, and an image in it made of this machine's Python.

No registry is asked: the base image is the interpreter of the system with the part of its library that an HTTP server needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import ipaddress
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from serving import wait_for

PYTHON = Path("/usr/bin/python3")
PROGRAMS = ("/bin/sh", "/bin/sleep", "/bin/cat", "/bin/ls", "/usr/bin/id")
AGENT = Path(__file__).parent / "deployable" / "container.py"
IMAGE = "localhost/agentcore-rl-test/agent:latest"
_LEFT_OUT = (
    "test",
    "idlelib",
    "tkinter",
    "lib2to3",
    "ensurepip",
    "distutils",
    "pydoc_data",
    "unittest",
    "asyncio",
    "config",
)

CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=1024:{files}", "nproc=1024:4096"]
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
default_network = "{network}"
network_config_dir = "{folder}/networks"
"""
STORAGE_CONF = """\
[storage]
driver = "{driver}"
graphroot = "{folder}/graph"
runroot = "{folder}/run"
[storage.options.overlay]
skip_mount_home = "true"
"""


def why_not() -> str | None:
    """Why there is no container engine for the tests here."""
    if os.geteuid() != 0:
        return "the tests' container engine needs root"
    missing = [name for name in ("podman", "runc") if shutil.which(name) is None]
    if missing or not PYTHON.exists():
        return f"not installed: {', '.join(missing) or PYTHON}"
    return None


def configure(folder: Path) -> dict[str, str]:
    """Variables that give Podman a storage and a bridge of its own: other runs of the tests may have engines at the same time."""
    name = f"acrl{os.getpid()}"  # a bridge's name has 15 characters at most
    (folder / "networks").mkdir()
    (folder / "networks" / f"{name}.json").write_text(json.dumps(network(name, os.getpid())))
    files = min(20_000, os.sysconf("SC_OPEN_MAX"))
    (folder / "containers.conf").write_text(CONTAINERS_CONF.format(files=files, network=name, folder=folder))
    (folder / "storage.conf").write_text(STORAGE_CONF.format(driver="overlay", folder=folder))
    return {
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
    }


def network(name: str, number: int) -> dict[str, Any]:
    """A bridge as Podman keeps it. Of 16,384 small networks within 10.192.0.0/10, the one of this number."""
    first = (10 << 24) + (192 << 16) + number % 2**14 * 2**8
    address = ipaddress.IPv4Address
    return {
        "name": name,
        "id": hashlib.sha256(name.encode()).hexdigest(),
        "driver": "bridge",
        "network_interface": name,
        "created": "2025-01-01T00:00:00Z",
        "subnets": [{"subnet": f"{address(first)}/24", "gateway": str(address(first + 1))}],
        "ipv6_enabled": False,
        "internal": False,
        "dns_enabled": False,
        "ipam_options": {"driver": "host-local"},
    }


def podman(*arguments: str, check: bool = True) -> str:
    """Run podman in the configured storage; its output."""
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout.strip()


def containers() -> list[str]:
    """Names of all containers, ended ones too."""
    return podman("ps", "--all", "--format", "{{.Names}}").split()


def base_archive() -> bytes:
    """A root file system with Python and a shell, as an uncompressed tar archive."""
    version = Path(os.path.realpath(PYTHON)).name
    library = Path("/usr/lib") / version
    modules = sorted(p for p in (library / "lib-dynload").glob("*.so") if "test" not in p.name)
    files = {str(PYTHON), *PROGRAMS}
    files |= _libraries([*files, *map(str, modules)])
    out = io.BytesIO()

    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = Path(entry.name).parts[3:]
        unwanted = bool(parts) and (
            parts[0].startswith(_LEFT_OUT) or "__pycache__" in parts or parts[0] == "dist-packages"
        )
        return None if unwanted else entry

    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in ("app", "dev", "etc", "proc", "root", "run", "sys", "tmp", "var"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(folder)
        for name in sorted(files):
            tar.add(os.path.realpath(name), arcname=name.lstrip("/"), recursive=False)
        tar.add(library, arcname=str(library).lstrip("/"), filter=wanted)
        entry = tarfile.TarInfo("etc/passwd")
        content = b"root:x:0:0:root:/root:/bin/sh\n"
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def _libraries(programs: list[str]) -> set[str]:
    done = subprocess.run(["ldd", *programs], capture_output=True, text=True, timeout=300, check=False)
    return {
        word for line in done.stdout.splitlines() if line[:1].isspace() for word in line.split() if word.startswith("/")
    }


def build_agent(folder: Path, *, name: str = IMAGE, extra: str = "") -> None:
    """Build the tests' agent image from a Dockerfile over the base image."""
    shutil.copy(AGENT, folder / "agent.py")
    (folder / "Dockerfile").write_text(
        f"FROM localhost/agentcore-rl-test/base\nCOPY agent.py /app/agent.py\n{extra}WORKDIR /app\n"
        'CMD ["python3", "/app/agent.py"]\n'
    )
    podman("build", "--quiet", "--tag", name, str(folder))


def end_monitors(folder: Path) -> None:
    """Kill what the engine keeps for five minutes after each command; it would then make and mount its storage anew."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == "conmon" and any(str(folder) in word for word in process.cmdline()):
                process.kill()


@contextlib.contextmanager
def service(folder: Path) -> Iterator[None]:
    """Podman's service, as `systemctl --user start podman.socket` runs one."""
    (folder / "podman").mkdir()
    address = folder / "podman" / "podman.sock"
    with (folder / "service.log").open("wb") as log:
        words = ["podman", "system", "service", "--time=0", f"unix://{address}"]
        process = subprocess.Popen(words, stdout=log, stderr=log, cwd=folder)
    try:
        wait_for(address.exists, process=process)
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="session")
def engine_storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Podman in a storage of its own with the agent's image, for as long as the tests run."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("engine")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in configure(folder).items():
            patch.setenv(name, value)
        for name in ("DOCKER_HOST", "CONTAINER_HOST"):
            patch.delenv(name, raising=False)
        archive = folder / "base.tar"
        archive.write_bytes(base_archive())
        first = subprocess.run(
            ["podman", "import", "--quiet", str(archive), "localhost/agentcore-rl-test/base:latest"],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        archive.unlink()
        if first.returncode != 0:
            pytest.skip(f"podman does not work here: {first.stderr.strip().splitlines()[-1]}")
        context = folder / "context"
        context.mkdir()
        build_agent(context)
        patch.setenv("XDG_RUNTIME_DIR", str(folder))  # where the service of a user listens
        with service(folder):
            yield folder
        podman("rm", "--all", "--force", "--time=0", check=False)
        podman("rmi", "--all", "--force", check=False)
        end_monitors(folder)
        subprocess.run(["umount", str(folder / "graph" / "overlay")], capture_output=True, timeout=20, check=False)
