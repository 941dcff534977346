"""Files that hold secrets: written for this user alone, from their first byte on, and read from nowhere else."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import MutableMapping
from pathlib import Path

from ..errors import ConfigError

CREDENTIALS = "AGENTCORE_RL_CREDENTIALS"  # environment variable: KEY:SECRET, several of them with blanks in between
ON_A_COMMAND_LINE = (
    "a secret on a command line is shown to every user of this machine: write KEY:SECRET into a file of mode 0600 and give "
    f"--credential-file FILE, or set {CREDENTIALS} in the environment"
)


def make_private(path: Path) -> None:
    """Take the rights of others away from a file or folder of this user, should it have been made with them."""
    with contextlib.suppress(OSError):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & 0o077 and not path.is_symlink():
            path.chmod(mode & 0o700)


def credentials_from(environment: MutableMapping[str, str], file: Path | None) -> dict[str, str]:
    """Access keys and their secrets from the environment variable, which is taken out of it, and from a file.

    So nothing that this process starts inherits them. Raises: ConfigError.
    """
    found = parse_credentials(environment.pop(CREDENTIALS, ""), CREDENTIALS)
    if file is not None:
        found |= parse_credentials(read_private(file), str(file))
        if not found:
            raise ConfigError(f"{file} holds no credential; write KEY:SECRET into it, one on a line")
    return found


def parse_credentials(text: str, where: str) -> dict[str, str]:
    """``KEY:SECRET`` separated by white space; lines that begin with # are skipped. Raises: ConfigError, without the text."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        for word in line.split() if not line.lstrip().startswith("#") else ():
            key, _, secret = word.partition(":")
            if not key or not secret:
                raise ConfigError(f"{where} must hold KEY:SECRET, one or several with white space in between")
            found[key] = secret
    return found


def read_private(file: Path) -> str:
    """The content of a file that nobody else can read. Raises: ConfigError when others can, or it cannot be read."""
    try:
        with file.open() as opened:
            info = os.fstat(opened.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise ConfigError(f"{file} is no regular file")
            if info.st_uid not in (os.getuid(), 0):
                raise ConfigError(f"{file} belongs to another user, who can change it; make one of your own")
            if info.st_mode & 0o077:
                raise ConfigError(
                    f"{file} can be read by other users of this machine (mode {stat.S_IMODE(info.st_mode):04o}): "
                    f"chmod 600 {file}, and change the secret if they may have seen it"
                )
            return opened.read()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file} cannot be read: {e}") from e
