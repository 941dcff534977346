"""Write train.jsonl and eval.jsonl with one payload per line. All tasks of a folder are in the same file.

    OFFICEBENCH_TASKS=.../OfficeBench/tasks python prepare_data.py --out data

Tasks that doing nothing solves and incomplete tasks are left out (audit.py lists them). With `--no-images`, tasks with images are
left out too, for machines without Tesseract.
"""

import argparse
import hashlib
import json
from pathlib import Path

from audit import audit
from officebench.tasks import load_task, task_ids

HELD_OUT = 0.25


def is_held_out(folder: str) -> bool:
    """The same answer on every machine: by the digest of the folder's name."""
    return int.from_bytes(hashlib.sha256(folder.encode()).digest()[:4]) / 2**32 < HELD_OUT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("data"))
    parser.add_argument("--no-images", action="store_true", help="leave out tasks with images")
    options = parser.parse_args()
    found = audit()
    left_out = {
        *found["trained"],
        *found["published"],
        *found["incomplete"],
        *(found["images"] if options.no_images else []),
    }
    rows: dict[str, list[dict]] = {"train": [], "eval": []}
    for task_id in task_ids():
        if task_id not in left_out:
            row = {"task_id": task_id, "prompt": load_task(task_id).text}
            rows["eval" if is_held_out(task_id.partition("/")[0]) else "train"].append(row)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, lines in rows.items():
        path = options.out / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        print(f"{path}: {len(lines)} tasks")


if __name__ == "__main__":
    main()
