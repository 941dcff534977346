"""Versions for rollouts of agents that have no rollout function: their commands, archives and images."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import boto3
import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.agents.existing import write_scorer
from agentcore_rl_toolkit.cli.deploy import command
from agentcore_rl_toolkit.deploy import artifact, iam
from agentcore_rl_toolkit.deploy.artifact import start_file, this_platform
from agentcore_rl_toolkit.deploy.score_ready import (
    READY_FILE,
    STARTER,
    derived_tag,
    dockerfile,
    start_command,
)
from agentcore_rl_toolkit.deploy.settings import Settings
from agentcore_rl_toolkit.errors import ConfigError
from serving import wait_for

from ..conftest import reserved_port
from .conftest import deployment

AGENT = """
import sys
from bedrock_agentcore import BedrockAgentCoreApp

app = BedrockAgentCoreApp()

@app.entrypoint
def invoke(payload):
    return {"got": payload}

if __name__ == "__main__":
    app.run(port=int(sys.argv[1]) if len(sys.argv) > 1 else 8080)
"""


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (["python", "-m", "main"], ["python", "-m", STARTER, "-m", "main"]),
        (
            ["opentelemetry-instrument", "python", "main.py"],
            ["opentelemetry-instrument", "python", "-m", STARTER, "main.py"],
        ),
        (["uv", "run", "python3.12", "app.py"], ["uv", "run", "python3.12", "-m", STARTER, "app.py"]),
        (["/app/.venv/bin/python", "-u", "a.py"], ["/app/.venv/bin/python", "-u", "-m", STARTER, "a.py"]),
        (
            ["python", "-OO", "-X", "dev", "-Wall", "a.py", "-c", "x"],
            ["python", "-O", "-O", "-X", "dev", "-W", "all", "-m", STARTER, "a.py", "-c", "x"],
        ),
        (["python3", "-um", "main", "-v"], ["python3", "-u", "-m", STARTER, "-m", "main", "-v"]),
        (
            ["uvicorn", "main:app", "--port", "8080"],
            ["python", "-m", STARTER, "-m", "uvicorn", "main:app", "--port", "8080"],
        ),
        (
            ["/app/.venv/bin/uvicorn", "main:app"],
            ["/app/.venv/bin/python", "-m", STARTER, "-m", "uvicorn", "main:app"],
        ),
        (["uv", "run", "uvicorn", "main:app"], ["uv", "run", "python", "-m", STARTER, "-m", "uvicorn", "main:app"]),
    ],
)
def test_the_starter_comes_behind_the_python_of_a_command(words: list[str], made: list[str]) -> None:
    assert start_command(words) == made


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["node", "main.js"],
        ["/bin/sh", "-c", "python main.py"],
        ["python", "-u", "-c", "import main"],
        ["python", "-"],
        ["python"],
    ],
)
def test_a_command_without_python_is_refused_with_the_reason(words: list[str]) -> None:
    shown = re.escape(shlex.join(words) or "nothing")
    with pytest.raises(
        ConfigError, match=f"^the image starts {shown}; a version for rollouts needs a command with python or uvicorn"
    ):
        start_command(words)


def test_a_derived_image_keeps_its_user_and_names_what_it_lacks() -> None:
    text = dockerfile("prod:1", ["python", "-m", STARTER, "main.py"], "toolkit.whl", "bedrock")
    assert text.startswith("FROM prod:1\nUSER root\n")
    assert "older than 3.11" in text
    assert "neither pip nor uv" in text
    assert text.endswith(f'USER bedrock\nENTRYPOINT []\nCMD ["python", "-m", "{STARTER}", "main.py"]\n')


@pytest.mark.parametrize(
    ("words", "python"),
    [
        (["opentelemetry-instrument", "python3.12", "main.py"], "python3.12"),
        (["uv", "run", "uvicorn", "main:app"], "uv run python"),
        (
            ["/bin/uv", "run", "--no-sync", "opentelemetry-instrument", "python3", "a.py"],
            "/bin/uv run --no-sync python3",
        ),
        (["/app/.venv/bin/uvicorn", "main:app"], "/app/.venv/bin/python"),
    ],
)
def test_a_derived_image_installs_where_the_agents_python_finds_it(words: list[str], python: str) -> None:
    """The Python of a command with `uv run` is that of the project, and AWS's guide for FastAPI starts its agent so."""
    text = dockerfile("prod:1", start_command(words), "toolkit.whl", "")
    assert f"RUN {python} -c " in text
    assert f" {python} -m pip install" in text
    assert f'uv pip install --python "$({python} -c ' in text


