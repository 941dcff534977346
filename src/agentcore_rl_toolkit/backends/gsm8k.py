"""GSM8K as rows for the math agent: ``{"idx", "prompt", "answer", "data_source"}``.

``python -m agentcore_rl_toolkit.backends.gsm8k SOURCE.jsonl TARGET.jsonl|.parquet`` converts a file of the published data set
(``{"question", "answer": "... #### 42"}``).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, MissingExtraError
from .data import encode_payload, read_rows

_SOLUTION = re.compile(r"####\s*(-?[0-9][0-9.,]*)")


def final_answer(solution: str) -> str:
    """The number after the last ``####``, without thousands separators. Raises: ConfigError when there is none."""
    found = _SOLUTION.findall(solution)
    if not found:
        raise ConfigError(f"no '#### number' in this solution: {solution[-80:]!r}")
    return str(found[-1]).replace(",", "").rstrip(".")


def convert(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the published form -> payloads, numbered in order."""
    return [
        {"idx": i, "prompt": row["question"], "answer": final_answer(row["answer"]), "data_source": "gsm8k"}
        for i, row in enumerate(rows)
    ]


def write_rows(rows: list[dict[str, Any]], target: Path) -> None:
    """Write rows as JSONL or Parquet, by the name of the file."""
    if target.suffix == ".parquet":
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ModuleNotFoundError as e:
            raise MissingExtraError("writing .parquet files needs pyarrow:\n    pip install pyarrow") from e
        parquet.write_table(pyarrow.Table.from_pylist(rows), target)
    else:
        target.write_text("".join(encode_payload(row) + "\n" for row in rows), encoding="utf-8")


def register_with_rllm(rows: list[dict[str, Any]], split: str, name: str = "gsm8k_agentcore") -> Any:
    """Put rows into rLLM's registry, where its trainers look them up. Raises: MissingExtraError without rLLM."""
    try:
        from rllm.data.dataset import DatasetRegistry
    except ModuleNotFoundError as e:
        raise MissingExtraError("rLLM is not installed; write a .parquet file instead") from e
    return DatasetRegistry.register_dataset(
        name, rows, split, source="openai/gsm8k", description="GSM8K for the math agent", category="math"
    )


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        sys.exit(
            "usage: python -m agentcore_rl_toolkit.backends.gsm8k SOURCE.jsonl TARGET.jsonl|.parquet|rllm:train|rllm:test"
        )
    source, target = arguments
    rows = convert(read_rows(source))
    if target.startswith("rllm:"):
        register_with_rllm(rows, target.removeprefix("rllm:"))
    else:
        write_rows(rows, Path(target))
    print(json.dumps({"rows": len(rows), "first": rows[0]}, ensure_ascii=False))


if __name__ == "__main__":
    main(sys.argv[1:])
