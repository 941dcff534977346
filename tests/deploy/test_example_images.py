"""Every example's Dockerfile: built on a base image of this machine, run as an agent of the local runtime, through one rollout.

The model is scripted and stands behind a real gateway: where a framework is all that differs, it solves a problem with the
calculator; elsewhere it gives up at once, which the image's agent has to score.

Nightly: ten images take minutes each. `AGENTCORE_RL_EXAMPLE_IMAGES="plain_agent"` chooses some of them.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.backends import CollectConfig, CollectedRollout, GroupRequest, collect_async
from agentcore_rl_toolkit.cli.servers.vllm import MODEL_ID
from agentcore_rl_toolkit.cli.training.services import Services
from agentcore_rl_toolkit.deploy.artifact import put_wheel_beside
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.gateway.config import ADMIN_KEY_ENV
from agentcore_rl_toolkit.gateway.testing import ScriptedModel, ToolCall
from agentcore_rl_toolkit.runtime.remote import RuntimeView
from serving import moto_server, wait_for

from ..runtime.container_images import engine_storage

__all__ = ["engine_storage"]  # a fixture

ROOT = Path(__file__).parents[2]
CHOSEN = os.environ.get("AGENTCORE_RL_EXAMPLE_IMAGES", "").split()
EXAMPLES = [p.parent for p in sorted((ROOT / "examples").glob("*/Dockerfile")) if not CHOSEN or p.parent.name in CHOSEN]
BASES = ("docker.io/library/python:3.12-slim", "docker.io/library/python:3.12-slim-bookworm")
# What is copied into the image by hand, as the example's README says, and is not in the repository. AppWorld's is made.
NEEDS = {"strands_officebench_agent": "tasks"}
OFFICE = ROOT.parent / "shared" / "data" / "officebench" / "tasks"
BUCKET = f"records-{uuid.uuid4()}"  # moto's state is the process's
HOST_NAME = "host.containers.internal"  # this machine in a container of Podman
HEALTHY_S = 300.0

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


@dataclass(frozen=True, kw_only=True)
class Place:
    """A gateway before the scripted model, and a runtime whose containers may reach it."""

    model: ScriptedModel
    gateway: str
    admin_key: str
    runtime: str


@pytest.fixture(scope="module")
def place(engine_storage: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder, key = tmp_path_factory.mktemp("place"), secrets.token_urlsafe(24)
    with (
        moto_server("0.0.0.0") as s3,  # sessions are containers, for which loopback is their own
        ScriptedModel() as model,
        Services(folder / "logs", env={ADMIN_KEY_ENV: key}) as services,
    ):
        words = ["--upstream", model.url, "--engine", "vllm", "--store", str(folder / "turns"), "--host", "0.0.0.0"]
        gateway = services.wait_ready(services.launch("gateway", ["gateway", "serve", *words]))
        gateway_url = f"http://127.0.0.1:{gateway.url.rpartition(':')[2].rstrip('/')}"
        words = [
            "--state-dir",
            str(folder / "sessions"),
            "--session-env",
            f"AWS_ENDPOINT_URL_S3={s3.replace('127.0.0.1', HOST_NAME)}",
        ]
        words += ["--session-env", "AWS_ALLOW_HTTP=true"]
        words += ["--set", "init_timeout=300"]  # AgentCore gives 30 s; here images are built beside it
        runtime = services.wait_ready(services.launch("runtime", ["runtime", "serve", *words]))
        with pytest.MonkeyPatch.context() as patch:
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_REGION"):
                patch.setenv(name, "us-west-2")
            patch.setenv("AWS_ENDPOINT_URL_S3", s3)
            for module in (
                "moto.settings",
                "moto.s3.utils",
            ):  # or "host" of the sessions' name for this machine is a bucket
                patch.setattr(f"{module}.S3_IGNORE_SUBDOMAIN_BUCKETNAME", "true")
            boto3.client("s3").create_bucket(
                Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "us-west-2"}
            )
            yield Place(model=model, gateway=gateway_url, admin_key=key, runtime=runtime.url)


def task_of(example: Path) -> tuple[dict[str, Any], float]:
    """A payload of the example, and the reward of what `reply` makes of it."""
    name = example.name
    if name == "strands_officebench_agent":
        return {"task_id": "1-1/0"}, 0.0
    if name == "strands_appworld_agent":
        return {"task_id": "0000000_1"}, 0.0  # of made_world.py
    if name == "strands_migration_agent":
        return {"project": "settings"}, 0.0
    if name == "strands_taubench_agent":
        return {
            "domain": "retail",
            "task_id": "5",
            "user_lines": ["Where is my order?", "Thank you, that is all."],
        }, 0.0
    if name == "cli_agents":
        return {"prompt": "Say that you are done.", "program": "codex"}, 0.0
    if name == "harbor_agent":
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(example))
            from harbor_tasks import read_tasks  # the examples are no package

            task = next(t for t in read_tasks(example / "tasks") if t.name == "rotate-backups")
        return {**task.payload(), "agent": "plain"}, 0.0
    return {"prompt": "A tray holds 12 rolls. How many do 14 trays hold?", "answer": "168"}, 1.0


def reply(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | list[ToolCall]:
    asked = next(m["content"] for m in messages if m["role"] == "user")
    if "12 rolls" not in str(asked):
        return "DONE"
    if not any(m["role"] == "tool" for m in messages):
        return [ToolCall("calculator", {"expression": "14 * 12"})]
    return "They hold 168 rolls.\n#### 168"


async def rollout(place: Place, arn: str, payload: Mapping[str, Any]) -> CollectedRollout:
    config = CollectConfig(max_concurrent=1, rollout_timeout_s=600, submit_timeout_s=600)
    with (
        RolloutClient(arn, BUCKET, "image", model_id=MODEL_ID, endpoint_url=place.runtime) as client,
        GatewayClient(
            place.gateway, admin_key=place.admin_key, public_url=place.gateway.replace("127.0.0.1", HOST_NAME)
        ) as gateway,
    ):
        (group,) = await collect_async(
            [GroupRequest(input_id="one", payload=payload)], client=client, gateway=gateway, config=config
        )
    return group.rollouts[0]


def podman(*words: str, check: bool = True) -> str:
    done = subprocess.run(["podman", *words], capture_output=True, text=True, timeout=2400, check=False)
    assert not check or done.returncode == 0, (words, (done.stdout + done.stderr)[-4000:])
    return done.stdout


def make_world(image: str, folder: Path) -> None:
    """Lay AppWorld's data with the one task of `made_world.py` into the example's folder, by the AppWorld in the image."""
    made = folder.parent / "made"
    made.mkdir()
    volumes = [f"--volume={made}:/made", f"--volume={folder / 'made_world.py'}:/made_world.py:ro"]
    podman("run", "--rm", "--user=root", *volumes, image, "/opt/appworld/bin/python", "/made_world.py", "/made")
    shutil.copytree(made / "data", folder / "appworld-root" / "data", dirs_exist_ok=True)


def becomes_healthy(image: str) -> None:
    """The image's own health check passes in a container with nothing but the agent."""
    container = podman("run", "--detach", "--network=none", image).strip().splitlines()[-1]
    try:
        check = ["podman", "healthcheck", "run", container]
        wait_for(lambda: subprocess.run(check, capture_output=True, timeout=300).returncode == 0, within_s=HEALTHY_S)
    finally:
        print(podman("logs", container, check=False)[-4000:])  # shown when it fails
        podman("rm", "--force", "--time=0", container, check=False)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_examples_image_builds_as_another_user_and_ends_a_rollout(
    place: Place, mounts: list[str], example: Path, tmp_path: Path
) -> None:
    folder = tmp_path / example.name
    shutil.copytree(example, folder, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__", "*.whl"))
    needed = NEEDS.get(example.name)
    if needed == "tasks" and not (folder / needed).exists() and OFFICE.is_dir():
        shutil.copytree(OFFICE / "1-1", folder / needed / "1-1")
    if needed is not None and not (folder / needed).exists():
        pytest.skip(f"{example.name}/{needed} is made by hand, as its README says")
    put_wheel_beside(folder)
    image = f"localhost/agentcore-rl-examples/{example.name.replace('_', '-')}:test"
    # Docker's format: OCI's has no health check.
    build = ["build", "--format=docker", "--pull=never", "--network=host", *mounts, "--tag", image, str(folder)]
    if example.name == "strands_appworld_agent":
        (folder / "appworld-root" / "data").mkdir(parents=True)
        podman(*build)
        make_world(image, folder)
    podman(*build)
    assert podman("image", "inspect", "--format", "{{.Config.User}}", image).strip() not in ("", "root", "0")
    size = int(podman("image", "inspect", "--format", "{{.Size}}", image))
    print(f"{example.name}: {size / 2**20:,.0f} MB unpacked")  # pytest -s shows it
    payload, reward = task_of(example)
    place.model.decide = reply
    try:
        becomes_healthy(image)
        arn = RuntimeView(place.runtime).deploy(image, f"image_{example.name}", {})
        ended = asyncio.run(rollout(place, arn, payload))
        log = "".join(RuntimeView(place.runtime).log(ended.session_id))[-3000:]
        assert str(ended.outcome) == "ok", (ended.outcome, ended.reason, ended.traceback, log)
        assert ended.record is not None
        assert ended.reward == reward, (ended.record, log)
        assert ended.capture is not None
        assert len(ended.capture.turns) >= (2 if reward else 1)
    finally:
        podman("rmi", "--force", image, check=False)
