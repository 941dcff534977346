"""Agents of projects that AWS's command `agentcore` makes (npm package `@aws/agentcore`): their files and variables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..options import read_dotenv

CONFIG = Path("agentcore") / "agentcore.json"
SECRETS = Path("agentcore") / ".env.local"
DEPLOYED = Path("agentcore") / ".cli" / "deployed-state.json"
_chosen: dict[Path, str] = {}  # files of runtimes -> the name by which the user chose it


def find_runtime(name: str, folder: Path) -> Path | None:
    """Return the file of the runtime of this name in the folder's project, or None if the folder is in no project.

    Raises: ConfigError if the project has no such runtime, or none in Python.
    """
    if (root := _project_of(folder)) is None:
        return None
    runtimes = {entry["name"]: file for file, entry in _runtimes(root)}
    if name not in runtimes:
        raise ConfigError(f"{root / CONFIG} has no runtime {name!r}; it has {', '.join(sorted(runtimes)) or 'none'}")
    file = runtimes[name]
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError(f"runtime {name!r} starts {file}, which is not an existing file of Python")
    _chosen[file] = name
    return file


def deployed_arn(name: str, folder: Path) -> str | None:
    """Return the ARN of the runtime of this name if the folder's project is deployed, otherwise None.

    Raises: ConfigError if several targets have it.
    """
    if (root := _project_of(folder)) is None or not (root / DEPLOYED).is_file():
        return None
    targets = _read(root, DEPLOYED).get("targets") or {}
    runtimes = {target: (state.get("resources") or {}).get("runtimes") or {} for target, state in targets.items()}
    found = {target: each[name]["runtimeArn"] for target, each in runtimes.items() if name in each}
    if len(found) > 1:
        which = ", ".join(f"{target} ({arn})" for target, arn in sorted(found.items()))
        raise ConfigError(f"{name!r} is deployed to several targets: {which}; give --agent one of the ARNs")
    return next(iter(found.values()), None)


def variables_of(agent: Path) -> dict[str, str]:
    """Return the variables of an agent's file that is a runtime of such a project, as `agentcore dev` sets them.

    They are the runtime's ``envVars``, those of ``agentcore/.env.local``, and a placeholder for each missing API key: the gateway
    answers the model calls.
    """
    root = _project_of(agent.parent)
    entries = {} if root is None else {entry["name"]: entry for file, entry in _runtimes(root) if file == agent}
    if root is None or not entries:
        return {}
    entry = entries.get(_chosen.get(agent)) or next(iter(entries.values()))
    credentials = _read(root, CONFIG).get("credentials") or ()
    names = [credential["name"].replace("-", "_").upper() for credential in credentials]
    keys = {f"AGENTCORE_CREDENTIAL_{name}": "placeholder" for name in names}
    own = {variable["name"]: str(variable["value"]) for variable in entry.get("envVars") or ()}
    return {"LOCAL_DEV": "1", **keys, **own, **read_dotenv(root / SECRETS)}


def _project_of(folder: Path) -> Path | None:
    return next((place for place in (folder.resolve(), *folder.resolve().parents) if (place / CONFIG).is_file()), None)


def _read(root: Path, file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((root / file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{root / file} cannot be read: {e}") from e
    if not isinstance(found, Mapping):
        raise ConfigError(f"{root / file} must be a JSON object")
    return found


def _runtimes(root: Path) -> list[tuple[Path, Mapping[str, Any]]]:
    """Return the files and entries of runtimes. An entry point may have the name of a function after the file."""
    try:
        return [
            ((root / (entry.get("codeLocation") or ".") / entry["entrypoint"].partition(":")[0]).resolve(), entry)
            for entry in _read(root, CONFIG).get("runtimes") or ()
            if entry["name"]
        ]
    except (AttributeError, KeyError, TypeError) as e:
        raise ConfigError(f"{root / CONFIG} has a runtime that cannot be read: {e!r}") from e
