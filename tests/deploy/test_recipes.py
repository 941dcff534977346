"""The recipes of docs/deploy-recipes.md: options of AWS's own CLI as its --help has them, and CodeBuild's file."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import botocore.session
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy-recipes.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def commands(text: str, program: str) -> list[list[str]]:
    """The command lines of a program in a text's blocks, as words; comments and continued lines are read as a shell does."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == [program]:
                found.append(words[1:])
    return found


def test_codebuild_runs_what_the_page_gives_it() -> None:
    spec = yaml.safe_load((ROOT / "examples" / "buildspec.yml").read_text())
    assert spec["version"] == 0.2
    lines = [line for phase in spec["phases"].values() for line in phase["commands"]]
    for line in lines:
        done = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
    needed = set(re.findall(r"\$([A-Z_]+)", " ".join(lines))) - {"REGISTRY", "AWS_REGION", "CODEBUILD_BUILD_SUCCEEDING"}
    given = [words for words in commands(section("CodeBuild"), "aws") if words[:2] == ["codebuild", "start-build"]]
    assert {
        word.split(",")[0].removeprefix("name=") for words in given for word in words if word.startswith("name=")
    } == needed
    # what the page asks of CodeBuild is in the service's model
    made = next(
        words for words in commands(section("CodeBuild"), "aws") if words[:2] == ["codebuild", "create-project"]
    )
    model = botocore.session.get_session().get_service_model("codebuild").operation_model("CreateProject").input_shape
    environment = dict(pair.split("=", 1) for pair in made[made.index("--environment") + 1].split(","))
    shape = model.members["environment"]
    assert set(environment) <= set(shape.members)
    assert environment["type"] in shape.members["type"].enum
    assert environment["computeType"] in shape.members["computeType"].enum
    assert json.loads(environment["privilegedMode"]) is True
