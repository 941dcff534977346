"""A run's good rollouts as sequences to imitate: exactly the ids that were sampled, with the mask that trains."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..contract import TRUNCATED_REASONS
from ..errors import ConfigError, MissingExtraError
from .reader import Query, RunReader
from .record import TokenSequence

_LISTED_REWARDS = 6  # different ones; of more, quartiles are shown


@dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """The selected sequences of a run, and why its other rollouts were left out: reason -> a detail of each, or "".

    ``rows`` have ``input_ids`` and ``assistant_masks`` (1: sampled and trained), both (T,), as TRL's SFTTrainer reads them, and
    ``reward``, ``session_id``, ``input_id``.
    """

    run: str
    rows: list[dict[str, Any]]
    left_out: Mapping[str, Sequence[str]]

    def __str__(self) -> str:
        chosen = len({row["session_id"] for row in self.rows})
        parts = []
        for reason, found in self.left_out.items():
            details = ", ".join(sorted(set(found) - {""}))
            if found:
                parts.append(f"{len(found)} {reason}" + (f" ({details})" if details else ""))
        text = f"{self.run}: {chosen} of {chosen + sum(map(len, self.left_out.values()))} rollouts are imitated"
        return f"{text}; left out: {', '.join(parts)}" if parts else text


_HELD_OUT, _FAILED, _MASKED, _UNREWARDED = ("held out", "failed", "masked", "without a reward")


def demonstrations(folder: Path, *, min_reward: float | None, best_of_group: bool = False) -> Demonstrations:
    """Select the training rollouts that ended `ok`, are usable, and have at least this reward; with ``best_of_group`` the best of
    each group. A rollout in which a trained reply was cut off, or a trained call does not parse, is not selected.

    Raises: ConfigError without ``min_reward``, with the rewards that there are, and when nothing is left.
    """
    left_out: dict[str, list[str]] = {reason: [] for reason in (_HELD_OUT, _FAILED, _MASKED, _UNREWARDED)}
    rows: list[dict[str, Any]] = []
    with RunReader(folder) as run:
        candidates = []
        for row in run.rollouts(Query(sort="reward", descending=True), limit=run.count()):
            reason, detail = _unfit(row)
            if reason is None:
                candidates.append(row)
            else:
                left_out[reason].append(detail)
        if min_reward is None and candidates:
            raise ConfigError(
                f"the least reward to imitate is missing: give `--min-reward X` to `runs export`, `--set min_reward=X` to `train`. "
                f"{run.name} has these rewards: {_spread([row['reward'] for row in candidates])}"
            )
        groups = set()
        for row in candidates:
            group = (row["step"], row["grp"])
            found, reason = [], None
            if row["reward"] < min_reward:
                reason = f"with a reward below {min_reward:g}"
            elif best_of_group and group in groups:
                reason = "not the best of the group"
            else:
                found, reason = _sequences(run, row)
            if reason is not None:
                left_out.setdefault(reason, []).append("")
                continue
            rows += found
            groups.add(group)
        made = Demonstrations(run=run.name, rows=rows, left_out=left_out)
    if not rows:
        hint = ". `agentcore-rl eval --for-training` samples rollouts to train on" if left_out[_HELD_OUT] else ""
        raise ConfigError(f"nothing to imitate: {made}{hint}")
    return made


def _unfit(row: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return why a rollout is never imitated, with a detail; None if it may be."""
    if row["phase"] != "train":
        return _HELD_OUT, row["phase"]
    if row["outcome"] != "ok":
        return _FAILED, ""
    if row["mask_reason"] is not None:
        return _MASKED, row["mask_reason"]
    return (_UNREWARDED, "") if row["reward"] is None else (None, "")


def _sequences(run: RunReader, row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """Return the rows of a rollout, or why there are none."""
    rollout = run.rollout(row["id"]) or {}
    found = [TokenSequence.decoded(encoded) for encoded in rollout.get("sequences") or ()]
    found = [sequence for sequence in found if any(sequence.mask)]
    if not found:
        return [], "without its tokens"
    trained = {turn_id for sequence in found for turn_id in sequence.turn_ids}
    for call in (rollout["detail"] or {}).get("calls", ()):
        broken = call.get("finish_reason") in TRUNCATED_REASONS or call.get("parse_status") == "unparsed"
        if broken and call["turn_id"] in trained:
            return [], "with a reply that was cut off or a call that does not parse"
    facts = {"reward": row["reward"], "session_id": row["session_id"], "input_id": row["grp"]}
    return [{"input_ids": list(s.ids), "assistant_masks": list(s.mask), **facts} for s in found], None


def _spread(rewards: Sequence[float]) -> str:
    """Describe how rewards are distributed."""
    counts = sorted(Counter(rewards).items())
    if len(counts) > _LISTED_REWARDS:
        names = ("lowest", "a quarter up to", "half up to", "three quarters up to", "highest")
        values = (min(rewards), *statistics.quantiles(rewards, method="inclusive"), max(rewards))
        return ", ".join(f"{name} {value:.3g}" for name, value in zip(names, values, strict=True))
    return ", ".join(f"{n} x {value:g}" for value, n in counts)


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
