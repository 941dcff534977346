"""Make a base image under the name that the examples' Dockerfiles begin with, where no registry is. Needs Debian, root, Podman.

    python scripts/base_image.py docker.io/library/python:3.12-slim docker.io/library/python:3.12-slim-bookworm

It is made of this machine's own Debian packages: Python, pip, venv, apt and what these depend on, with nothing else of the
machine. So its Python is Debian's, whatever the name says: good to find out that a Dockerfile builds and its agent runs, not to
deploy. Where pip is configured with folders of this machine, they are printed as options for `podman build`.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

PACKAGES = (
    "python3",
    "python3-pip",
    "python3-venv",
    "passwd",
    "apt",
    "bash",
    "ca-certificates",
    "debian-archive-keyring",
    "base-files",
)
FOLDERS = {
    "dev": 0o755,
    "proc": 0o755,
    "sys": 0o755,
    "run": 0o755,
    "tmp": 0o1777,
    "root": 0o700,
    "var/tmp": 0o1777,
    "home": 0o755,
}
LINKS = {
    "bin": "usr/bin",
    "sbin": "usr/sbin",
    "lib": "usr/lib",
    "lib64": "usr/lib64",
    "usr/local/bin/python": "/usr/bin/python3",
}
# No account or address of this machine gets in; certificates and pip's settings do, so that packages can be installed.
ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n_apt:x:42:65534::/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nadm:x:4:\ntty:x:5:\nmail:x:8:\nshadow:x:42:\nutmp:x:43:\nstaff:x:50:\nnogroup:x:65534:\n",
    "etc/shadow": "root:*:19000:0:99999:7:::\n",
    "etc/gshadow": "root:*::\n",
}
AS_THEY_ARE = (
    "etc/ssl/certs/ca-certificates.crt",
    "etc/pip.conf",
    "etc/xdg/pip",
    "etc/apt/sources.list.d",
    "etc/apt/sources.list",
    "etc/ld.so.cache",
)


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


def closure() -> list[str]:
    """The packages and all they depend on, as installed here; essential ones too."""
    told = output(
        "apt-cache", "depends", "--recurse", "--installed", "--no-recommends", "--no-suggests", "--no-conflicts", "--no-breaks",
        "--no-replaces", "--no-enhances", *PACKAGES, *essential(),
    )  # fmt: skip
    return sorted({line.split(":")[0] for line in told.splitlines() if re.match(r"[a-z0-9]", line)} & installed())


def essential() -> list[str]:
    lines = output("dpkg-query", "-W", "-f", "${Package} ${Essential} ${db:Status-Abbrev}\n").splitlines()
    return [line.split()[0] for line in lines if line.split()[1:2] == ["yes"]]


def installed() -> set[str]:
    lines = output("dpkg-query", "-W", "-f", "${Package} ${db:Status-Abbrev}\n").splitlines()
    return {line.split()[0] for line in lines if line.split()[1:2] == ["ii"]}


def write(out: tarfile.TarFile, packages: Iterable[str]) -> None:
    packages = list(packages)
    for name, mode in FOLDERS.items():
        folder = tarfile.TarInfo(name)
        folder.type, folder.mode = tarfile.DIRTYPE, mode
        out.addfile(folder)
    for name, target in LINKS.items():
        link = tarfile.TarInfo(name)
        link.type, link.linkname = tarfile.SYMTYPE, target
        out.addfile(link)
    for name, text in {**ACCOUNTS, "var/lib/dpkg/status": status(packages)}.items():
        add(out, name, text.encode(), 0o640 if "shadow" in name else 0o644)
    taken = {*FOLDERS, *LINKS, *ACCOUNTS, "var/lib/dpkg/status"}
    files = output("dpkg-query", "-L", *packages).splitlines()
    kept = [
        *AS_THEY_ARE,
        *[f"var/lib/dpkg/info/{p.name}" for p in Path("/var/lib/dpkg/info").iterdir() if of(p, packages)],
    ]
    for file in dict.fromkeys([*(f.lstrip("/") for f in files if f.startswith("/")), *kept]):
        name = re.sub(r"^(bin|sbin|lib|lib64)/", r"usr/\1/", file)
        path = Path("/") / name
        documentation = name.startswith(("usr/share/doc/", "usr/share/man/", "usr/share/locale/"))
        if name in taken or name.rstrip(".") == "" or documentation or not (path.exists() or path.is_symlink()):
            continue
        taken.add(name)
        out.add(path, arcname=name, recursive=file in AS_THEY_ARE, filter=owned_by_root)


def owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """pip may install into this image: it has no other user of Debian's Python."""
    return None if entry.name.endswith("EXTERNALLY-MANAGED") else entry


def of(path: Path, packages: list[str]) -> bool:
    return path.name.split(".")[0].split(":")[0] in packages


def status(packages: list[str]) -> str:
    entries = Path("/var/lib/dpkg/status").read_text().split("\n\n")
    return "\n\n".join(e for e in entries if e.partition("\n")[0].removeprefix("Package: ") in packages) + "\n\n"


def add(out: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    out.addfile(entry, io.BytesIO(data))


def local_folders() -> list[str]:
    """Folders of this machine that pip here is configured to take packages from."""
    told = output(sys.executable, "-m", "pip", "config", "list")
    found = re.findall(r"(?:file://)?(/[^\s'\"]+)", told)
    return sorted({path for path in found if Path(path).is_dir()})


def main(names: list[str]) -> None:
    if not names:
        raise SystemExit(__doc__)
    process = subprocess.Popen(
        ["podman", "import", "--quiet", "--change", "CMD=bash", "-", names[0]], stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    with tarfile.open(fileobj=process.stdin, mode="w|") as out:
        write(out, closure())
    process.stdin.close()
    if process.wait(600) != 0:
        raise SystemExit("podman import failed")
    for name in names[1:]:
        subprocess.run(["podman", "tag", names[0], name], check=True, timeout=60)
    print(" ".join(f"--volume {path}:{path}:ro" for path in local_folders()))


if __name__ == "__main__":
    main(sys.argv[1:])
