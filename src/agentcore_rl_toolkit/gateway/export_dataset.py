"""A store as a data set folder: Parquet files and the card that tells Hugging Face's `datasets` and the Hub what they are.

``load_dataset("DIR")`` gives the training sequences, ``load_dataset("DIR", "turns")`` the model calls. The folder is
what a Hub repository holds, so `huggingface-cli upload NAME DIR --repo-type dataset` publishes it as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, MissingExtraError
from ..trajectory import build_trajectory
from .export_rows import TURN, Columns, Stored, row_of, schema_of, stored_sessions, turn_rows

if TYPE_CHECKING:
    import pyarrow as pa

# A file is closed when it holds so many tokens: about 200 MB before compression, what the Hub likes for its viewer.
FILE_TOKENS = 16 * 2**20
_GROUP_TOKENS = 2**20  # tokens per row group, which is what a reader holds in memory

_CARD = """---
configs:
{configs}tags:
- reinforcement-learning
- agents
---
# Rollouts of an agent, as the model sampled them

{sequences} training sequences and {turns} model calls of {sessions} sessions, recorded by AgentCore RL Toolkit's gateway.

- `sequences` (default): `token_ids` with `loss_mask` (1: sampled and trained in this row), `logprobs` (null where the mask is
  0), `weight_versions`, and `weight`, the row's share of its session. Every sampled token has mask 1 in one row of its session.
- `turns`: `prompt_ids`, `completion_ids`, `logprobs`, finish reason and weight versions of each call.

`metadata` is the session's own, as JSON text.
"""


_CONFIG = """- config_name: {name}
  data_files: "data/{name}-*.parquet"
"""


def export_folder(store: str | Path, target: str | Path, *, sessions: Sequence[str] | None = None) -> tuple[int, int]:
    """Write the folder. Returns the numbers of turns and sessions.

    Raises: ConfigError when the target holds something already or the store no turns, MissingExtraError without pyarrow.
    """
    try:
        import pyarrow as pa
    except ImportError as e:
        raise MissingExtraError("writing Parquet needs pyarrow. Install it with:\n    pip install pyarrow") from e
    folder = Path(target)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder; give another one, what is there is not overwritten")
    data = folder / "data"
    found = stored_sessions(store, sessions=sessions)
    first = next(found, None)  # before anything is made: the store may not be one
    data.mkdir(parents=True, exist_ok=True)
    turns, sequences = _Files(data, "turns", schema_of(pa, TURN)), _Files(data, "sequences", schema_of(pa, _SEQUENCE))
    count = 0
    for stored in itertools.chain([] if first is None else [first], found):
        count += 1
        for row in turn_rows(stored):
            turns.add(row, len(row["prompt_ids"]) + len(row["completion_ids"]))
        for row in _sequence_rows(stored):
            sequences.add(row, len(row["token_ids"]))
    turns.close()
    sequences.close()
    if not turns.rows:
        data.rmdir()
        raise ConfigError(f"{store} holds no turns yet")
    # Only what has files may be named: loading the name of none is an error.
    configs = "".join(_CONFIG.format(name=files.name) for files in (sequences, turns) if files.rows)
    configs = configs.replace("\n", "\n  default: true\n", 1)
    card = _CARD.format(configs=configs, sequences=sequences.rows, turns=turns.rows, sessions=count)
    (folder / "README.md").write_text(card, "utf-8")
    return turns.rows, count


_SEQUENCE: Columns = {
    "index": "int32",
    "token_ids": ["int32"],
    "loss_mask": ["int8"],
    "logprobs": ["float32"],
    "weight_versions": ["int64"],
    "prompt_length": "int32",
    "weight": "float64",
    "turn_ids": ["string"],
    "branch_reason": "string",
    "finish_reason": "string",
}


def _sequence_rows(stored: Stored) -> Iterator[dict[str, Any]]:
    trajectory = build_trajectory(stored.session_id, stored.turns)
    for index, sequence in enumerate(trajectory.sequences):
        yield row_of(stored, sequence, _SEQUENCE, index=index)


class _Files:
    """Rows of one kind, spread over numbered files of bounded size."""

    def __init__(self, folder: Path, name: str, schema: pa.Schema) -> None:
        self._folder = folder
        self.name = name
        self._schema = schema
        self._paths: list[Path] = []
        self._writer: Any = None
        self._batch: list[dict[str, Any]] = []
        self._waiting = self._written = 0  # tokens
        self.rows = 0

    def add(self, row: dict[str, Any], tokens: int) -> None:
        self._batch.append(row)
        self._waiting += tokens
        self.rows += 1
        if self._waiting >= _GROUP_TOKENS:
            self._flush()
            if self._written >= FILE_TOKENS:
                self._end()

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._writer is None:
            path = self._folder / f"{self.name}-{len(self._paths):05}.parquet"
            self._paths.append(path)
            self._writer = pq.ParquetWriter(path, self._schema)
        self._writer.write_table(pa.Table.from_pylist(self._batch, schema=self._schema))
        self._written += self._waiting
        self._batch, self._waiting = [], 0

    def _end(self) -> None:
        self._writer.close()
        self._writer, self._written = None, 0

    def close(self) -> None:
        """Write what is left."""
        if self._batch:
            self._flush()
        if self._writer is not None:
            self._end()
        # The Hub's form of the name says how many files there are.
        for number, path in enumerate(self._paths):
            path.rename(self._folder / f"{self.name}-{number:05}-of-{len(self._paths):05}.parquet")
