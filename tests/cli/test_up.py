"""`agentcore-rl up` as a process: found by other commands in its folder, believed only while it runs, gone without a trace."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
from openai import BadRequestError, OpenAI

from agentcore_rl_toolkit.cli.init import write
from agentcore_rl_toolkit.cli.training.stack import Stack
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.runs import RunReader
from agentcore_rl_toolkit.runtime.agents.environments import fits_here
from serving import wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(800)]
DEADLINE_S = 200.0
PAYLOAD = json.dumps({"prompt": "The shop has 41 lamps and sells 5. How many lamps are left?", "answer": "36"})


def command(*words: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "agentcore_rl_toolkit", *words]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=DEADLINE_S, cwd=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where somebody works, with an agent that reads a variable and fails if it can read the rows of its evaluation."""
    folder = tmp_path_factory.mktemp("work")
    agent = write(folder / "shop", "plain") / "agent.py"
    entrypoint = "async def invoke_agent(payload):\n"
    assert entrypoint in agent.read_text()
    needs = '    import os, pathlib\n    assert os.environ["STOCK"] == "lamps"\n'
    needs += '    rows = pathlib.Path(__file__).with_name("rows.jsonl")\n'
    needs += '    assert "evaluated" not in payload or rows.read_text() == ""\n'
    rows = (folder / "shop" / "eval.jsonl").read_text().splitlines()[:4]
    written = (json.dumps({**json.loads(row), "evaluated": True}) + "\n" for row in rows)
    (folder / "shop" / "rows.jsonl").write_text("".join(written))
    agent.write_text(agent.read_text().replace(entrypoint, entrypoint + needs))
    return folder


@pytest.fixture(scope="module")
def up(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Stack]]:
    process = subprocess.Popen(
        command(
            "up",
            "--agent",
            "shop/agent.py",
            "--gateways",
            "2",
            "--session-env",
            "STOCK=lamps",
            "--forced-tools",
            "refuse",
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while (stack := Stack.running(folder)) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                pytest.fail(f"up did not start:\n{process.communicate()[0]}")
            time.sleep(0.05)
        yield process, stack
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_its_file_is_for_its_owner_only_and_names_everything(folder: Path, up: tuple[object, Stack]) -> None:
    for name in ("up.json", "up.env"):
        assert stat.S_IMODE((folder / ".agentcore-rl" / name).stat().st_mode) == 0o600
    script = "set -a; . .agentcore-rl/up.env; env"
    completed = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, timeout=30, cwd=folder, check=True
    ).stdout
    for name, value in up[1].environment().items():
        assert f"{name}={value}\n" in completed


def test_its_gateways_treat_forced_tools_as_it_was_told(up: tuple[object, Stack]) -> None:
    stack = up[1]
    assert stack.forced_tools == "refuse"
    with GatewayClient(stack.gateway_url, admin_key=stack.gateway_admin_key) as gateway:
        [session] = gateway.create_sessions([new_session_id()])
        asked: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        agent = OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        with agent, pytest.raises(BadRequestError, match="forced_tools=refuse"):
            agent.chat.completions.create(**asked, response_format={"type": "json_object"})
        gateway.delete([session.session_id])


def test_an_unmodified_aws_client_reaches_it(up: tuple[object, Stack], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in up[1].environment().items():
        monkeypatch.setenv(name, value)
    listed = boto3.Session().client("bedrock-agentcore-control").list_agent_runtimes()["agentRuntimes"]
    assert [found["agentRuntimeArn"] for found in listed] == [up[1].agent_arn]


def test_invoke_finds_it_with_its_variables_and_shows_the_dialogue(folder: Path, up: tuple[object, Stack]) -> None:
    done = run(folder, "invoke", PAYLOAD)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"outcome ok   reward [01]   \d+ turns?, \d+ tokens\n", done.stdout)
    assert "      user  The shop has 41 lamps" in done.stdout
    output = json.loads(run(folder, "invoke", PAYLOAD, "--json", "--agent", "shop/agent.py").stdout)
    assert output["outcome"] == "ok"
    assert output["turns"] == sum(message["role"] == "assistant" for message in output["dialogue"]) > 0
    assert output["sampled_tokens"] > 0


def test_eval_finds_it_with_its_model_and_needs_no_credentials(
    folder: Path, up: tuple[object, Stack], is_what_the_docs_say: Callable[[Path, str], None]
) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "AGENTCORE_"))}
    options = ("--data", "shop/rows.jsonl", "--json", "--sampling-params", '{"temperature": 0}')
    for name, agent in (("found", ()), ("named", ("--agent", "shop/agent.py"))):
        words = command("eval", *options, *agent, "--out", name)
        done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, cwd=folder, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads(done.stdout)
        assert summary["outcomes"] == {"ok": 4}
        assert summary["rewarded"] == 4
        assert json.loads((folder / name / "summary.json").read_text()) == summary
        is_what_the_docs_say(folder / name, "eval")
        with RunReader(folder / name) as kept:
            assert kept.steps()[0]["outcomes"] == {"ok": 4}
            rollout = kept.rollout(1)
            assert rollout is not None
            assert rollout["dialogue"][-1]["role"] == "assistant"
            assert rollout["logprob_min"] is not None
            assert kept.texts([1])
    # Each rollout had its session, and none is left behind.
    with GatewayClient(up[1].gateway_url, admin_key=up[1].gateway_admin_key) as gateway:
        stats = gateway.stats()
        assert [each["sessions"] for each in stats["gateways"].values()] == [0, 0]
        assert [each["turns"] > 0 for each in stats["gateways"].values()] == [True, True]


