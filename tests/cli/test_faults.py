"""What each command says when something is broken: the cause in its first line, and an exit code that is not zero.

Two tables, one line a case. The commands run in this process, against servers that the whole module shares.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest

from agentcore_rl_toolkit._servers.keys import credential_of_runtime
from agentcore_rl_toolkit.cli.training.services import Services
from agentcore_rl_toolkit.cli.training.stack import QUIET, Stack, start
from serving import moto_server

from ..conftest import CommandLine

# The command line is a program that ends: what it leaves open goes with it.
pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
AGENT = """
import asyncio, os
from openai import AsyncOpenAI
from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()

@app.rollout_entrypoint
async def invoke(payload):
    fault, rollout = payload["fault"], payload["_rollout"]
    if fault == "raises":
        raise RuntimeError(f"the tool backend is {os.environ.get('BACKEND', 'down')}")
    if fault == "hangs":
        await asyncio.sleep(3600)
    if fault == "returns nothing":
        return None
    if fault == "returns no reward":
        return {"text": "hello"}
    if fault == "exits":
        os._exit(3)
    if fault == "wrong payload key":
        payload["question"]
    url, key = rollout["base_url"], rollout.get("api_key", "none")
    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        messages = [{"role": "user", "content": "hello"}]
        await client.chat.completions.create(model=rollout["model_id"], messages=messages, max_tokens=4)
    return {"rewards": 1.0}

if __name__ == "__main__":
    app.run()
