"""An agent's own image, as it is: a version for rollouts is derived from it, evaluated and trained in containers."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from packaging.requirements import Requirement

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.backends import CollectConfig, GroupRequest, collect_async, open_recording
from agentcore_rl_toolkit.backends.training.loop import train
from agentcore_rl_toolkit.backends.training.settings import LoopSettings
from agentcore_rl_toolkit.backends.training.settings import Services as Parts
from agentcore_rl_toolkit.backends.training.torch_client import TorchClient, TorchSettings
from agentcore_rl_toolkit.cli.training.services import Services
from agentcore_rl_toolkit.client.data import read_rows
from agentcore_rl_toolkit.deploy.artifact import ImageBuilder, this_platform
from agentcore_rl_toolkit.deploy.score_ready import derive
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.gateway.config import ADMIN_KEY_ENV
from agentcore_rl_toolkit.runtime.remote import RuntimeView
from agentcore_rl_toolkit.weights import EngineAddress
from serving import moto_server

from ..conftest import ROOT
from ..runtime.container_images import _libraries, engine_storage, podman
from .test_example_images import HOST_NAME

__all__ = ["engine_storage"]  # a fixture

pytestmark = [pytest.mark.nightly, pytest.mark.system, pytest.mark.timeout(1500)]
EXAMPLE = ROOT / "examples" / "deployed_agent"
BUCKET = f"records-{secrets.token_hex(8)}"
PRODUCTION, READY = "localhost/agentcore-rl-test/shop:7", "localhost/agentcore-rl-test/shop-training:7"
# What the agent needs, and of our package everything but itself: the build asks no index.
PACKAGES = ("strands-agents", "bedrock-agentcore", "obstore", "click", "python-dotenv", "pydantic", "boto3", "pip")
SERVICES = ("bedrock-runtime", "bedrock-agentcore", "s3", "sts")
DOCKERFILE = """
FROM localhost/agentcore-rl-test/base
COPY lib /usr/lib/python3.11
COPY libraries /
COPY packages /usr/local/lib/python3.11/dist-packages
RUN ["/usr/bin/python3", "-c", "import os; os.symlink('/usr/bin/python3', '/usr/bin/python')"]
COPY app.py /app/app.py
WORKDIR /app
CMD ["python3", "-u", "app.py"]
"""


def distributions(*names: str) -> dict[str, importlib.metadata.Distribution]:
    """The installed packages of these names and what they require."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            needed = map(Requirement, found[name].requires or ())
            waiting += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def copied_packages(folder: Path) -> None:
    for distribution in distributions(*PACKAGES).values():
        for file in distribution.files or ():
            source, parts = Path(str(distribution.locate_file(file))), file.parts
            unused = parts[:2] == ("botocore", "data") and len(parts) > 3 and parts[2] not in SERVICES
            if source.is_file() and ".." not in parts and not unused:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, folder / file)


