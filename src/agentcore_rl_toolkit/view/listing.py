"""What a list of runs shows of each: two queries, and the ends of its small files."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..runs import ROLLOUTS, read_config, status
from ..runs.schema import open_to_read
from ..stats.intervals import interval

# A reward is a mean over inputs, so groups come first.
_STEPS = (
    "SELECT phase, step, SUM(n) AS rollouts, AVG(score) AS reward, MIN(first_s) AS first_s, MAX(last_s) AS last_s FROM ("
    "SELECT phase, step, COUNT(*) AS n, AVG(score) AS score, MIN(ended_s - COALESCE(elapsed_s, 0)) AS first_s, "
    "MAX(ended_s) AS last_s, MIN(id) AS first FROM rollouts GROUP BY phase, step, grp) GROUP BY 1, 2 ORDER BY MIN(first)"
)
_INPUTS = "SELECT AVG(score) FROM rollouts WHERE phase = ? AND step IS ? AND score IS NOT NULL GROUP BY grp"


def head(folder: Path) -> dict[str, Any]:
    """Return what a list shows of a run: `reward` of the last training step (else of the last evaluation), `interval`, its 95 %
    interval over inputs, and `rewards` of all such steps. ``problem`` says why a run cannot be read.
    """
    config, path = read_config(folder), folder.resolve()
    found: dict[str, Any] = {
        "name": path.name,
        "path": str(path),
        "status": status(folder),
        **{name: _short(config.get(name)) for name in ("model", "data")},
        **dict.fromkeys(("rollouts", "steps", "reward", "interval", "first_s", "last_s", "problem")),
        "rewards": [],
    }
    try:
        with contextlib.closing(open_to_read(folder / ROLLOUTS)) as database:
            every = [dict(row) for row in database.execute(_STEPS)]
            trained = [step for step in every if step["phase"] == "train" and step["step"] is not None]
            of = (trained or every)[-1:]
            scores = [row[0] for step in of for row in database.execute(_INPUTS, (step["phase"], step["step"]))]
    except (ConfigError, sqlite3.Error) as e:
        return {**found, "problem": str(e)}
    times = [step[name] for step in every for name in ("first_s", "last_s") if step[name] is not None]
    return found | {
        "rollouts": sum(step["rollouts"] for step in every),
        "steps": len(trained),
        "rewards": [step["reward"] for step in trained or every],
        "reward": of[0]["reward"] if of else None,
        "interval": interval(scores) if scores else None,
        "first_s": min(times, default=None),
        "last_s": max(times, default=None),
    }


def _short(value: Any) -> str | None:
    """The last part of a path or of a model's name."""
    return Path(value).name if isinstance(value, str) and value else None
