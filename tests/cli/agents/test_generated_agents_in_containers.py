"""The agents of `test_generated_agents` and of `test_module_level_clients`, each session of which is a container."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.backends import CollectConfig, GroupRequest, collect_async, open_recording
from agentcore_rl_toolkit.backends.training.loop import train
from agentcore_rl_toolkit.backends.training.settings import LoopSettings
from agentcore_rl_toolkit.backends.training.settings import Services as Parts
from agentcore_rl_toolkit.backends.training.torch_client import TorchClient, TorchSettings
from agentcore_rl_toolkit.cli.training.services import Services
from agentcore_rl_toolkit.contract import Cause
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.gateway.config import ADMIN_KEY_ENV
from agentcore_rl_toolkit.runtime.remote import RuntimeView
from agentcore_rl_toolkit.weights import EngineAddress
from serving import serving

from ...conftest import MakeEnvironment
from ...runtime.container_images import engine_storage
from .test_generated_agents import CASES, MCP, OPENAI, TYPESCRIPT, generate, install, package
from .test_module_level_clients import AGENTS, CALCULATOR

__all__ = ["engine_storage", "package"]  # fixtures

pytestmark = [pytest.mark.nightly, pytest.mark.system, pytest.mark.timeout(3600)]
HOST_NAME = "host.containers.internal"  # this machine in a container of Podman
# Variables that `eval` and `train` give to the sessions of such agents.
ENVIRONMENT = {
    "AGENTCORE_RL_AS_IS": "1",
    "LOCAL_DEV": "1",
    "AGENTCORE_CREDENTIAL_KEY": "placeholder",
    **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "local"),
    **dict.fromkeys(("AWS_REGION", "AWS_DEFAULT_REGION"), "us-west-2"),
}
SCORE = """
import random
from agentcore_rl_toolkit import answer_text

def score(payload, answer, reference, trajectory):
    users = [m for m in trajectory if m["role"] == "user"]
    assert "_reference" not in payload and reference and trajectory
    return {"reward": random.random(), "text": float(bool(answer_text(answer))), "users": len(users)}
"""
ROWS = [{"prompt": f"The shop has {n} lamps and sells 1.", "_reference": str(n - 1)} for n in range(20, 28)]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The parts of a run whose sessions are containers."""

    policy: str
    gateway: str
    admin_key: str
    runtime: RuntimeView
    store: str
    mcp: str

    def clients(self, arn: str, experiment: str) -> tuple[RolloutClient, GatewayClient]:
        public = self.gateway.replace("127.0.0.1", HOST_NAME)
        client = RolloutClient(arn, self.store, experiment, model_id="policy", endpoint_url=self.runtime.url)
        return client, GatewayClient(self.gateway, admin_key=self.admin_key, public_url=public)


