"""What is said where something is missing or fails: one line a case, with what to do."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from rich.console import Console

from agentcore_rl_toolkit.app.causes import elsewhere
from agentcore_rl_toolkit.backends.collection.groups import CollectedRollout
from agentcore_rl_toolkit.cli import main
from agentcore_rl_toolkit.cli.output.failures import Failure, explain
from agentcore_rl_toolkit.cli.training.display import Display
from agentcore_rl_toolkit.cli.training.services import ServiceError
from agentcore_rl_toolkit.cli.training.stack import explain as explain_error
from agentcore_rl_toolkit.client.transport import parse_reply
from agentcore_rl_toolkit.contract import Cause, Outcome
from agentcore_rl_toolkit.errors import InvalidResultError, ScorerError
from agentcore_rl_toolkit.isolation.hints import hint

from ..conftest import CommandLine

SESSION = {"AWS_ACCESS_KEY_ID": "local"}
TRACEBACK = """Traceback (most recent call last):
  File "/home/me/shop/agent.py", line 7, in run
    score(payload)
    ~~~~~^^^^^^^^^
  File "/home/me/shop/reward.py", line 3, in score
    return float(payload["answer"])
                 ~~~~~~~^^^^^^^^^^
  File "/env/lib/python3.11/site-packages/json/decoder.py", line 9, in decode
    raise KeyError(name)
KeyError: 'answer'
"""


def test_failures_that_differ_only_in_ids_are_counted_together() -> None:
    failures = [Failure.of("lost", "HTTP 503", None)]
    failures += [Failure.of("lost", f"session rollout-{n}f8a0c61e7 is lost", None) for n in range(3)]
    assert explain(failures, 8) == "4 of 8 rollouts failed; 3 of them: lost: session rollout-0f8a0c61e7 is lost"


def test_failed_rows_are_explained_by_their_most_frequent_error_and_its_line() -> None:
    failures = [Failure.of("agent_error", f"KeyError: {i}", TRACEBACK) for i in range(3)]
    failures += [Failure.of("lost", "the session ended", None)]
    said = "4 of 8 rollouts failed; 3 of them: agent_error: KeyError: 0\n"
    assert explain(failures, 8) == said + '    /home/me/shop/reward.py, line 3: return float(payload["answer"])'
    out = io.StringIO()
    with Display(Console(file=out, width=200), total_rollouts=16) as display:
        facts: dict[str, Any] = dict.fromkeys(("reward_ok", "tool_use", "logprob_gap"))
        facts |= {
            "reward": 0.0,
            "sampled_tokens": 0,
            "causes": {},
            "rollout_s": 0.0,
            "train_s": 0.0,
            "groups_that_differ": 0,
            "metrics": {},
        }
        for step in range(2):
            for failure in failures + [None] * 4:
                display.rollout(Cause.AGENT if failure else None, None, 1, failure=failure)
            display.step({"step": step, **facts})
        scored: dict[str, Any] = {"outcome": Outcome.OK, "cause": Cause.SCORER, "error": ScorerError("score.py raised")}
        display.observe("rollout", {"rollout": CollectedRollout(session_id="s", input_id="i", index=0, **scored)})
        display.step({"step": 2, **facts})
    assert out.getvalue().count("note: " + said) == 1
    assert "note: 1 of 1 rollouts failed; 1 of them: score.py raised\n" in out.getvalue()


def test_a_log_that_is_gone_is_left_out() -> None:
    text = "it ended\nIts log{} ends with:\nno memory"
    error = ServiceError(text.format(" (/tmp/a/logs/policy server.log)"))
    assert explain_error(error, gone="/tmp/a") == text.format("")


def test_an_entrypoint_of_the_plain_app_is_named() -> None:
    for body in (b'{"result": 5}', b'"forty-two"'):
        with pytest.raises(InvalidResultError, match=r"@app\.rollout_entrypoint on an AgentCoreRLApp"):
            parse_reply(body, "s")


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(**options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/a")

    monkeypatch.setattr(main, "cli", full)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: the disk is full (")
    assert said.count("\n") == 1


def test_a_path_that_cannot_be_written_is_one_line(tmp_path: Path, command_line: CommandLine) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "traces.jsonl").write_text('{"turns": [{"input": "hi"}]}\n')
    for place in ("absent/rows.jsonl", "file/rows.jsonl", "x" * 300):
        done = command_line("harvest", str(tmp_path / "traces.jsonl"), "--out", str(tmp_path / place))
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert done.stderr.startswith("error: ")
        assert str(tmp_path / place) in done.stderr


def test_a_variable_that_the_session_lacks_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for name, use in (("JUDGE_KEY", lambda: os.environ["JUDGE_KEY"]), ("OPENAI_API_KEY", openai.OpenAI)):
        with pytest.raises(Exception) as raised:  # noqa: PT011  # a KeyError, and one of the SDK's
            use()
        assert (
            hint(raised.value, SESSION)
            == f"The session has no variable {name}. Give it with --session-env {name}, or --env-file FILE"
        )
        assert hint(raised.value, {**SESSION, name: "x"}) is None
        assert hint(raised.value, {}) is None
    with pytest.raises(KeyError) as raised:
        {}["JUDGE_KEY"]
    assert hint(raised.value, SESSION) is None


def test_a_failed_call_that_was_not_to_the_gateway_is_named_by_its_address() -> None:
    with pytest.raises(openai.APIConnectionError) as raised:
        openai.OpenAI(api_key="x", base_url="http://127.0.0.1:9/judge/v1", max_retries=0).models.list()
    assert elsewhere(raised.value, "http://127.0.0.1:8080/s/1/v1") == "http://127.0.0.1:9/judge/v1/models"
    assert elsewhere(raised.value, "http://127.0.0.1:9/s/1/v1") is None
    assert elsewhere(ValueError("no call"), "http://127.0.0.1:9/s/1/v1") is None
    assert elsewhere(httpx.ConnectError("never set"), None) is None
