"""Every example's Dockerfile: built on a base image of this machine, run as an agent of the local runtime, asked what it is.

Nightly: ten images take minutes each. `AGENTCORE_RL_EXAMPLE_IMAGES="plain_agent"` chooses some of them.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from agentcore_rl_toolkit.contract import PROBE_EXPERIMENT, new_session_id
from agentcore_rl_toolkit.deploy.artifact import put_wheel_beside, this_platform
from agentcore_rl_toolkit.deploy.deployment import Settings

from ..runtime.container_images import engine_storage
from .conftest import an_aws, deployment

__all__ = ["engine_storage"]  # a fixture

ROOT = Path(__file__).parents[2]
CHOSEN = os.environ.get("AGENTCORE_RL_EXAMPLE_IMAGES", "").split()
EXAMPLES = [p.parent for p in sorted((ROOT / "examples").glob("*/Dockerfile")) if not CHOSEN or p.parent.name in CHOSEN]
BASES = ("docker.io/library/python:3.12-slim", "docker.io/library/python:3.12-slim-bookworm")
# What is copied into the image by hand, as the example's README says, and is not in the repository.
NEEDS = {"strands_appworld_agent": "data"}

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def mounts(engine_storage: Path) -> list[str]:
    """The base image under the names that Dockerfiles use; options with which a build reaches what pip here reaches."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "base_image.py"), *BASES],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"no base image here: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return shlex.split(done.stdout.strip().splitlines()[-1]) if done.stdout.strip() else []


@pytest.fixture(scope="module")
def aws(engine_storage: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with an_aws(tmp_path_factory.mktemp("aws")) as found:
        yield found


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_examples_image_builds_as_another_user_and_its_session_answers(
    account: dict[str, str], mounts: list[str], example: Path, tmp_path: Path
) -> None:
    needed = NEEDS.get(example.name)
    if needed is not None and not (example / needed).exists():
        pytest.skip(f"{example.name}/{needed} is made by hand, as its README says")
    folder = tmp_path / example.name
    shutil.copytree(example, folder, ignore=shutil.ignore_patterns(".venv", "runs", "__pycache__", "*.whl"))
    put_wheel_beside(folder)
    image = f"localhost/agentcore-rl-examples/{example.name.replace('_', '-')}:test"
    build = ["podman", "build", "--pull=never", "--network=host", *mounts, "--tag", image, str(folder)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=2400, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    user = subprocess.run(
        ["podman", "image", "inspect", "--format", "{{.Config.User}}", image],
        capture_output=True,
        text=True,
        check=True,
    )
    assert user.stdout.strip() not in ("", "root", "0")
    what = Settings(name=f"image_{example.name}", image=image, platform=this_platform())
    made = deployment(what).up()
    try:
        session = new_session_id()
        runtime = boto3.client("bedrock-agentcore")
        store = f"memory://{secrets.token_hex(8)}"
        block = {
            "exp_id": PROBE_EXPERIMENT,
            "input_id": "probe",
            "s3_bucket": store,
            "proof_key": secrets.token_hex(32),
        }
        reply = runtime.invoke_agent_runtime(
            agentRuntimeArn=made.arn,
            runtimeSessionId=session,
            payload=json.dumps({"_probe": {}, "_rollout": block}).encode(),
        )
        said = json.loads(reply["response"].read())
        assert said["status"] == "probed", said
        assert said["probe"]["store"]["ok"], said
        runtime.stop_runtime_session(agentRuntimeArn=made.arn, runtimeSessionId=session)
    finally:
        deployment(what).remove()
        subprocess.run(["podman", "rmi", "--force", image], capture_output=True, timeout=120, check=False)
