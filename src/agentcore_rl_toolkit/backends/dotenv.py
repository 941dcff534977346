"""`.env` files: variables of a run beside its configuration."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import ConfigError
from .data import read_text

_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")


def read_dotenv(path: Path) -> dict[str, str]:
    """The variables of a `.env` file: ``NAME=value`` lines, with or without ``export``, quotes and ``#`` comments.

    Nothing is expanded, as a shell would with ``$NAME``. Raises: ConfigError naming the line, never its value.
    """
    found: dict[str, str] = {}
    for number, raw in enumerate(read_text(path).split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError(f"{path}:{number} is not NAME=value")
        name, value = match.groups()
        quoted = re.match(r"""(["'])(.*?)\1\s*(?:#.*)?$""", value)
        if quoted is None and value[:1] in ("'", '"'):
            raise ConfigError(f"{path}:{number}: the quote of {name} is not closed")
        found[name] = quoted.group(2) if quoted else re.sub(r"(^|\s+)#.*$", "", value)
    return found
