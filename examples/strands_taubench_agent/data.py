"""Write rows, demonstrations for a warm start, and published solutions. This needs the package tau2."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmark import Domain, Episode, Split, find_task, gold_actions, splits, tasks, tool_schemas
from demonstrations import begin, demonstrate, goal
from wording import tool_spec

MAX_TURNS = 30  # the longest published solution has 12 actions


def rows(domain: Domain, task_ids: Sequence[str], *, repeats: int = 1, **more: Any) -> list[dict[str, Any]]:
    """The payloads of these tasks, each ``repeats`` times. Telecom is rendered compactly."""
    how = {"rendering": "compact", "max_turns": MAX_TURNS, **more} if domain == "telecom" else more
    return [{"domain": domain, "task_id": task_id, **how} for task_id in task_ids for _ in range(repeats)]


def train_and_validation(domain: Domain, count: int, seed: int) -> tuple[list[str], list[str]]:
    """The train split in a random order, and ``count`` of its tasks that are left out of it, the same ones for every seed."""
    task_ids = list(splits(domain)["train"])
    left_out = set(random.Random("validation").sample(task_ids, count))
    random.Random(seed).shuffle(task_ids)
    return [i for i in task_ids if i not in left_out], [i for i in task_ids if i in left_out]


def solutions(domain: Domain, split: Split, *, most: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield tasks with their published actions and required texts, without tasks that need no action."""
    found = 0
    for task in tasks(domain, split):
        if found == most:
            return
        if gold_actions(task) and not Episode(domain=domain, task=task).scores().published:
            found += 1
            said = task.evaluation_criteria.communicate_info or []
            yield {"domain": domain, "task_id": task.id, "actions": gold_actions(task), "communicate": said}


def demonstrations(
    learnt: Sequence[str], validation: Sequence[str], each: int, rng: random.Random, *, careless: bool
) -> Iterator[Any]:
    """Yield ``each`` demonstrations per task. The remaining work is never that of a test or validation task."""
    held_out = goals(validation)
    for _ in range(each):
        for task_id in learnt:
            yield demonstrate(begin(find_task("telecom", task_id), rng, held_out=held_out), rng if careless else None)


def train_rows(
    domain: Domain, learnt: Sequence[str], validation: Sequence[str], seed: int, **more: Any
) -> list[dict[str, Any]]:
    """Return the tasks in a random order. In telecom, each task occurs again, partly repaired."""
    found = rows(domain, learnt, **more)
    if domain == "telecom":
        rng, held_out = random.Random(seed), goals(validation)
        for row in rows(domain, learnt, **more):
            repaired = begin(find_task(domain, row["task_id"]), rng, held_out=held_out).repaired
            found.append({**row, "repaired": list(repaired)})
        rng.shuffle(found)
    return found


def goals(validation: Sequence[str]) -> set[frozenset[str]]:
    """Return the goals of the test tasks and the validation tasks."""
    held_out = (*splits("telecom")["test"], *validation)
    return {goal(Episode(domain="telecom", task=find_task("telecom", i))) for i in held_out}


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
    parser.add_argument("--repeats", type=int, default=4, help="rollouts of each task in an evaluation")
    parser.add_argument(
        "--validation",
        type=int,
        default=0,
        metavar="N",
        help="evaluate on N train tasks, and use them neither for training nor for demonstrations",
    )
    parser.add_argument(
        "--demonstrations",
        type=int,
        default=32,
        help="careful demonstrations per train task of telecom, and a quarter of this number careless ones; 0: none",
    )
    parser.add_argument(
        "--partial-credit", type=float, default=0.0, help="reward for the share of the published actions, in training"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.solutions is not None:
        for solution in solutions(options.domain, "test", most=options.solutions or None):
            print(json.dumps(solution))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    credit = {"partial_credit": options.partial_credit} if options.partial_credit else {}
    learnt, validation = train_and_validation(options.domain, options.validation, options.seed)
    write(options.out / "train.jsonl", train_rows(options.domain, learnt, validation, options.seed, **credit))
    name, evaluated = ("validation", validation) if validation else ("test", splits(options.domain)["test"])
    write(options.out / f"{name}.jsonl", rows(options.domain, evaluated, repeats=options.repeats))
    if options.domain == "telecom" and options.demonstrations:
        for name, each in (("careful", options.demonstrations), ("careless", options.demonstrations // 4)):
            shown = demonstrations(learnt, validation, each, random.Random(options.seed), careless=name == "careless")
            write(options.out / f"{name}.jsonl", shown)
        tools = [as_openai(tool_spec("compact", schema)) for schema in tool_schemas("telecom").values()]
        (options.out / "tools.json").write_text(json.dumps(tools) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
