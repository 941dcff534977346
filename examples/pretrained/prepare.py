"""Write train.jsonl and held_out.jsonl of a task: `python examples/pretrained/prepare.py runs/pretrained`."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tasks import TASKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=TASKS, default="order")
    parser.add_argument("--train", type=int, default=512)
    parser.add_argument("--held-out", type=int, default=96)
    a = parser.parse_args()
    make = TASKS[a.task]
    example = make(random.Random("the example"))
    seen: set[str] = {example["prompt"]}
    a.folder.mkdir(parents=True, exist_ok=True)
    for name, n in (("held_out", a.held_out), ("train", a.train)):
        rng, rows = random.Random(name), list[dict[str, str]]()
        while len(rows) < n:
            row = make(rng)
            if row["prompt"] not in seen:  # nothing that is held out is trained on
                seen.add(row["prompt"])
                rows.append(row | {"example": example})
        (a.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