@pytest.fixture(scope="module")
def place(
    engine_storage: Path, make_environment: MakeEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    folder, key = tmp_path_factory.mktemp("place"), secrets.token_urlsafe(24)
    # The sessions' loopback address is their own.
    server = MCP.replace('FastMCP("local", ', 'FastMCP("local", host="0.0.0.0", ').replace(
        'bind(("127.0.0.1"', 'bind(("0.0.0.0"'
    )
    (folder / "server.py").write_text(textwrap.dedent(server))
    python = make_environment("mcp", "mcp>=1.24,<2", "uvicorn")
    with (
        serving(folder, program=(python, str(folder / "server.py"))) as mcp,
        Services(folder / "logs", env={ADMIN_KEY_ENV: key}) as services,
        pytest.MonkeyPatch.context() as patch,
    ):
        policy = services.wait_ready(services.launch("policy", ["policy", "serve"]))
        words = ["--upstream", policy.url, "--engine", "policy", "--store", str(folder / "turns"), "--host", "0.0.0.0"]
        gateway = services.wait_ready(services.launch("gateway", ["gateway", "serve", *words]))
        words = ["--isolation", "container", "--state-dir", str(folder / "sessions"), "--set", "init_timeout=600"]
        words += ["--store", f"file://{folder}/store"]
        runtime = services.wait_ready(services.launch("runtime", ["runtime", "serve", *words]))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_REGION"):
            patch.setenv(name, "us-west-2")
        yield Place(
            policy=policy.url,
            gateway=f"http://127.0.0.1:{gateway.url.rpartition(':')[2].rstrip('/')}",
            admin_key=key,
            runtime=RuntimeView(runtime.url),
            store=f"file://{folder}/store",
            mcp=mcp["url"].replace("127.0.0.1", HOST_NAME),
        )


@pytest.mark.parametrize("case", CASES)
def test_a_generated_agent_is_evaluated_and_trained_in_containers(
    case: str, package: Path, place: Place, tmp_path: Path
) -> None:
    framework, context = CASES[case]
    generate(package, f"python/http/{framework}", context, tmp_path, place.mcp)
    evaluate_and_train(place, tmp_path / "main.py", case)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_with_a_client_at_module_level_is_evaluated_and_trained_in_containers(
    name: str, place: Place, tmp_path: Path
) -> None:
    source, package = AGENTS[name]
    (tmp_path / "app.py").write_text(CALCULATOR + source)
    (tmp_path / "requirements.txt").write_text(f"bedrock-agentcore\n{package}\n")
    evaluate_and_train(place, tmp_path / "app.py", name)


@pytest.mark.parametrize("framework", TYPESCRIPT)
def test_a_generated_agent_in_typescript_is_evaluated_and_trained_in_containers(
    framework: str, package: Path, place: Place, tmp_path: Path
) -> None:
    if not Path(shutil.which("node") or "/").resolve().is_relative_to("/usr"):
        pytest.skip("containers have the programs of /usr, and node is elsewhere")
    generate(package, f"typescript/http/{framework}", OPENAI, tmp_path, place.mcp)
    install(tmp_path)
    words = [f'"{tmp_path}/node_modules/.bin/tsx"', f'"{tmp_path}/main.ts"']
    program = f"from agentcore_rl_toolkit import Program\n\napp = Program({', '.join(words)})\n"
    (tmp_path / "program.py").write_text(f"import uvicorn\n{program}uvicorn.run(app, host='0.0.0.0', port=8080)\n")
    evaluate_and_train(place, tmp_path / "program.py", framework)


def evaluate_and_train(place: Place, agent: Path, name: str) -> None:
    """Evaluate an agent on two rows, and train it for three steps."""
    (agent.parent / "score.py").write_text(SCORE)
    arn = place.runtime.deploy(agent, name.replace("-", "_"), ENVIRONMENT)
    size = {"rollout_timeout_s": 900, "submit_timeout_s": 900, "score": str(agent.parent / "score.py")}
    config = CollectConfig(max_concurrent=2, evaluation=True, sampling_params={"max_tokens": 64}, **size)
    requests = [GroupRequest(input_id=str(n), payload=row) for n, row in enumerate(ROWS[:2])]
    client, gateway = place.clients(arn, f"{name}-evaluated")
    with client, gateway:
        groups = asyncio.run(collect_async(requests, client=client, gateway=gateway, config=config))
    for group in groups:
        [rollout] = group.rollouts
        # ADK raises for a tool that does not exist, and the built-in policy may call one.
        # The OpenAI Agents SDK raises if the policy calls tools without end, which is the policy's failure.
        if "ValueError: Tool " in str(rollout.reason) or rollout.cause == Cause.POLICY:
            continue
        assert rollout.reward_detail is not None, (rollout.outcome, rollout.reason, rollout.traceback)
        assert rollout.reward_detail.metrics["users"] == 1  # no history of another rollout
    events: list[str] = []
    settings = LoopSettings(
        steps=3, groups=1, rollouts=2, max_concurrent=2, replace_up_to=1, sampling_params={"max_tokens": 64}, **size
    )

    async def run() -> None:
        engine = EngineAddress(url=place.policy, engine="policy", model="policy")
        training = TorchClient.open(TorchSettings(seed=0), None, run_dir=agent.parent, engine=engine)
        client, gateway = place.clients(arn, f"{name}-trained")
        with client, gateway, open_recording(agent.parent / "run", {}) as recording:
            parts = Parts(client=client, gateway=gateway, run_dir=agent.parent / "run", recording=recording)
            await train(parts, training, settings, ROWS, [], lambda event, _: events.append(event), resumed=None)
        await training.close("success")

    asyncio.run(run())
    assert events.count("step") == 3
