"""Keys of the servers of this machine: made at a server's start, in a file that only its user can read, found by the address.

Theory of operation. Every user of a machine reaches every port of its loopback, so changes of a server's state need a secret.
A server without one makes a key and writes it to a file of mode 0600 in a folder of mode 0700. The file's name is the kind of the
server and its port, so that clients of the same user find it by the address. The file is removed with the server. A killed
server leaves the file, but its key is useless: the next server makes another one. Clients look keys up for
addresses of the loopback only, so they send none to another machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import ConfigError
from .host_check import is_loopback
from .process import private_folder, write_private

RUNTIME = "runtime"  # a kind of server whose key is KEY:SECRET, to sign requests with
_ANY = ("0.0.0.0", "::", "localhost")


def make() -> str:
    return secrets.token_urlsafe(24)


def is_here(host: str) -> bool:
    """Return True if a server on ``host`` can leave its key in a file. Clients find it under the loopback's addresses."""
    return host in _ANY or is_loopback(host)


def leave(kind: str, url: str, key: str) -> Path:
    """Write the key of this process's server for its user's clients. Returns the file. Raises: ConfigError."""
    path = _path(kind, url)
    if path is None:
        raise ConfigError(f"a key for {url} has to be given: only servers on loopback leave theirs in a file")
    try:
        write_private(path, json.dumps({"key": key, "pid": os.getpid()}))
    except OSError as e:
        raise ConfigError(f"the key file {path} cannot be written: {e.strerror}") from e
    return path


def find(kind: str, url: str) -> str | None:
    """Find the key that a live server of this user left at this address, or None if there is none."""
    try:
        path = _path(kind, url)
        content = {} if path is None else json.loads(path.read_text())
        os.kill(content["pid"], 0)
        return str(content["key"])
    except (OSError, ValueError, KeyError):
        return None


def key_for(kind: str, url: str, variable: str) -> str | None:
    """Find the key that clients send: in this variable of the environment, otherwise in the server's file."""
    return os.environ.get(variable) or find(kind, url)


def credential_of_runtime(url: str) -> tuple[str, str] | None:
    """Return this user's access key and secret for the local runtime at this address, or None."""
    access_key, sign, secret = (find(RUNTIME, url) or "").partition(":")
    return (access_key, secret) if sign else None


def forget(path: Path | None) -> None:
    """Remove a key file that this process left. Another server's, which took the port since, stays."""
    if path is not None:
        with contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_text())["pid"] == os.getpid():
                path.unlink()


def _path(kind: str, url: str) -> Path | None:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    folder = Path(tempfile.gettempdir()) / f"agentcore-rl-keys-{os.getuid()}"
    return private_folder(folder) / f"{kind}-{port}" if is_here(host) else None