def test_a_second_one_in_the_folder_is_refused(folder: Path, up: tuple[object, Stack]) -> None:
    done = run(folder, "up", "--agent", "shop/agent.py")
    assert done.returncode == 2
    assert "another `agentcore-rl up` runs in this folder" in done.stderr
    assert Stack.running(folder) == up[1]


def test_a_second_training_on_it_is_refused_while_the_first_one_runs(folder: Path, up: tuple[object, Stack]) -> None:
    """Both would put their weights into one engine, and each would train on the tokens of the other's policy."""
    words = ["train", "--agent", "shop/agent.py", "--data", "shop/train.jsonl", "--groups", "1", "--rollouts", "2"]
    with (folder / "first.log").open("w") as log:
        first = subprocess.Popen(
            command(*words, "--steps", "500", "--out", "first"), stdout=log, stderr=log, cwd=folder
        )
    try:
        wait_for(
            lambda: "step 1 " in (folder / "first.log").read_text() or first.poll() is not None, within_s=DEADLINE_S
        )
        assert first.poll() is None, (folder / "first.log").read_text()
        second = run(folder, *words, "--steps", "1", "--out", "second")
        assert second.returncode == 1, second.stdout + second.stderr
        assert "error: another training puts its weights into the engine of `agentcore-rl up`" in second.stderr
        assert "train --resume --out second" in second.stderr
    finally:
        first.send_signal(signal.SIGINT)
        assert first.wait(DEADLINE_S) == 130
    again = run(folder, "train", "--resume", "--out", "second", "--json")
    assert again.returncode == 0, again.stderr


def test_a_training_computes_in_the_type_of_the_engine(folder: Path, up: tuple[object, Stack]) -> None:
    words = ("train", "--agent", "shop/agent.py", "--data", "shop/train.jsonl", "--steps", "1", "--groups", "1")
    done = run(folder, *words, "--rollouts", "2", "--set", "dtype=bfloat16", "--out", "other")
    assert done.returncode == 0, done.stderr
    assert "note: training computes in float32" in done.stderr


def test_ctrl_c_ends_all_of_it_and_leaves_nothing(folder: Path, up: tuple[subprocess.Popen[str], Stack]) -> None:
    """Last of its module: the stack is gone afterwards."""
    process, stack = up
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) >= 4  # policy, runtime with its template, gateway
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    for name in ("policy", "runtime", "gateway", "agent"):
        assert re.search(rf"^{name} +\S", output, re.MULTILINE), output
    assert not psutil.wait_procs(below, timeout=30)[1]
    assert Stack.running(folder) is None
    assert {path.name for path in (folder / ".agentcore-rl").iterdir()} == {"up.lock"}
    assert not Path(stack.store.removeprefix("file://")).exists()


def test_a_file_that_a_killed_one_left_is_not_believed(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / ".agentcore-rl"
    place.mkdir()
    facts = {"pid": os.getpid(), "agent": "a", "agent_arn": "b", "store": "c", "model": None}
    facts |= {"runtime_url": "d", "gateway_url": "e", "gateway_admin_key": "f", "policy_url": "g"}
    (place / "up.json").write_text(json.dumps(facts))
    assert Stack.running(tmp_path) is None
    (place / "up.lock").touch()
    assert Stack.running(tmp_path) is None
    with Stack(**facts).publish(tmp_path):  # type: ignore[arg-type]
        found = Stack.running(tmp_path)
        assert found is not None
        assert found.pid == os.getpid()
    assert Stack.running(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "text", "fits"),
    [
        ("requirements.txt", "click>=8\nopenai  # the client\n", True),
        ("requirements.txt", "click<1\n", False),
        ("requirements.txt", "no-such-package-here\n", False),
        ("requirements.txt", "no-such-package-here; python_version < '3'\n", True),
        ("requirements.txt", "-r other.txt\n", False),
        ("pyproject.toml", '[project]\nname = "x"\nversion = "1"\ndependencies = ["click>=8"]\n', True),
        ("pyproject.toml", '[project]\nname = "x"\nversion = "1"\ndependencies = ["click==0.1"]\n', False),
        ("other.txt", "", True),
    ],
)
def test_an_agent_runs_in_this_environment_only_where_it_has_what_it_asks_for(
    tmp_path: Path, name: str, text: str, fits: bool
) -> None:
    (tmp_path / name).write_text(text)
    assert fits_here(tmp_path / "agent.py") is fits
