"""A run's good rollouts as sequences to imitate: exactly the ids that were sampled, with the mask that trains."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError, MissingExtraError
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
    """Write them to a .jsonl or .parquet file; returns how many. Raises: ConfigError, MissingExtraError without pyarrow."""
    rows = list(rows)
    if target.suffix == ".jsonl":
        target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif target.suffix == ".parquet":
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as e:
            raise MissingExtraError("writing Parquet needs pyarrow. Install it with:\n    pip install pyarrow") from e
        pq.write_table(pa.Table.from_pylist(rows), target)
    else:
        raise ConfigError(f"{target.name} must end in .jsonl or .parquet")
    return len(rows)
