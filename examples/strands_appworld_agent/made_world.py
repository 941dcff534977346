"""Make one AppWorld task, for machines without the published data; run with AppWorld's own Python: made_world.py ROOT

It has a new person in AppWorld's tables, an instruction, and an evaluation by AppWorld's test tracker. The server handles it
(initialize, execute, evaluate, close) like the published tasks. It is not part of the benchmark.
"""

import json
import os
import sys
from pathlib import Path

TASK_ID = "0000000_1"
PERSON = {"first_name": "Ada", "last_name": "Ames", "email": "ada@example.com", "phone_number": "5550100123"}
INSTRUCTION = "What is my last name?"
REQUIREMENTS = ("the task is complete", "the answer is the last name")
EVALUATION = """import json


def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
    task = models.end.supervisor.Task.all()[0]
    with test("the task is complete"):
        test.case(task.status, "==", "success")
    with test("the answer is the last name"):
        test.answer(json.loads(task.answer), ground_truth_answer)
"""


def main() -> None:
    root = Path(sys.argv[1])
    os.environ["APPWORLD_ROOT"] = str(root)
    from appworld import update_root
    from appworld.apps import get_all_apps
    from appworld.collections.models import ModelCollection
    from appworld.common.constants import CANARY_STRING, DB_VERSION

    update_root(str(root))
    task = root / "data" / "tasks" / TASK_ID
    (task / "dbs").mkdir(parents=True)
    docs = root / "data" / "api_docs" / "standard"
    docs.mkdir(parents=True)
    apps = get_all_apps(skip_admin=True)
    for app in apps:
        (docs / f"{app}.json").write_text("{}")
    models = ModelCollection.load(to_db_home_path=str(task / "dbs"), load_apps=[*apps, "admin"], create_db=True)
    models.admin.MainUser(**PERSON, birthday="1990-01-01", sex="female").save()
    supervisor = models.supervisor.Supervisor(**PERSON, birthday="1990-01-01", sex="female")
    supervisor.save()
    models.supervisor.Task(supervisor_id=supervisor.id, instruction=INSTRUCTION).save()
    models.close()
    specs = {
        "instruction": INSTRUCTION,
        "supervisor": PERSON,
        "datetime": "2023-05-18T12:00:00",
        "db_version": DB_VERSION,
    }
    (task / "specs.json").write_text(json.dumps({**specs, "canary_string": CANARY_STRING}))
    truth = task / "ground_truth"
    truth.mkdir()
    (truth / "evaluation.py").write_text(EVALUATION)
    tests = [{"requirement": told, "label": "no_op_fail"} for told in REQUIREMENTS]
    for name, value in (
        ("metadata", {"difficulty": 1, "mode": "minimal", "num_apps": 1, "num_apis": 1, "num_solution_code_lines": 1}),
        ("public_data", {}),
        ("private_data", {}),
        ("answer", PERSON["last_name"]),
        ("test_data", tests),
        ("required_apps", ["supervisor"]),
    ):
        (truth / f"{name}.json").write_text(json.dumps(value))


if __name__ == "__main__":
    main()
