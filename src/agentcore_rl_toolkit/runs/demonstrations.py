"""A run's good rollouts as sequences to imitate: exactly the ids that were sampled, with the mask that trains."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..contract import TRUNCATED_REASONS
from ..errors import ConfigError, MissingExtraError
from .reader import Query, RunReader
from .record import TokenSequence

_LISTED_REWARDS = 6


def demonstrations(
    folder: Path, *, min_reward: float | None, best_of_group: bool = False
) -> tuple[list[dict[str, Any]], str]:
    """Select the training rollouts that ended `ok`, are usable, and have at least this reward; with ``best_of_group`` the best of
    each group. A rollout in which a trained reply was cut off, or a trained call does not parse, is not selected.

    Returns a row for each sequence, and a line that reports the selection. Rows have ``input_ids`` and ``assistant_masks`` (1:
    sampled and trained), both (T,), as TRL's SFTTrainer reads them, and ``reward``, ``session_id``, ``input_id``.
    Raises: ConfigError without ``min_reward``, with the rewards that there are, and when nothing is left.
    """
    rows: list[dict[str, Any]] = []
    imitated: list[tuple[int | None, str]] = []  # the group of each rollout
    fit = Query(phase="train", outcome="ok", usable=True, sort="reward", descending=True)
    with RunReader(folder) as run:
        total = run.count()
        found = [row for row in run.rollouts(fit, limit=total) if row["reward"] is not None]
        rewards = [row["reward"] for row in found]
        if not found:
            raise ConfigError(
                f"nothing to imitate: {run.name} has no rollout of a training that ended ok, is usable and has a reward. "
                "`agentcore-rl eval --for-training` samples rollouts to train on"
            )
        if min_reward is None or math.isnan(min_reward):
            counts = ", ".join(f"{n} x {value:g}" for value, n in Counter(rewards).most_common(_LISTED_REWARDS))
            raise ConfigError(
                "the least reward to imitate is missing: give `--min-reward X` to `runs export`, or `--set min_reward=X` to "
                f"`train`. {run.name} has rewards from {min(rewards):g} to {max(rewards):g}, most often {counts}"
            )
        enough = sum(reward >= min_reward for reward in rewards)
        for row in found[:enough]:
            group = (row["step"], row["grp"])
            sequences = [] if best_of_group and group in imitated else _sequences(run, row)
            if sequences:
                rows += sequences
                imitated.append(group)
        report = f"{run.name}: {len(imitated)} of {total} rollouts are imitated; {len(found)} of the training ended ok and are "
        report += f"usable, {enough} of these have a reward of {min_reward:g} or more"
    if not rows:
        raise ConfigError(f"nothing to imitate: {report}")
    return rows, report


def _sequences(run: RunReader, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a rollout. There are none if a trained reply was cut off or a trained call does not parse."""
    rollout = run.rollout(row["id"]) or {}
    every = [TokenSequence.decoded(encoded) for encoded in rollout.get("sequences") or ()]
    found = [sequence for sequence in every if any(sequence.mask)]
    trained = {turn_id for sequence in found for turn_id in sequence.turn_ids}
    for call in (rollout["detail"] or {}).get("calls", ()):
        broken = call.get("finish_reason") in TRUNCATED_REASONS or call.get("parse_status") == "unparsed"
        if broken and call["turn_id"] in trained:
            return []
    facts = {"reward": row["reward"], "session_id": row["session_id"], "input_id": row["grp"]}
    return [{"input_ids": list(s.ids), "assistant_masks": list(s.mask), **facts} for s in found]


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