def test_images_of_two_repositories_have_two_names_that_registries_accept() -> None:
    registry = "1.dkr.ecr.us-west-2.amazonaws.com"
    bases = [f"{registry}/a/shop:7", f"{registry}/b/shop:7", f"{registry}/shop-trainer@sha256:{'a' * 64}"]
    tags = [derived_tag(base) for base in bases]
    assert len({*tags}) == 3
    assert tags[0].startswith("shop-7-")
    assert derived_tag("a" * 99)[:51] == "a" * 50 + "-"
    for tag in tags:
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", tag), tag


def test_the_role_of_a_version_for_rollouts_may_pull_the_derived_image(account: dict[str, str]) -> None:
    base = "123.dkr.ecr.us-west-2.amazonaws.com/shop:7"
    what = Settings(name="shop_training", image=base, score_ready=True, platform="linux/arm64")
    place = deployment(what, rehearse=True).place()
    for policy in (iam.execution(place), iam.deployer(place, role="arn:aws:iam::1:role/x")):
        assert "repository/agentcore-rl/shop_training" in json.dumps(policy)
    team = "123.dkr.ecr.us-west-2.amazonaws.com/team/shop"
    for image, repository in (
        (f"{team}:7", "team/shop"),
        (f"{team}@sha256:1", "team/shop"),
        ("public.ecr.aws/shop:7", None),
    ):
        given = Settings(name="shop", image=image, platform="linux/arm64")
        assert deployment(given, rehearse=True).place().repository == repository


def test_a_derived_image_that_exists_shows_which_image_it_was_made_of(account: dict[str, str]) -> None:
    ecr, kind = boto3.client("ecr"), "application/vnd.docker.distribution.manifest.v2+json"
    ecr.create_repository(repositoryName="agentcore-rl/shop_training")
    for number, base in enumerate(("public.ecr.aws/shop/agent:latest", "public.ecr.aws/shop/agent@sha256:1")):
        what = Settings(name="shop_training", image=base, score_ready=True, platform="linux/arm64")
        config = {"digest": f"sha256:{str(number) * 64}"}
        manifest = json.dumps({"schemaVersion": 2, "mediaType": kind, "config": config, "layers": []})
        ecr.put_image(repositoryName=str(what.repository), imageManifest=manifest, imageTag=derived_tag(base))
        lines: list[str] = []
        deployment(what, lines, rehearse=True).up()
        then = "" if "@" in base else f", of {base} as it was then. Give another tag for a newer image"
        assert f"image {derived_tag(base)}: exists{then}" in lines


def test_the_files_of_a_scaffold_are_not_packed(account: dict[str, str], tmp_path: Path) -> None:
    """`init --from` writes rows with the known answers next to the agent."""
    (tmp_path / "app.py").write_text(AGENT)
    (tmp_path / "requirements.txt").write_text("")
    (tmp_path / "scores.py").write_text("def score(payload, answer, reference, trajectory): ...")
    (tmp_path / "shop").mkdir()
    for agent in ("app.py", "shop/agent.py"):
        write_scorer(tmp_path / agent, ["prompt"])
    written = {"score.py", "test_score.py", "shop/score.py", "shop/test_score.py"}
    words = ["--agent", str(tmp_path), "--bucket", "ready", "--smoke", "none", "--dry-run", "--code"]
    for more, packed in (([], written), (["--score-ready"], set())):
        done = CliRunner().invoke(command, [*words, *more], catch_exceptions=False)
        names = {*re.findall(r"would pack (\S+\.(?:py|jsonl))", done.output)} - {READY_FILE}
        assert names == {"app.py", "scores.py", *packed}


