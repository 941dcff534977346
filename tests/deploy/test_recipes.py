"""The recipes of docs/deploy-recipes.md: options of AWS's own CLI as its --help has them, and CodeBuild's file."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from string import Template

import botocore.session
import yaml

from agentcore_rl_toolkit.deploy import iam

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


def test_the_printed_policies_are_for_the_names_of_the_page() -> None:
    """What `deploy iam` prints for CodeBuild names the page's own archive, project, role and repository."""
    text = section("CodeBuild")
    values = dict(pair.split("=", 1) for pair in re.findall(r"^export (.*)$", text, re.MULTILINE)[0].split())

    def answer(verb: str, option: str) -> str:
        words = next(words for words in commands(text, "aws") if words[1] == verb)
        return Template(words[words.index(option) + 1]).safe_substitute(values)

    place = iam.Place(
        account=values["AWS_ACCOUNT"],
        region=values["AWS_REGION"],
        name="shop",
        repository=values["ECR_REPO_NAME"],
        bucket=values["BUCKET"],
    )
    build = iam.Build.of(place)
    assert build is not None
    assert f"location={values['BUCKET']}/{build.source}" in answer("create-project", "--source")
    assert answer("create-project", "--name") == answer("start-build", "--project-name") == build.project
    assert answer("create-project", "--service-role") == place.arn("iam", f"role/{build.role}", region="")
    assert answer("create-role", "--role-name") == answer("put-role-policy", "--role-name") == build.role
    [printed] = [words for words in commands(text, "agentcore-rl") if words[:2] == ["deploy", "iam"]]
    assert printed[2:4] == ["--name", "shop"]
    assert ".codebuild_trust" in answer("create-role", "--assume-role-policy-document")
    assert ".codebuild " in answer("put-role-policy", "--policy-document")
