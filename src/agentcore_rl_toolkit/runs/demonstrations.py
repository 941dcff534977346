"""A run's good rollouts as sequences to imitate: exactly the ids that were sampled, with the mask that trains."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .._installation import require
from ..contract import TRUNCATED_REASONS
from ..errors import ConfigError
from .reader import Query, RunReader
from .record import TokenSequence
from .schema import COLUMNS

_LISTED_REWARDS = 6
_PARQUET_ROWS = 1000  # rows of a group, which are in memory together


def demonstrations(
    folder: Path, *, min_reward: float | None, best_of_group: bool = False, report: Callable[[str], object]
) -> Iterator[dict[str, Any]]:
    """Yield the sequences of the training rollouts that ended `ok`, are usable, and have at least this reward.

    A rollout in which a trained reply was cut off, or a trained call does not parse, is left out. With ``best_of_group`` only the
    best of each group is taken, and none of a group without a reward above 0.

    Rows have ``input_ids`` and ``assistant_masks`` (1: sampled and trained), both (T,), as TRL's SFTTrainer reads them, and
    ``reward``, ``session_id``, ``input_id``. ``report`` gets a line about the selection at the end.
    Raises: ConfigError without ``min_reward``, with the rewards that there are, and when nothing is left.
    """
    imitated, taken = 0, set()  # the groups of the imitated rollouts
    fit = Query(phase="train", outcome="ok", usable=True, sort="reward", descending=True)
    with RunReader(folder) as run:
        rewards = run.numbers(fit)["reward"]
        if not rewards:
            raise ConfigError(
                f"nothing to imitate: {run.name} has no training rollout that ended ok, is usable and has a reward. "
                "`agentcore-rl eval --for-training` samples rollouts to train on"
            )
        if min_reward is None or math.isnan(min_reward):
            most = Counter(rewards.values()).most_common(_LISTED_REWARDS)
            raise ConfigError(
                "the least reward to imitate is missing: give `--min-reward X` to `runs export`, or `--set min_reward=X` to "
                f"`sft`. {run.name} has rewards from {min(rewards.values()):g} to {max(rewards.values()):g}, most often "
                + ", ".join(f"{n} x {value:g}" for value, n in most)
            )
        enough = [rollout for rollout in run.ids(fit) if rollout in rewards and rewards[rollout] >= min_reward]
        for rollout in enough:
            [row] = run.rows([rollout])
            group = (row["step"], row["grp"])
            if best_of_group and (group in taken or row["reward"] <= 0):
                continue
            if sequences := _sequences(run, row):
                yield from sequences
                imitated += 1
                taken.add(group)
        text = f"{run.name}: {imitated} of {run.count()} rollouts are imitated; {len(rewards)} of the training ended ok and "
        text += f"are usable, {len(enough)} of these have a reward of {min_reward:g} or more"
    if not imitated:
        raise ConfigError(f"nothing to imitate: {text}")
    report(text)


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


def write_rows(rows: Iterable[Mapping[str, Any]], target: Path) -> int:
    """Write rows to a .jsonl or .parquet file as they come, and return their number. A failure leaves no file.

    Raises: ConfigError, MissingExtraError without pyarrow.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        if target.suffix == ".jsonl":
            count = 0
            with partial.open("w") as out:
                for row in rows:
                    out.write(json.dumps(row, default=str) + "\n")
                    count += 1
        elif target.suffix == ".parquet":
            count = _write_parquet(rows, partial)
        else:
            raise ConfigError(f"{target.name} must end in .jsonl or .parquet")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return count


def _write_parquet(rows: Iterable[Mapping[str, Any]], target: Path) -> int:
    """Write groups of rows. The types of columns are those of `schema.COLUMNS`, otherwise those of the first group."""
    pa, pq = require("pyarrow"), require("pyarrow.parquet")
    count, writer, left = 0, None, iter(rows)
    try:
        while part := list(itertools.islice(left, _PARQUET_ROWS)):
            if writer is None:
                found = pa.Table.from_pylist(part).schema
                types = {"TEXT": pa.string(), "INTEGER": pa.int64(), "REAL": pa.float64()}
                plain = [(f.name, pa.float64() if f.type == pa.null() else f.type) for f in found]
                known = [(name, types.get(COLUMNS.get(name, "").split(" ")[0], kind)) for name, kind in plain]
                writer = pq.ParquetWriter(target, pa.schema(known))
            writer.write_table(pa.Table.from_pylist(part, schema=writer.schema))
            count += len(part)
        if writer is None:
            pq.write_table(pa.table({}), target)
    finally:
        if writer is not None:
            writer.close()
    return count