def test_the_start_file_of_an_archive_runs_the_agents_own_file(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(AGENT)
    (tmp_path / READY_FILE).write_text(start_file(STARTER, arguments=["main.py"]))
    with reserved_port() as port:
        process = subprocess.Popen([sys.executable, str(tmp_path / READY_FILE), str(port)], cwd="/")
        try:

            def ask(payload: dict[str, Any]) -> Any:
                request = urllib.request.Request(f"http://127.0.0.1:{port}/invocations", json.dumps(payload).encode())
                try:
                    return json.load(urllib.request.urlopen(request, timeout=60))
                except OSError:
                    return None

            assert wait_for(lambda: ask({"prompt": "x"}), process=process) == {"got": {"prompt": "x"}}
            block = {"exp_id": "e", "input_id": "i", "s3_bucket": f"file://{tmp_path}/store"}
            reply = ask({"prompt": "x", "_rollout": block})
            record = tmp_path / "store" / reply["result_key"]
            wait_for(record.exists)
            assert json.loads(record.read_text())["_answer"] == {"got": {"prompt": "x"}}
        finally:
            process.kill()
            process.wait(10)


UV = """#!{python}
# `uv pip install --target FOLDER`, of the first requirement only: the wheel of this package.
import sys, zipfile

zipfile.ZipFile(sys.stdin.readline().strip()).extractall(sys.argv[sys.argv.index("--target") + 1])
"""


def test_a_version_for_rollouts_is_deployed_beside_the_one_for_production(
    account: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = tmp_path / "tools" / "uv"
    uv.parent.mkdir()
    uv.write_text(UV.format(python=sys.executable))
    uv.chmod(0o755)
    monkeypatch.setattr(artifact, "find_uv", lambda: str(uv))
    boto3.client("s3").create_bucket(Bucket="ready", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "main.py").write_text(AGENT)
    (tmp_path / "shop" / "requirements.txt").write_text("")
    given: dict[str, Any] = {
        "folder": tmp_path / "shop",
        "entry": "main.py",
        "code": True,
        "bucket": "ready",
        "platform": this_platform(),
    }
    lines: list[str] = []
    with pytest.raises(ConfigError, match=r"the agent other was not made by .*nothing is changed"):
        deployment(Settings(name="other", score_ready=True, **given), lines).up()
    ready = deployment(Settings(name="shop_training", score_ready=True, **given), lines)
    made = ready._artifact()
    assert made["codeConfiguration"]["entryPoint"] == [READY_FILE]
    place = made["codeConfiguration"]["code"]["s3"]
    body = boto3.client("s3").get_object(Bucket="ready", Key=place["prefix"])["Body"].read()
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        assert archive.read(READY_FILE).decode() == start_file(STARTER, arguments=["main.py"])
        assert "agentcore_rl_toolkit/app/deployed/start.py" in archive.namelist()
        assert "requirements.txt" not in archive.namelist()
    wanted = ready._wanted(made, "role")["environmentVariables"]
    assert wanted == {"AGENTCORE_RL_ROLLOUTS": "on", "AGENTCORE_RL_AS_IS": "1"}


@pytest.mark.usefixtures("image_builder")
def test_a_rehearsal_shows_the_image_that_would_be_derived(account: dict[str, str]) -> None:
    lines: list[str] = []
    what = Settings(
        name="shop_training",
        image="123.dkr.ecr.us-west-2.amazonaws.com/shop:7",
        score_ready=True,
        platform="linux/arm64",
    )
    deployment(what, lines, rehearse=True).up()
    said = "\n".join(lines)
    assert "would build 123.dkr.ecr.us-west-2.amazonaws.com/shop:7 for linux/arm64" in said
    assert '"Service": "bedrock-agentcore.amazonaws.com"' in said  # a policy as a document
