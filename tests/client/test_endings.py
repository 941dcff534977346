"""A session that died at a local runtime is known at once, with the runtime's own cause; AWS is never asked."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest

from agentcore_rl_toolkit._servers import keys
from agentcore_rl_toolkit.client import RolloutClient
from agentcore_rl_toolkit.client.transport import CallError, Transport, is_aws
from agentcore_rl_toolkit.contract import Outcome, new_session_id
from agentcore_rl_toolkit.errors import ConfigError, RolloutLostError
from serving import Asked, answering

from ..runtime.conftest import Server, start_server, wait_for

__all__ = ["start_server"]  # a fixture
AGENT = Path(__file__).parent / "mortal_agent.py"
LATE_S = 10.0  # of a machine with five times as many busy processes as cores; the mechanism takes about one


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A runtime that asks for signatures."""
    folder = tmp_path_factory.mktemp("runtime")
    server = Server(folder, "--isolation", "none", agent=AGENT, credential="AKMINE:s3cr3t-of-mine")
    yield server
    server.stop()


@pytest.fixture
def local(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutClient]:
    session = boto3.Session("AKMINE", "s3cr3t-of-mine", region_name="us-west-2")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", session)
    with RolloutClient(server.arn, f"file://{tmp_path}/store", "exp", endpoint_url=server.url) as client:
        yield client


def lateness_s(server: Server, session_id: str, known_s: float) -> float:
    """Seconds from the end of the session's process until the client knew."""
    return known_s - float(wait_for(lambda: (server.ended(session_id) or {}).get("gone_unix_s")))


def lost(
    server: Server, client: RolloutClient, payload: dict[str, Any], act: Callable[[str], None] | None = None
) -> str:
    """The first line of the error of a rollout whose session dies."""
    future = client.invoke(payload)
    if act is not None:
        wait_for(lambda: server.session(future.session_id))
        act(future.session_id)
    error = future.exception(60)
    known_s = time.time()
    assert isinstance(error, RolloutLostError)
    assert future.outcome is Outcome.LOST
    late_s = lateness_s(server, future.session_id, known_s)
    print(f"{payload['how']}: known {late_s:.2f} s after the session's end")
    assert late_s < LATE_S
    return str(error).splitlines()[0]


def test_the_cause_of_a_death_is_the_first_line_of_the_error(server: Server, local: RolloutClient) -> None:
    assert "the session's process ended with status 3" in lost(server, local, {"how": "exit"})


def test_a_session_id_with_a_slash_is_asked_for_as_it_is(server: Server, local: RolloutClient) -> None:
    future = local.invoke({"how": "exit"}, f"session of today/{'7' * 30}")
    assert "ended with status 3" in str(future.exception(25))  # without the runtime's word it takes 35 s


def test_one_death_is_nobody_elses(server: Server, local: RolloutClient) -> None:
    payloads = [{"how": "ok", "after_s": 1.5}, {"how": "exit"}, {"how": "ok", "after_s": 1.5}]
    items = local.map(payloads, 3, timeout=60)
    assert [item.outcome for item in items] == [Outcome.OK, Outcome.LOST, Outcome.OK]


