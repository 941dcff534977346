"""The entries of a list of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..runs import RunReader, read_config
from ..runs.folder import status


def head(folder: Path) -> dict[str, Any]:
    """Return a run's entry in a list of runs. ``problem`` is the reason why a run cannot be read.

    It has the `reward` of the last training step (or of the last evaluation), its 95 % `interval` over inputs, and the
    `rewards` of all such steps.
    """
    config, path, problem = read_config(folder), folder.resolve(), None
    try:
        with RunReader(folder) as run:
            steps = run.steps()
    except ConfigError as e:
        steps, problem = [], str(e)
    trained = [step for step in steps if step["phase"] == "train" and step["step"] is not None]
    last = (trained or steps or [{}])[-1]
    return {
        "name": path.name,
        "path": str(path),
        "status": status(folder),
        **{name: Path(str(config.get(name) or "")).name or None for name in ("model", "data")},
        "rollouts": None if problem else sum(step["rollouts"] for step in steps),
        "steps": None if problem else len(trained),
        "rewards": [step["reward"] for step in trained or steps],
        **{name: last.get(name) for name in ("reward", "interval")},
        "first_s": min((step["first_s"] for step in steps if step["first_s"] is not None), default=None),
        "last_s": max((step["last_s"] for step in steps if step["last_s"] is not None), default=None),
        "problem": problem,
    }
