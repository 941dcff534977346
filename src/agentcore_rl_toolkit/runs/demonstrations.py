"""A run's good rollouts as sequences to imitate: exactly the ids that were sampled, with the mask that trains."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .reader import Query, RunReader
from .record import TokenSequence


def demonstrations(
    folder: Path, *, min_reward: float | None = None, best_of_group: bool = False
) -> Iterator[dict[str, Any]]:
    """The training sequences of usable rollouts with at least this reward; of each group's, with ``best_of_group``, the best.

    Rows have ``input_ids`` and ``assistant_masks`` (1: sampled and trained), both (T,), as TRL's SFTTrainer reads them, and
    ``reward``, ``session_id``, ``input_id``. Raises: ConfigError.
    """
    with RunReader(folder) as run:
        query = Query(usable=True, reward_from=min_reward, sort="reward", descending=True)
        rows = run.rollouts(query, limit=run.count())
        if best_of_group:
            best: dict[tuple[str, int | None, str], dict[str, Any]] = {}
            for row in rows:
                best.setdefault((row["phase"], row["step"], row["grp"]), row)
            rows = list(best.values())
        for row in rows:
            for encoded in (run.rollout(row["id"]) or {}).get("sequences") or ():
                sequence = TokenSequence.decoded(encoded)
                if any(sequence.mask):
                    yield {
                        "input_ids": list(sequence.ids),
                        "assistant_masks": list(sequence.mask),
                        "reward": row["reward"],
                        "session_id": row["session_id"],
                        "input_id": row["grp"],
                    }


def write_demonstrations(rows: Iterable[dict[str, Any]], target: Path) -> int:
    """Write them as JSON, one a line; returns how many."""
    lines = [json.dumps(row) + "\n" for row in rows]
    target.write_text("".join(lines))
    return len(lines)
