"""Make a base image under the name that the examples' Dockerfiles begin with, where no registry is.

    python scripts/base_image.py docker.io/library/python:3.12-slim docker.io/library/python:3.12-slim-bookworm

Needs root, debootstrap and Podman. It is Debian with Python, pip and venv, from a mirror of Debian's packages. So its Python is
Debian's, whatever the name says: good to find out that a Dockerfile builds and its agent runs, not to deploy. The file system is
kept as an archive in this user's cache folder, made once (minutes), imported in seconds. AGENTCORE_RL_DEBIAN_MIRROR names another
mirror. Where pip is configured with folders of this machine, they are printed as options for `podman build`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SUITE, MIRROR = "bookworm", os.environ.get("AGENTCORE_RL_DEBIAN_MIRROR", "http://deb.debian.org/debian")
PACKAGES = ("python3", "python3-pip", "python3-venv", "ca-certificates")
DEBOOTSTRAP_S, PODMAN_S = 1800, 600
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
# Certificates and pip's settings of this machine get in, so that packages can be installed as they are here.
AS_THEY_ARE = (CERTIFICATES, "etc/pip.conf", "etc/xdg/pip")
# Programs that bring certificates of their own are told where the machine's are.
CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "NODE_EXTRA_CA_CERTS")
VARIABLES = dict.fromkeys(CERTIFICATE_VARIABLES, f"/{CERTIFICATES}")


def archive() -> Path:
    """The file system as a tar archive, made if it is not there. Raises: OSError, subprocess.SubprocessError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentcore-rl"
    made = cache / f"base-{SUITE}-{os.uname().machine}.tar"
    if made.exists():
        return made
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="base-", dir=cache) as scratch:
        root, tar = Path(scratch) / "root", Path(scratch) / "base.tar"
        command = ["debootstrap", "--variant=minbase", "--merged-usr", f"--include={','.join(PACKAGES)}"]
        subprocess.run([*command, SUITE, str(root), MIRROR], check=True, timeout=DEBOOTSTRAP_S, stdout=sys.stderr)
        # pip may install into this image: it has no other user of Debian's Python.
        for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            marker.unlink()
        (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        left_out = ["./dev/*", "./var/cache/apt/archives/*.deb", "./var/lib/apt/lists/*", "./etc/hostname"]
        words = ["tar", "--create", "--file", str(tar), "--directory", str(root), *[f"--exclude={p}" for p in left_out]]
        subprocess.run([*words, "."], check=True, timeout=PODMAN_S)
        tar.replace(made)
    return made


def with_this_machines_settings(image: str) -> None:
    """Lay certificates and pip's settings of this machine over the image."""
    with tempfile.TemporaryDirectory(prefix="agentcore-rl-base-") as scratch:
        present = [path for path in AS_THEY_ARE if (Path("/") / path).exists()]
        words = ["tar", "--create", "--dereference", "--file", f"{scratch}/over.tar", "--directory", "/", *present]
        subprocess.run(words, check=True, timeout=PODMAN_S)
        variables = " ".join(f"{name}={value}" for name, value in VARIABLES.items())
        (Path(scratch) / "Dockerfile").write_text(f"FROM {image}\nADD over.tar /\nENV {variables}\n")
        command = ["podman", "build", "--quiet", "--pull=never", "--tag", image, scratch]
        subprocess.run(command, check=True, timeout=PODMAN_S, stdout=sys.stderr)


def local_folders() -> list[str]:
    """Folders of this machine that pip here is configured to take packages from."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.findall(r"(?:file://)?(/[^\s'\"]+)", told.stdout)
    return sorted({path for path in found if Path(path).is_dir()})


def main(names: list[str]) -> None:
    if not names:
        raise SystemExit(__doc__)
    command = ["podman", "import", "--quiet", "--change", "CMD=bash", str(archive()), names[0]]
    subprocess.run(command, check=True, timeout=PODMAN_S, stdout=sys.stderr)
    with_this_machines_settings(names[0])
    for name in names[1:]:
        subprocess.run(["podman", "tag", *names[:1], name], check=True, timeout=60)
    print(" ".join(f"--volume {path}:{path}:ro" for path in local_folders()))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, subprocess.SubprocessError) as e:
        raise SystemExit(f"no base image: {e}") from None