def test_a_runtime_that_is_away_is_asked_again_later_without_a_word_in_the_log() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        transport = plain_transport(f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(CallError, match="refused"):  # what the asking loop expects
            transport.endings([new_session_id()])


def plain_transport(url: str | None) -> Transport:
    arn = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/a-AbCdEfGhIj"
    return Transport(arn, region="us-west-2", endpoint_url=url, qualifier=None, pool_connections=4, read_timeout_s=60.0)


class Restarted:
    """A runtime that takes the requests of one key, and holds those whose body is `hold` until it is told."""

    def __init__(self) -> None:
        self.key = "AKONE"
        self.holding, self.go = threading.Event(), threading.Event()
        self.fault = ""

    def answer(self, asked: Asked) -> tuple[Any, ...]:
        key = self.key
        if asked.body == b"hold":
            self.holding.set()
            self.go.wait(60)
            if self.fault:
                return 424, {"message": "Received error (500) from runtime"}, {"x-amzn-ErrorType": self.fault}
        if f"Credential={key}/" not in asked.headers["authorization"]:
            return 403, {"message": "no"}, {"x-amzn-ErrorType": "AccessDeniedException"}
        return 200, {"ended": {}}


@pytest.fixture
def restarted() -> Iterator[tuple[Restarted, str]]:
    runtime = Restarted()
    with answering(runtime.answer) as url:
        path = keys.leave(keys.RUNTIME, url, "AKONE:first")
        yield runtime, url
        keys.forget(path)


def test_a_runtime_that_was_started_again_is_asked_with_its_new_key(restarted: tuple[Restarted, str]) -> None:
    runtime, url = restarted
    transport = plain_transport(url)
    assert transport.endings(["s"]) == {}
    runtime.key = "AKTWO"
    for _ in range(2):  # the second time, its key file is there
        with pytest.raises(CallError, match="403"):
            transport.endings(["s"])
        keys.leave(keys.RUNTIME, url, "AKTWO:second")
    assert transport.endings(["s"]) == {}


@pytest.mark.parametrize("fault", ["", "RuntimeClientError"])
def test_every_call_that_a_restart_refused_is_sent_again_and_no_other(
    restarted: tuple[Restarted, str], fault: str
) -> None:
    runtime, url = restarted
    runtime.fault = fault
    transport = plain_transport(url)
    transport.invoke(new_session_id(), b"{}")
    runtime.key = "AKTWO"
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(transport.invoke, new_session_id(), b"hold")
        assert runtime.holding.wait(60)
        keys.leave(keys.RUNTIME, url, "AKTWO:second")
        with pytest.raises(CallError, match="AccessDenied"):
            transport.invoke(new_session_id(), b"{}")
        transport.invoke(new_session_id(), b"{}")  # with the new key
        runtime.go.set()
        error = early.exception(60)
    if fault:  # the agent may have run
        assert isinstance(error, RolloutLostError)
    else:
        assert isinstance(error, CallError)
        assert error.credentials


def test_a_runtime_of_another_user_is_asked_with_the_callers_credentials() -> None:
    runtime = Restarted()
    runtime.key = "test"
    with answering(runtime.answer) as url:
        assert plain_transport(url).endings(["s"]) == {}


@pytest.mark.parametrize("status", [500, 503, 429, 401, 403, 200, 400, 404, 499])
def test_a_refusal_of_the_runtime_may_pass_and_the_reply_of_another_server_does_not(status: int) -> None:
    with answering(lambda _: (status, {})) as url:
        if status >= 500 or status in (429, 401, 403):
            with pytest.raises(CallError, match=f"the runtime answered with status {status}"):
                plain_transport(url).endings(["a"])
        else:
            assert plain_transport(url).endings(["a"]) is None


def test_a_runtime_that_starts_after_the_client_was_made_gets_its_own_key() -> None:
    runtime = Restarted()
    with answering(runtime.answer) as url:
        transport = plain_transport(url)
        with pytest.raises(ConfigError, match="AccessDenied"):
            transport.invoke(new_session_id(), b"{}")
        path = keys.leave(keys.RUNTIME, url, "AKONE:first")
        with pytest.raises(CallError, match="AccessDenied"):
            transport.invoke(new_session_id(), b"{}")
        transport.invoke(new_session_id(), b"{}")
        keys.forget(path)


def test_aws_is_never_asked() -> None:
    assert is_aws("https://bedrock-agentcore.us-west-2.amazonaws.com")
    assert is_aws("https://bedrock-agentcore.cn-north-1.amazonaws.com.cn")
    assert not is_aws("http://127.0.0.1:8080")
    assert not is_aws("https://amazonaws.com.example.org")
    assert plain_transport(None).endings([new_session_id()]) is None
