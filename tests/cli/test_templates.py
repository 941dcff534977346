"""What `agentcore-rl init` writes runs as it is: a rollout of an agent of every framework, on the parts of `agentcore-rl up`."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.backends.collection.collect import collect_async
from agentcore_rl_toolkit.backends.collection.groups import GroupRequest
from agentcore_rl_toolkit.backends.collection.settings import CollectConfig
from agentcore_rl_toolkit.cli.init import FRAMEWORKS, write
from agentcore_rl_toolkit.cli.servers.vllm import MODEL_ID
from agentcore_rl_toolkit.cli.training.services import Services
from agentcore_rl_toolkit.cli.training.stack import QUIET
from agentcore_rl_toolkit.gateway import GatewayClient
from serving import serving

from ..conftest import MakeEnvironment

# 23 CPU seconds; tests/cli/test_up.py has one framework in every `make test`. The first may have to install the others.
pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(800)]
MISSING_HERE = (
    "langchain>=1",
    "langchain-openai>=1",
    "langgraph>=1",
    "openai-agents>=0.6",
)  # as in the templates' requirements
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "AWS_REGION": "us-west-2"}


@dataclass(frozen=True)
class Running:
    arns: dict[str, str]
    runtime_url: str
    gateway_url: str
    admin_key: str
    folder: Path


@pytest.fixture(scope="module")
def python(make_environment: MakeEnvironment) -> str:
    """This environment, and the frameworks that it lacks."""
    return make_environment("templates", *MISSING_HERE, upon_this=True, limit_s=300)


@pytest.fixture(scope="module")
def running(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One runtime with an agent of every framework, whose environment has them all, a gateway and the policy."""
    folder = tmp_path_factory.mktemp("templates")
    agents = {name: write(folder / name, name) / "agent.py" for name in FRAMEWORKS}
    key = secrets.token_urlsafe(12)
    environment = {**QUIET, "AGENTCORE_RL_GATEWAY_ADMIN_KEY": key}
    with Services(folder / "logs", env=environment) as services:
        policy = services.launch("policy server", ["policy", "serve"])
        words = [f"{name.replace('-', '_')}={file}" for name, file in agents.items()]
        words = [word for agent in words for word in ("--agent", agent)]
        words += ["--store", f"file://{folder / 'store'}", "--set", "init_timeout=120"]
        program = (python, "-W", "ignore", "-m", "agentcore_rl_toolkit.cli")
        with serving(folder, "runtime", "serve", *words, program=program, **QUIET) as reply:
            services.wait_ready(policy)
            gateway = services.launch("gateway", ["gateway", "serve", "--engine", "policy", "--upstream", policy.url])
            services.wait_ready(gateway)
            yield Running(reply["agents"], reply["url"], gateway.url, key, folder)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_new_agent_of_each_framework_does_a_rollout_that_can_be_trained_on(
    running: Running, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    row = json.loads((running.folder / framework / "eval.jsonl").read_text().splitlines()[0])
    request = GroupRequest(input_id=framework, payload=row, sampling_params={"temperature": 0.0})
    arn, store = running.arns[framework.replace("-", "_")], f"file://{running.folder / 'store'}"
    (running.folder / "store").mkdir(exist_ok=True)
    with (
        RolloutClient(arn, store, "templates", endpoint_url=running.runtime_url, model_id=MODEL_ID) as client,
        GatewayClient(running.gateway_url, admin_key=running.admin_key) as gateway,
    ):
        config = CollectConfig(rollout_timeout_s=120)
        [group] = asyncio.run(collect_async([request], client=client, gateway=gateway, config=config))
    [rollout] = group.rollouts
    assert rollout.usable, f"{rollout.outcome}: {rollout.error}\n{rollout.traceback}"
    assert rollout.reward in (0.0, 1.0)
    assert rollout.trajectory is not None
    assert rollout.trajectory.report.sampled_tokens > 0
    assert rollout.capture is not None
    assert row["prompt"] in json.dumps(rollout.capture.dialogue)
