"""One call is one request, and the kind of failure says what is known about the agent."""

from __future__ import annotations

import json
import time

import boto3
import pytest

from agentcore_rl_toolkit.aws_errors import Fate
from agentcore_rl_toolkit.client.transport import MAX_REPLY_BYTES, CallError, Transport, parse_reply
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import AgentError, InvalidResultError, RolloutError, RolloutLostError
from scripted_runtime import ARN, ScriptedRuntime


def transport(url: str, read_timeout_s: float = 5.0) -> Transport:
    return Transport(
        ARN,
        region="us-west-2",
        endpoint_url=url,
        qualifier="DEFAULT",
        pool_connections=8,
        read_timeout_s=read_timeout_s,
    )


def test_read_timeout_is_uncertain_and_not_sent_again(runtime: ScriptedRuntime) -> None:
    with pytest.raises(CallError, match="ReadTimeoutError"):
        transport(runtime.url, read_timeout_s=0.3).invoke(new_session_id(), b'{"script": {"cold_start_s": 3}}')
    time.sleep(0.5)
    assert runtime.requests["invoke"] == 1


@pytest.mark.parametrize("given", [True, False])
def test_refused_credentials_are_renewed_unless_the_program_gave_them(
    runtime: ScriptedRuntime, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    session = boto3.Session("given", "secret") if given else boto3.Session()
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", session)
    caller = transport(runtime.url)
    caller.invoke(new_session_id(), b"{}")
    for fresh in ("second", "third"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", fresh)
        runtime.faults.append("expired")
        with pytest.raises(CallError, match="ExpiredToken"):
            caller.invoke(new_session_id(), b"{}")
        caller.invoke(new_session_id(), b"{}")
        assert caller._session.get_credentials().access_key == ("given" if given else fresh)


def test_an_answer_without_end_is_read_to_its_bound_only(runtime: ScriptedRuntime) -> None:
    def reply(size: int) -> bytes:
        return json.dumps({"script": {"reply": {"result_key": "e/i/s.json", "x": "x" * size}}}).encode()

    most = MAX_REPLY_BYTES - 100
    assert len(transport(runtime.url).invoke(new_session_id(), reply(most))) > most
    body = transport(runtime.url).invoke(new_session_id(), reply(8 * MAX_REPLY_BYTES))
    assert len(body) == MAX_REPLY_BYTES
    with pytest.raises(InvalidResultError, match=r"not JSON.*@app.rollout_entrypoint"):
        parse_reply(body, "s")


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        (b"not json", InvalidResultError, "not JSON"),
        (b"[1]", InvalidResultError, "answered with list, not an object"),
        (b'{"status": "done"}', InvalidResultError, r"the fields \['status'\]"),
        (json.dumps(dict.fromkeys("ihgfedcba")).encode(), InvalidResultError, r"\['a', .*'h'\]"),
        (b'{"error": "exp_id missing"}', AgentError, "the agent refused: exp_id missing"),
        (b'{"status": "refused", "result_key": "k", "error": "no access"}', RolloutLostError, "^no access$"),
        (b"[" * 100_000, InvalidResultError, "not JSON"),
        (b'{"result_key": ' + b"9" * 5000 + b"}", InvalidResultError, "not JSON"),
    ],
    ids=["words", "list", "no key", "many fields", "refused", "no store", "deep", "long number"],
)
def test_reply_that_names_no_result_is_a_failure(body: bytes, error: type[RolloutError], text: str) -> None:
    with pytest.raises(error, match=text):
        parse_reply(body, "s")


def test_a_failed_call_was_throttled_or_failed_at_the_service() -> None:
    expected = {
        **{
            (Fate.REFUSED, 429): (True, False),
            (Fate.REFUSED, 409): (False, False),
            (Fate.UNCERTAIN, 500): (False, True),
        },
        **dict.fromkeys([(Fate.UNCERTAIN, 499), (Fate.UNCERTAIN, None), (Fate.TRANSIENT, 503)], (False, False)),
    }
    errors = {about: CallError("x", fate=about[0], status=about[1]) for about in expected}
    assert {about: (error.throttled, error.server_error) for about, error in errors.items()} == expected
