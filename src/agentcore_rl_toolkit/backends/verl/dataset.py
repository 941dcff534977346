"""verl's dataset whose rows are payloads: every field of a row reaches the agent, and nothing is tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from ...client.data import payload_id, read_rows

PAYLOAD_KEY = "agentcore_payload"


class PayloadDataset(Dataset):  # type: ignore[type-arg]  # rows are dicts of mixed values
    """Rows of JSONL, JSON or Parquet files as verl's trainer wants them (`data.custom_cls`).

    The payload is in ``agentcore_payload``; ``raw_prompt`` shows it to verl's logs. `data_source`,
    `reward_model` and `extra_info` of a row are handed to verl too, which groups validation metrics by the first.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any = None,
        config: Any = None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        files = [data_files] if isinstance(data_files, str) else list(data_files)
        rows = [row for path in files for row in read_rows(path)]
        self.rows = rows[:max_samples] if max_samples > 0 else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        payload = self.rows[item]
        prompt = payload.get("prompt", payload_id(payload))
        return {
            "raw_prompt": prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}],
            PAYLOAD_KEY: payload,
            "index": item,
            "data_source": str(payload.get("data_source", "agentcore")),
            "reward_model": {"style": "rule", "ground_truth": payload.get("answer")},
            "extra_info": {"index": item},
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),  # verl's batches need one tensor
        }
