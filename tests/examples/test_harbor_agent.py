"""The Harbor agent: tasks, Dockerfiles without an engine, the sandbox, the tests' reward, and the check of tasks."""

from __future__ import annotations

import base64
import io
import shutil
import socket
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .loading import EXAMPLES

EXAMPLE = EXAMPLES / "harbor_agent"


@pytest.fixture(scope="module")
def bubblewrap() -> None:
    tried = ["bwrap", "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "true"]
    if shutil.which("bwrap") is None or subprocess.run(tried, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs Bubblewrap (scripts/system_packages.sh), allowed to make namespaces")


def files_of(**changes: str) -> dict[str, bytes]:
    """A task that asks for /app/answer; keyword arguments with / written as __ and . as _dot_."""
    files = {
        "task.toml": "[environment]\nallow_internet = false\n",
        "instruction.md": "Write 42 to /app/answer.",
        "environment/Dockerfile": "FROM debian\nWORKDIR /app\nCOPY question .\nENV MOOD=good\nRUN echo $MOOD > mood\n",
        "environment/question": "6 times 7?",
        "tests/test.sh": "#!/bin/bash\nif grep -qsx 42 /app/answer; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "#!/bin/bash\necho 42 > /app/answer\n",
    }
    for name, text in changes.items():
        files[name.replace("__", "/").replace("_dot_", ".")] = text
    return {path: text.encode() for path, text in files.items()}


def task_of(harbor: SimpleNamespace, **changes: str) -> Any:
    return harbor.harbor_tasks.HarborTask.of("answer", files_of(**changes))


# -- tasks


def test_a_task_is_read_packed_without_its_solution_and_read_again(harbor: SimpleNamespace, tmp_path: Path) -> None:
    for path, data in files_of().items():
        (tmp_path / "answer" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "answer" / path).write_bytes(data)
    (task,) = harbor.harbor_tasks.read_tasks(tmp_path)
    assert (task.name, task.instruction, task.settings.environment.network) == (
        "answer",
        "Write 42 to /app/answer.",
        False,
    )
    payload = task.payload()
    sent = harbor.payload.HarborRequest.of({**payload, "_rollout": {}}).load()
    assert sent == task.without_solution()
    assert (sent.solution, sent.digest == task.digest) == (None, False)
    assert b"echo 42" not in base64.b64decode(payload["task_archive"])
    assert harbor.harbor_tasks.read_tasks(tmp_path / "answer") == [task]
    with pytest.raises(ValueError, match="contains no task"):
        harbor.harbor_tasks.read_tasks(EXAMPLE)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"task": {"toolUse": {"name": "bash", "input": {}}}}, "task"),
        ({"task_archive": [{"toolUse": {}}]}, "task_archive"),
        ({"agent": "nobody"}, "there is no agent 'nobody'"),
        ({"step_limit": 0}, "step_limit"),
        ({"steps": 3}, "steps"),
    ],
)
def test_a_payload_that_is_none_is_refused(harbor: SimpleNamespace, changes: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        harbor.payload.HarborRequest.of({**task_of(harbor).payload(), **changes})


def test_an_archive_that_leads_out_or_is_none_is_refused(harbor: SimpleNamespace) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../task.toml"))
    for text, why in (
        (base64.b64encode(made.getvalue()).decode(), "leads out"),
        ("bm8=", "not a .*tar.gz"),
        ("?", "not a .*tar.gz"),
    ):
        with pytest.raises(ValueError, match=why):
            harbor.harbor_tasks.HarborTask.from_archive("x", text)


# -- Dockerfiles


def test_a_dockerfile_is_followed_without_an_engine(harbor: SimpleNamespace) -> None:
    text = """
        # a comment
        FROM python:3.12-slim AS base
        ARG DIR=data
        ENV A=1 B="two words"
        ENV C three words
        WORKDIR /srv
        WORKDIR $DIR
        COPY --chown=1:1 one.txt folder/*.csv ./
        COPY folder /opt/folder
        COPY one.txt renamed.txt
        RUN echo $A && \\
            # a comment inside
            echo two
        RUN ["python3", "-c", "print(1)"]
        USER nobody
        CMD ["sh"]
    """
    context = {"one.txt": b"1", "folder/a.csv": b"a", "folder/b.txt": b"b"}
    plan = harbor.dockerfiles.plan(text, context)
    assert (plan.workdir, plan.env) == ("/srv/data", {"A": "1", "B": "two words", "C": "three words"})
    written: dict[str, bytes] = {}
    runs = []
    for step in plan.steps:
        if isinstance(step, harbor.dockerfiles.Copy):
            written |= {f"{step.folder}{path}": data for path, data in step.files.items()}
        else:
            runs.append(step.argv)
    assert written == {
        "/srv/data/one.txt": b"1",
        "/srv/data/a.csv": b"a",
        "/opt/folder/a.csv": b"a",
        "/opt/folder/b.txt": b"b",
        "/srv/data/renamed.txt": b"1",
    }
    assert [" ".join(argv).split() for argv in runs] == [
        ["/bin/sh", "-c", "echo", "$A", "&&", "echo", "two"],
        ["python3", "-c", "print(1)"],
    ]


# -- the reward


@pytest.mark.parametrize(
    ("as_json", "as_text", "reward"),
    [
        (None, b"1\n", 1.0),
        (None, b"0.25", 0.25),
        (b'{"reward": 0.5, "speed": 3, "ok": true, "why": "x"}', b"1", 0.5),
        (b'{"score": 0.75}', None, 0.75),
        (b'{"a": 1, "b": 0}', b"0.5", 0.5),
        (None, None, None),
        (None, b"", None),
        (None, b"passed", None),
        (None, b"nan", None),
        (b"{", b"1", None),
        (b'{"a": 1, "b": 0}', None, None),
        (b"[1]", None, None),
    ],
)
def test_the_reward_is_what_the_tests_wrote_and_absent_is_not_zero(
    harbor: SimpleNamespace, as_json: bytes | None, as_text: bytes | None, reward: float | None
) -> None:
    verdict = harbor.reward.read_reward(as_json, as_text)
    assert verdict.reward == reward
    assert (verdict.why is None) == (reward is not None)


# -- the sandbox


def test_a_sandbox_shows_the_task_and_nothing_of_this_machine(
    harbor: SimpleNamespace, bubblewrap: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    (tmp_path / "secret").write_text("s3cret")
    with harbor.sandboxes.choose(task_of(harbor), "bubblewrap") as sandbox:

        def output(command: str, limit_s: float = 60) -> str:
            return str(sandbox.run(["bash", "-c", command], limit_s=limit_s).output)

        assert sandbox.workdir == "/app"
        assert output("pwd; cat question mood") == "/app\n6 times 7?good\n"
        assert output("ls /tests; id -u; ls /solution 2>&1").endswith("No such file or directory\n")
        assert "s3cret" not in output(f"env; cat {tmp_path}/secret /etc/shadow /proc/*/environ 2>&1")
        assert output(f"ls -d {EXAMPLE} /home 2>&1 | grep -c 'No such'") == "2\n"
        assert output("touch /usr/x 2>&1 || echo refused").endswith("refused\n")
        # Neither can process 1 be ended or looked into, nor is there a network.
        output("kill -9 1")
        assert "ermission denied" in output("cat /proc/1/fd/0 /proc/1/mem 2>&1")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert output(f"(echo > /dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo open || echo closed") == "closed\n"
        # What a command leaves running is there for the next one; what takes too long is ended.
        output("sleep 1000 & echo $! > pid")
        late = sandbox.run(["bash", "-c", "echo begun; sleep 1000"], limit_s=1)
        assert (late.code, late.output) == (None, "begun\n")
        assert output("kill $(cat pid) && echo there") == "there\n"
        # Files outside cannot be read through a link.
        output("ln -s /etc/passwd /logs/verifier/reward.txt; mkdir -p /logs/verifier/x/y")
        assert sandbox.read("/logs/verifier/reward.txt") is None
        sandbox.write("/logs/verifier", {"a/b": b"1"}, empty_first=True)
        assert output("cd /logs/verifier; find . -type f -o -type l") == "./a/b\n"
        assert (sandbox.read("/logs/verifier/a/b"), sandbox.read("/none")) == (b"1", None)


# -- agents


def test_a_trial_ends_with_what_the_tests_say(
    harbor: SimpleNamespace, bubblewrap: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent is a function: here one that tries to write its reward itself and then does the work, or does not."""
    monkeypatch.setenv("HARBOR_SANDBOX", "bubblewrap")

    def agent(instruction: str, sandbox: Any, connection: Any, limits: Any) -> Any:
        forged = "echo 1 > /logs/verifier/reward.txt"
        command = f"ls /tests | wc -l; {forged}; echo '{forged}' > /tests/test.sh"
        assert sandbox.run(["bash", "-c", command], limit_s=60).output == "0\n"
        if connection.model_id == "works":
            sandbox.run(["bash", "-c", "echo 42 > answer"], limit_s=60)
        return harbor.agents.Ended(status="LimitsExceeded", steps=limits.steps)

    monkeypatch.setitem(harbor.agents.AGENTS, "ours", agent)
    request = harbor.payload.HarborRequest.of({**task_of(harbor).payload(), "agent": "ours", "step_limit": 2})
    for model, reward in (("works", 1.0), ("idles", 0.0)):
        connection = harbor.agents.Connection(model_id=model)
        result = harbor.trial.run_trial(request, request.load(), connection)
        assert (result["rewards"], result["ended"], result["metrics"]) == (
            reward,
            "LimitsExceeded",
            {"steps": 2, "submitted": 0.0},
        )
