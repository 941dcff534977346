"""Rows to train and evaluate on, demonstrations for a warm start, published solutions. Runs where tau2 is installed."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmark import Domain, Episode, Split, gold_actions, splits, tasks, tool_schemas
from demonstrations import demonstrate
from wording import tool_spec

MAX_TURNS = 30  # the longest published solution has 12 actions


def rows(
    domain: Domain, split: Split, *, repeats: int = 1, seed: int | None = None, **more: Any
) -> list[dict[str, Any]]:
    """The payloads of a split, each ``repeats`` times; with a seed in a random order. Telecom is rendered compactly."""
    how = {"rendering": "compact", "max_turns": MAX_TURNS, **more} if domain == "telecom" else more
    found = [{"domain": domain, "task_id": task_id, **how} for task_id in splits(domain)[split]]
    if seed is not None:
        random.Random(seed).shuffle(found)
    return [row for row in found for _ in range(repeats)]


def solutions(domain: Domain, split: Split, *, most: int | None = None) -> Iterator[dict[str, Any]]:
    """Tasks with their published actions and what has to be said: at most so many, without those where doing nothing is right."""
    found = 0
    for task in tasks(domain, split):
        if found == most:
            return
        if gold_actions(task) and not Episode(domain=domain, task=task).scores().published:
            found += 1
            said = task.evaluation_criteria.communicate_info or []
            yield {"domain": domain, "task_id": task.id, "actions": gold_actions(task), "communicate": said}


def as_openai(spec: dict[str, Any]) -> dict[str, Any]:
    """A tool as it reaches the model."""
    function = {"name": spec["name"], "description": spec["description"], "parameters": spec["inputSchema"]["json"]}
    return {"type": "function", "function": function}


def write(path: Path, lines: Iterable[Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="folder for the files")
    what.add_argument(
        "--solutions", type=int, metavar="N", help="print N test tasks with their published solutions; 0: all"
    )
    parser.add_argument("--domain", choices=("telecom", "retail", "airline"), default="telecom")
    parser.add_argument("--repeats", type=int, default=4, help="times that each test task is run in an evaluation")
    parser.add_argument("--demonstrations", type=int, default=24, help="of each train task of telecom; 0: none")
    parser.add_argument(
        "--partial-credit", type=float, default=0.0, help="what the share of the gold actions is worth in training"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.solutions is not None:
        for solution in solutions(options.domain, "test", most=options.solutions or None):
            print(json.dumps(solution))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    credit = {"partial_credit": options.partial_credit} if options.partial_credit else {}
    write(options.out / "train.jsonl", rows(options.domain, "train", seed=options.seed, **credit))
    write(options.out / "test.jsonl", rows(options.domain, "test", repeats=options.repeats))
    if options.domain == "telecom" and options.demonstrations:
        rng = random.Random(options.seed)
        train = tasks("telecom", "train")
        shown = (demonstrate(task, rng) for _ in range(options.demonstrations) for task in train)
        write(options.out / "demonstrations.jsonl", shown)
        tools = [as_openai(tool_spec("compact", schema)) for schema in tool_schemas("telecom").values()]
        (options.out / "tools.json").write_text(json.dumps(tools) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
