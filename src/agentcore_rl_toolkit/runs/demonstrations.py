"""A run's good rollouts as sequences to imitate: exactly the ids that were sampled, with the mask that trains."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..contract import TRUNCATED_REASONS
from ..errors import ConfigError, MissingExtraError
from .reader import Query, RunReader
from .record import TokenSequence

_LISTED_REWARDS = 6  # different ones; of more, quartiles are shown


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
    groups: set[tuple[int | None, str]] = set()
    with RunReader(folder) as run:
        every = run.rollouts(Query(sort="reward", descending=True), limit=run.count())
        left_out = Counter(reason for row in every if (reason := _unfit(row)) is not None)
        fit = [row for row in every if _unfit(row) is None]
        if min_reward is None and fit:
            raise ConfigError(
                "the least reward to imitate is missing: give `--min-reward X` to `runs export`, or `--set min_reward=X` to "
                f"`train`. {run.name} has these rewards: {_spread([row['reward'] for row in fit])}"
            )
        for row in fit:
            group = (row["step"], row["grp"])
            if row["reward"] < min_reward:
                found: list[dict[str, Any]] | str = f"with a reward below {min_reward:g}"
            else:
                found = "not the best of the group" if best_of_group and group in groups else _sequences(run, row)
            if isinstance(found, str):
                left_out[found] += 1
            else:
                rows += found
                groups.add(group)
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(left_out.items()))
        report = f"{run.name}: {len(every) - left_out.total()} of {len(every)} rollouts are imitated"
        report += f"; left out: {reasons}" if reasons else ""
    if not rows:
        hint = ". `agentcore-rl eval --for-training` samples rollouts to train on" if "held out" in reasons else ""
        raise ConfigError(f"nothing to imitate: {report}{hint}")
    return rows, report


def _unfit(row: Mapping[str, Any]) -> str | None:
    """Return why a rollout is never imitated; None if it may be."""
    if row["phase"] != "train":
        return f"held out ({row['phase']})"
    if row["outcome"] != "ok":
        return "failed"
    if row["mask_reason"] is not None:
        return f"masked ({row['mask_reason']})"
    return "without a reward" if row["reward"] is None else None


def _sequences(run: RunReader, row: Mapping[str, Any]) -> list[dict[str, Any]] | str:
    """Return the rows of a rollout, or why there are none."""
    rollout = run.rollout(row["id"]) or {}
    every = [TokenSequence.decoded(encoded) for encoded in rollout.get("sequences") or ()]
    found = [sequence for sequence in every if any(sequence.mask)]
    if not found:
        return "without tokens"
    trained = {turn_id for sequence in found for turn_id in sequence.turn_ids}
    for call in (rollout["detail"] or {}).get("calls", ()):
        broken = call.get("finish_reason") in TRUNCATED_REASONS or call.get("parse_status") == "unparsed"
        if broken and call["turn_id"] in trained:
            return "with a reply that was cut off or a call that does not parse"
    facts = {"reward": row["reward"], "session_id": row["session_id"], "input_id": row["grp"]}
    return [{"input_ids": list(s.ids), "assistant_masks": list(s.mask), **facts} for s in found]


def _spread(rewards: Sequence[float]) -> str:
    """Describe how rewards are distributed."""
    counts = sorted(Counter(rewards).items())
    if len(counts) <= _LISTED_REWARDS:
        return ", ".join(f"{n} x {value:g}" for value, n in counts)
    quartiles = ", ".join(f"{value:.3g}" for value in statistics.quantiles(rewards, method="inclusive"))
    return f"{len(rewards)} from {min(rewards):.3g} to {max(rewards):.3g}, quartiles {quartiles}"


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