"""
ABSENT = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/absent-0123456789"
HANG_S = "2"
BUCKET = "records-of-the-faults"

# Agents: what is wrong -> what the first line must say, for every command that runs rollouts.
BROKEN_AGENTS = {
    "raises": r"agent_error.*the tool backend is down",
    "hangs": r"timeout: ",
    "returns nothing": r"invalid|no reward|agent_error",
    "returns no reward": r"reward",
    "exits": r"lost.*(exit|ended)",
    "wrong payload key": r"agent_error.*'question'",
}

# Agents that do not even load: command line, first line.
NO_MODULE, EXITS = r"No module named 'a_module_that_is_not_there'", r"exits\.py|exit"
nightly = pytest.mark.nightly  # each starts services, the last one's first line is the same function's
DO_NOT_LOAD = [
    ("up --agent exits.py", EXITS),
    ("train --agent no_module.py --data rows.jsonl", NO_MODULE),
    ("eval --agent no_module.py --data rows.jsonl", NO_MODULE),
]

EVAL = "eval --data model.jsonl --timeout 20"
# Addresses and names: command line, what is wrong with the running stack or the environment, exit code, first line.
WRONG: list[tuple[str, str, int, str]] = [
    # folder, key
    (
        f"AGENTCORE_RL_MODEL_API_KEY=wrong {EVAL} --base-url {{gateway}}/sessions/{'x' * 40}/v1 --model-id policy",
        "",
        1,
        r"lost.*40[134]",
    ),
    (EVAL, "key", 1, r"admin key|401|403"),
    ("up --agent agent.py --model absent", "alone", 2, r"no model folder absent"),
    ("up --agent agent.py --model .", "alone", 2, r"holds no model: it lacks config\.json"),
    # ARN
    (
        f"AWS_ENDPOINT_URL_BEDROCK_AGENTCORE={{runtime}} {EVAL} --agent {ABSENT} --bucket file://{{here}}/s",
        "",
        1,
        r"(ResourceNotFound|no agent).*",
    ),
    (
        f"AWS_ENDPOINT_URL_BEDROCK_AGENTCORE={{runtime}} {EVAL} --agent arn:aws:nothing --bucket file://{{here}}/s",
        "",
        2,
        r"arn:aws:nothing",
    ),
    (EVAL, "arn", 1, r"ResourceNotFound|no agent"),
    ("eval --data two.jsonl", "arn", 2, r"every rollout would fail like its first one: .*(ResourceNotFound|no agent)"),
    # bucket
    (f"{EVAL} --bucket nobodys", "moto", 2, r"--bucket nobodys: .*does not exist"),
    (f"{EVAL} --bucket -bucket-", "", 2, r"is not a store"),
    ("train --backend trl --config bucket.toml", "", 2, r"s3_bucket is empty: give a bucket or a store URL"),
    ("train --agent agent.py --data model.jsonl --bucket nobodys", "", 2, r"No such option:? '?--bucket"),
    # credentials
    (
        f"AWS_ENDPOINT_URL_BEDROCK_AGENTCORE={{runtime}} {EVAL} --agent {ABSENT} --bucket file://{{here}}/s",
        "no credentials",
        2,
        r"no credentials: ",
    ),
    ("deploy --agent agent.py --bucket nobodys --smoke none", "no credentials", 2, r"no credentials: "),
    (
        "deploy --agent agent.py --bucket nobodys --smoke none --dry-run",
        "no region",
        2,
        r"no AWS region: give --region",
    ),
    # a run
    ("runs show absent", "", 2, r"absent is not a run"),
    ("view absent", "", 2, r"absent is not a run"),
    ("train --resume", "", 2, r"no unfinished run"),
    # no agent, no data
    (f"{EVAL} --agent absent.py", "", 2, r"there is no agent file absent"),
    (EVAL, "alone", 2, r"--agent is missing"),
    ("""invoke {"fault":"" --agent agent.py""", "", 2, r"not JSON"),
]


@dataclass(frozen=True)
class Work:
    """A folder with an agent and its data, a stack that runs it, and an account with a bucket."""

    folder: Path
    stack: Stack
    moto: str
    keys: tuple[str, str]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Work]:
    folder = tmp_path_factory.mktemp("work")
    (folder / "agent.py").write_text(AGENT)
    (folder / "no_module.py").write_text("import a_module_that_is_not_there\n")
    (folder / "exits.py").write_text("import os\nos._exit(3)\n")
    for name in (*BROKEN_AGENTS, "model"):
        (folder / f"{name}.jsonl").write_text(f'{{"fault": "{name}"}}\n')
    (folder / "rows.jsonl").write_text('{"fault": ""}\n')
    (folder / "two.jsonl").write_text('{"fault": ""}\n{"fault": ""}\n')
    for name, limit_s in (("short", HANG_S), ("long", "60")):
        (folder / f"{name}.toml").write_text(f"rollout_timeout_s = {limit_s}\ngroups = 1\nrollouts = 2\nsteps = 1\n")
    (folder / "bucket.toml").write_text(
        f'agent_runtime_arn = "{ABSENT}"\ns3_bucket = " "\nexp_id = "e"\nmodel = "m"\n'
        'gateway_url = "http://127.0.0.1:1"\npolicy_url = "http://127.0.0.1:2"\n'
        'data_path = "rows.jsonl"\n'
    )
    key = secrets.token_urlsafe(8)
    environment = {**QUIET, "AGENTCORE_RL_GATEWAY_ADMIN_KEY": key}
    with (
        moto_server() as moto,
        Services(folder / "logs", env=environment) as services,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            patch.setenv(name, "us-west-2")  # as it was, afterwards
        stack = start(services, folder / "agent.py", folder=folder / "up", model=None, admin_key=key)
        keys = credential_of_runtime(stack.runtime_url)
        assert keys is not None
        yield Work(folder, stack, moto, keys)


@pytest.fixture
def here(work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the files, and an environment in which nothing is set."""
    for file in work.folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith(("AWS_", "AGENTCORE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def call(words: list[str], command_line: CommandLine) -> tuple[int, str, str]:
    """Exit code, the first line that is no progress, and all of the output."""
    done = command_line(*words)
    progress = re.compile(r"\d+/\d+ done|still |.* has changed:|[Uu]sage:|Try 'agentcore-rl|$")
    lines = [line for line in done.stderr.splitlines() if not progress.match(line)]
    return done.returncode, lines[0] if lines else "", f"{done.stdout}\n--- stderr\n{done.stderr}"


@pytest.mark.parametrize("fault", BROKEN_AGENTS)
@pytest.mark.parametrize(
    "command", ["invoke", pytest.param("eval", marks=nightly), pytest.param("train", marks=nightly)]
)
def test_a_broken_agent_is_said_in_the_first_line(
    work: Work,
    here: Path,
    command: str,
    fault: str,
    command_line: CommandLine,
) -> None:
    limit = HANG_S if fault == "hangs" else "60"
    words = {
        "invoke": ["invoke", json.dumps({"fault": fault}), "--timeout", limit],
        "eval": ["eval", "--data", f"{fault}.jsonl", "--timeout", limit, "--out", "out"],
        "train": ["train", "--agent", "agent.py", "--data", f"{fault}.jsonl", "--out", "run"],
    }[command]
    wanted = BROKEN_AGENTS[fault]
    if command == "train":
        words += ["--session-env", "BACKEND=gone"]
        wanted = "none of the first 2 rollouts can be used.*" + wanted.replace("down", "gone")
        words += ["--config", "short.toml" if fault == "hangs" else "long.toml"]
    stack = dataclasses.replace(work.stack, agent=str((here / "agent.py").resolve()))
    began_s = time.monotonic()
    with stack.publish(here):
        code, first, answer = call(words, command_line)
    assert time.monotonic() - began_s < 90, "a hanging agent is waited for as long as it may take, no longer"
    assert code == 1, answer
    assert first.startswith("error: "), answer
    assert re.search(wanted, first), answer
    run = here / "run" / "metrics.jsonl"
    assert not run.exists() or '"step"' not in run.read_text()
    assert "Traceback" in answer or fault not in ("raises", "wrong payload key") or command == "eval"


@pytest.mark.parametrize(("line", "wanted"), DO_NOT_LOAD)
def test_an_agent_that_does_not_load_is_said_in_the_first_line(
    here: Path, line: str, wanted: str, command_line: CommandLine
) -> None:
    code, first, answer = call(line.split(), command_line)
    assert code == 1, answer
    assert first.startswith("error: "), answer
    assert re.search(wanted, first), answer


@pytest.mark.parametrize(("line", "what", "code", "wanted"), WRONG, ids=[f"{w[0]} [{w[1]}]" for w in WRONG])
def test_what_is_wrong_is_said_in_the_first_line(
    work: Work,
    here: Path,
    line: str,
    what: str,
    code: int,
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
    command_line: CommandLine,
) -> None:
    stack = dataclasses.replace(work.stack, agent=str((here / "agent.py").resolve()))
    places = {"policy": stack.policy_url, "gateway": stack.gateway_url, "runtime": stack.runtime_url, "here": str(here)}
    places["bucket"] = BUCKET
    changes: dict[str, dict[str, Any]] = {
        "key": {"gateway_admin_key": "wrong"},
        "arn": {"agent_arn": ABSENT},
    }
    key, secret = work.keys  # the runtime's own; moto takes any
    environment = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_REGION": "us-west-2"}
    if "no credentials" in what:
        environment = {"AWS_REGION": "us-west-2"}
    if what == "no region":
        del environment["AWS_REGION"]
    if "moto" in what:
        environment |= {"AWS_ENDPOINT_URL": work.moto, "AWS_ALLOW_HTTP": "true"}
        environment["AWS_ENDPOINT_URL_BEDROCK_AGENTCORE_CONTROL"] = stack.runtime_url
        _bucket(work.moto)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    places["key"] = stack.gateway_admin_key
    words = [re.sub(r"\{(\w+)\}", lambda found: str(places[found[1]]), word) for word in line.split()]
    while re.match(r"[A-Z_]+=", words[0]):
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    if what == "alone":
        found, first, answer = call(words, command_line)
    else:
        with dataclasses.replace(stack, **changes.get(what, {})).publish(here):
            found, first, answer = call(words, command_line)
    assert found == code, answer
    assert re.match(r"fail|error: |Error: ", first), answer
    assert re.search(wanted, first), answer


def _bucket(url: str) -> None:
    s3 = boto3.client(
        "s3", endpoint_url=url, aws_access_key_id="testing", aws_secret_access_key="testing", region_name="us-west-2"
    )
    # What moto holds is the process's, shared by the servers of all files: other buckets may be there.
    if BUCKET not in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]:
        location: Any = {"LocationConstraint": "us-west-2"}
        s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration=location)
