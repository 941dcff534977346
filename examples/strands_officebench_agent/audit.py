"""List the tasks that doing nothing solves, with the published rules and with ours, and the tasks with images.

OFFICEBENCH_TASKS=.../OfficeBench/tasks python audit.py
"""

import argparse
import json
import sys
from collections import Counter

from officebench.errors import TaskError
from officebench.evaluation import judge
from officebench.tasks import load_task, task_ids
from officebench.workspace import new_workspace


def audit() -> dict[str, list[str]]:
    """Return the ids of the tasks with each problem."""
    found: dict[str, list[str]] = {"published": [], "trained": [], "incomplete": [], "images": []}
    for task_id in task_ids():
        task = load_task(task_id)
        with new_workspace(task.testbed) as workspace:
            try:
                found["published"] += [task_id] * judge(task, workspace, published=True).passed
                found["trained"] += [task_id] * judge(task, workspace).passed
            except TaskError as e:
                found["incomplete"].append(task_id)
                print(e, file=sys.stderr)
        if any(path.suffix.lower() in (".jpg", ".png") for path in task.testbed.rglob("*")):
            found["images"].append(task_id)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print task ids as JSON")
    options = parser.parse_args()
    found = audit()
    if options.json:
        print(json.dumps(found))
        return
    levels = Counter(task_id[0] for task_id in task_ids())
    print(f"{sum(levels.values())} tasks: " + ", ".join(f"{n} of level {level}" for level, n in sorted(levels.items())))
    for title, name in (
        ("Solved by doing nothing, published rules", "published"),
        ("Solved by doing nothing, rules that are trained on", "trained"),
        ("Incomplete: a file to compare with is missing", "incomplete"),
        ("With images in their files", "images"),
    ):
        print(f"\n{title}: {len(found[name])}\n{', '.join(found[name])}")


if __name__ == "__main__":
    main()