@pytest.fixture(scope="module")
def images(engine_storage: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The image of the example's agent, which has nothing of our package, and the one that is derived from it."""
    folder = tmp_path_factory.mktemp("image")
    library = Path("/usr/lib/python3.11")
    shutil.copytree(library, folder / "lib", ignore=shutil.ignore_patterns("test", "__pycache__", "EXTERNALLY-MANAGED"))
    copied_packages(folder / "packages")
    for path in _libraries([str(p) for p in (folder / "packages").rglob("*.so*")]):
        (folder / "libraries" / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / "libraries" / path.lstrip("/"))
    shutil.copy(EXAMPLE / "app.py", folder)
    (folder / "Dockerfile").write_text(DOCKERFILE)
    podman("build", "--quiet", "--tag", PRODUCTION, str(folder))
    derive(ImageBuilder.find(), PRODUCTION, uri=READY, target=this_platform())
    yield READY
    podman("rmi", "--force", READY, PRODUCTION, check=False)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The parts of a run whose sessions are containers, and the agent's ARN."""

    policy: str
    gateway: str
    admin_key: str
    runtime: str
    arn: str


@pytest.fixture(scope="module")
def place(images: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder, key = tmp_path_factory.mktemp("place"), secrets.token_urlsafe(24)
    with (
        moto_server("0.0.0.0") as s3,  # sessions are containers, for which loopback is their own
        Services(folder / "logs", env={ADMIN_KEY_ENV: key}) as services,
        pytest.MonkeyPatch.context() as patch,
    ):
        policy = services.wait_ready(services.launch("policy", ["policy", "serve"]))
        words = ["--upstream", policy.url, "--engine", "policy", "--store", str(folder / "turns"), "--host", "0.0.0.0"]
        gateway = services.wait_ready(services.launch("gateway", ["gateway", "serve", *words]))
        seen = s3.replace("127.0.0.1", HOST_NAME)
        words = ["--session-env", f"AWS_ENDPOINT_URL_S3={seen}", "--session-env", "AWS_ALLOW_HTTP=true"]
        words += ["--state-dir", str(folder / "sessions"), "--set", "init_timeout=300"]
        runtime = services.wait_ready(services.launch("runtime", ["runtime", "serve", *words]))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_REGION"):
            patch.setenv(name, "us-west-2")
        patch.setenv("AWS_ENDPOINT_URL_S3", s3)
        for module in (
            "moto.settings",
            "moto.s3.utils",
        ):  # or "host" of the sessions' name for this machine is a bucket
            patch.setattr(f"{module}.S3_IGNORE_SUBDOMAIN_BUCKETNAME", "true")
        where: Any = {"LocationConstraint": "us-west-2"}
        boto3.client("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration=where)
        arn = RuntimeView(runtime.url).deploy(images, "shop_training", {"AGENTCORE_RL_AS_IS": "1"})
        port = gateway.url.rpartition(":")[2].rstrip("/")
        gateway_url = f"http://127.0.0.1:{port}"
        yield Place(policy=policy.url, gateway=gateway_url, admin_key=key, runtime=runtime.url, arn=arn)


def clients(place: Place, experiment: str) -> tuple[RolloutClient, GatewayClient]:
    public = place.gateway.replace("127.0.0.1", HOST_NAME)
    client = RolloutClient(place.arn, BUCKET, experiment, model_id="policy", endpoint_url=place.runtime)
    return client, GatewayClient(place.gateway, admin_key=place.admin_key, public_url=public)


def test_the_derived_image_keeps_the_agents_command(images: str) -> None:
    command = json.loads(podman("image", "inspect", "--format", "{{json .Config.Cmd}}", images))
    assert command == ["python3", "-u", "-m", "agentcore_rl_toolkit.app.deployed", "app.py"]
    assert podman("run", "--rm", "--network=none", PRODUCTION, "python3", "-m", "pip", "list").count("agentcore") == 1
    assert podman("run", "--rm", "--network=none", images, "python3", "-m", "pip", "list").count("agentcore") == 2


def test_an_image_without_python_is_refused_with_what_it_lacks(engine_storage: Path, tmp_path: Path) -> None:
    name = "localhost/agentcore-rl-test/no-pip:1"
    (tmp_path / "Dockerfile").write_text('FROM localhost/agentcore-rl-test/base\nCMD ["python3", "app.py"]\n')
    podman("build", "--quiet", "--tag", name, str(tmp_path))
    with pytest.raises(ConfigError, match="the image has neither pip nor uv for python3"):
        derive(ImageBuilder.find(), name, uri=f"{name}-rl", target=this_platform())
    podman("rmi", "--force", name)


def test_rollouts_in_containers_are_scored_by_the_client(place: Place) -> None:
    rows = [json.loads(line) for line in (EXAMPLE / "eval.jsonl").read_text().splitlines()[:2]]
    client, gateway = clients(place, "scored")
    config = CollectConfig(
        score=str(EXAMPLE / "score.py"), max_concurrent=2, rollout_timeout_s=300, submit_timeout_s=300
    )
    requests = [GroupRequest(input_id=str(n), payload=row) for n, row in enumerate(rows)]
    with client, gateway:
        groups = asyncio.run(collect_async(requests, client=client, gateway=gateway, config=config))
    assert len(groups) == 2
    for group in groups:
        [rollout] = group.rollouts
        assert rollout.usable, (rollout.outcome, rollout.error, rollout.traceback)
        assert rollout.reward in (0.0, 1.0)
        assert rollout.record is not None
        assert rollout.record["_calls"]["gateway"] >= 1
        assert "_reference" not in json.dumps(rollout.record)


def test_an_image_is_trained_for_three_steps(place: Place, tmp_path: Path) -> None:
    settings = LoopSettings(
        steps=3,
        groups=2,
        rollouts=2,
        max_concurrent=4,
        rollout_timeout_s=300,
        submit_timeout_s=300,
        score=str(EXAMPLE / "score.py"),
    )
    events: list[str] = []

    async def run() -> None:
        engine = EngineAddress(url=place.policy, engine="policy", model="policy")
        training = TorchClient.open(TorchSettings(seed=0), None, run_dir=tmp_path, engine=engine)
        client, gateway = clients(place, "trained")
        with client, gateway, open_recording(tmp_path, {}) as recording:
            parts = Parts(client=client, gateway=gateway, run_dir=tmp_path, recording=recording)
            rows = read_rows(EXAMPLE / "train.jsonl")
            await train(parts, training, settings, rows, [], lambda event, _: events.append(event), resumed=None)
        await training.close("success")

    asyncio.run(run())
    assert events.count("step") == 3
