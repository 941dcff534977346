"""One call is one request, and the kind of failure says what is known about the agent."""

from __future__ import annotations

import json
import time

import pytest
from botocore.exceptions import ClientError

from agentcore_rl_toolkit.client.data_plane.transport import (
    MAX_REPLY_BYTES,
    InvokeFailedError,
    InvokeRefusedError,
    InvokeServerError,
    InvokeUncertainError,
    Transport,
    classify,
    parse_reply,
)
from agentcore_rl_toolkit.contract import new_session_id
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
    with pytest.raises(InvokeUncertainError):
        transport(runtime.url, read_timeout_s=0.3).invoke(new_session_id(), b'{"script": {"cold_start_s": 3}}')
    time.sleep(0.5)
    assert runtime.requests["invoke"] == 1


def test_an_answer_without_end_is_read_to_its_bound_only(runtime: ScriptedRuntime) -> None:
    def reply(size: int) -> bytes:
        return json.dumps({"script": {"reply": {"result_key": "e/i/s.json", "x": "x" * size}}}).encode()

    most = MAX_REPLY_BYTES - 100
    assert len(transport(runtime.url).invoke(new_session_id(), reply(most))) > most
    with pytest.raises(InvokeFailedError, match="more than 1048576 bytes") as caught:
        transport(runtime.url).invoke(new_session_id(), reply(8 * MAX_REPLY_BYTES))
    assert caught.value.code == "BadReply"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"not json", "BadReply"),
        (b"[1]", "BadReply"),
        (b'{"status": "done"}', "BadReply"),
        (b'{"error": "exp_id missing"}', "AgentRefused"),
        (b"[" * 100_000, "BadReply"),
        (b'{"result_key": ' + b"9" * 5000 + b"}", "BadReply"),
    ],
    ids=["words", "list", "no key", "refused", "deep", "long number"],
)
def test_reply_that_names_no_result_is_a_failure(body: bytes, code: str) -> None:
    with pytest.raises(InvokeFailedError) as caught:
        parse_reply(body, "s")
    assert caught.value.code == code


def test_status_and_error_name_decide_and_the_words_of_a_message_do_not() -> None:
    for status, code, kind in (
        (424, "RuntimeClientError", InvokeFailedError),
        (429, "ThrottlingException", InvokeRefusedError),
        (402, "ServiceQuotaExceededException", InvokeRefusedError),
        (409, "RetryableConflictException", InvokeRefusedError),
        (502, "", InvokeServerError),
        (400, "ValidationException", InvokeFailedError),
        (408, "RequestTimeoutException", InvokeRefusedError),
        (404, "ResourceNotFoundException", InvokeFailedError),
    ):
        for words in ("", "Rate exceeded (429)", "InternalServerException"):
            answer = {"Error": {"Code": code, "Message": words}, "ResponseMetadata": {"HTTPStatusCode": status}}
            assert type(classify(ClientError(answer, "InvokeAgentRuntime"), "s")) is kind
