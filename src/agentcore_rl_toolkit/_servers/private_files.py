"""Files that hold secrets: written for this user alone, from their first byte on, and read from nowhere else."""

from __future__ import annotations

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


def credentials_from(environment: MutableMapping[str, str], file: Path | None) -> dict[str, str]:
    """Access keys and their secrets from the environment variable, which is taken out of it, and from a file.

    So nothing that this process starts inherits them. Raises: ConfigError, without the text.
    """
    words = environment.pop(CREDENTIALS, "").split()
    if file is not None:
        words += read_private(file).split() or [""]
    pairs = [word.partition(":") for word in words]
    if not all(key and secret for key, _, secret in pairs):
        raise ConfigError(
            f"{CREDENTIALS} and {file or '--credential-file'} hold KEY:SECRET, several with white space in between"
        )
    return {key: secret for key, _, secret in pairs}


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
