"""Which server gets a call, and what is made of its failures, without a network."""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from agentcore_rl_toolkit.errors import ConfigError, GatewayError
from agentcore_rl_toolkit.gateway.config import Limits, UpstreamConfig
from agentcore_rl_toolkit.gateway.router import BROKEN_OFF, UNREACHABLE, Router, ServerLostError, StatusError, Worker
from agentcore_rl_toolkit.messages.errors import RequestError

FOREVER = float("inf")


def routed(count: int, **limits: Any) -> tuple[Router, list[Worker]]:
    router = Router([UpstreamConfig(url=f"http://127.0.0.{i}:1") for i in range(1, count + 1)], Limits(**limits))
    return router, list(router.workers.values())


# Each server: running calls, calls so far, end of its rest, and whether it is drained; and the server that gets the call.
PICKED: list[tuple[list[tuple[int, int, float, bool]], int | None]] = [
    ([(1, 0, 0.0, False), (0, 9, 0.0, False)], 1),
    ([(0, 5, 0.0, False), (0, 4, 0.0, False)], 1),
    ([(0, 4, 0.0, False), (0, 4, 0.0, False)], 0),
    ([(0, 0, FOREVER, False), (9, 9, 1.0, False)], 1),  # its rest is over
    ([(0, 0, FOREVER, False), (9, 9, 1e12, False)], 1),  # all rest: the shortest rest
    ([(0, 0, 0.0, True), (9, 9, FOREVER, False)], 1),
    ([(0, 0, 0.0, True)], None),
    ([], None),
]


@pytest.mark.parametrize(("servers", "picked"), PICKED)
def test_the_server_with_the_fewest_calls_that_does_not_rest_gets_the_next(
    servers: list[Any], picked: int | None
) -> None:
    router, workers = routed(len(servers))
    for worker, facts in zip(workers, servers, strict=True):
        worker.inflight, worker.calls, worker.resting_until, worker.draining = facts
    assert router.pick(None) is (None if picked is None else workers[picked])


def test_a_session_leaves_its_server_if_that_rests_is_drained_or_was_tried() -> None:
    router, (first, second) = routed(2)
    first.inflight = 5
    assert router.pick(first) is first
    assert router.pick(first, [first]) is second
    assert router.pick(first, [first, second]) is None
    first.resting_until = FOREVER
    assert router.pick(first) is second
    first.resting_until, first.draining = 0.0, True
    assert router.pick(first) is second


def test_a_server_rests_twice_as_long_with_each_failure_and_one_success_ends_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, [worker] = routed(1)
    rests = []
    for _ in range(8):
        worker.failed(unreachable=True, why="x")
        rests.append(worker.rest_s)
        assert 0 < worker.resting_until - time.monotonic() <= worker.rest_s
    assert rests == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert len(caplog.records) == 1
    worker.succeeded()
    assert (worker.failures, worker.total_failures, worker.rest_s, worker.resting_until) == (0, 8, 0.0, 0.0)
    for rest_s in (0.0, 0.0, 0.25, 0.5):
        worker.failed(unreachable=False, why="x")
        assert (worker.rest_s, worker.resting_until > 0) == (rest_s, rest_s > 0)
    assert (worker.failures, worker.total_failures) == (4, 12)


@pytest.mark.parametrize(
    ("error", "failures", "rests"),
    [
        (None, 0, False),
        (StatusError(499, {}, b""), 1, False),
        (StatusError(500, {}, b""), 2, False),
        (ServerLostError("x"), 2, True),
        (ValueError(), 1, False),
    ],
)
def test_the_end_of_a_call_decides_about_its_server(error: Exception | None, failures: int, rests: bool) -> None:
    _, [worker] = routed(1)
    worker.failed(unreachable=False, why="x")
    with suppress(ValueError, GatewayError), worker.counted():
        assert (worker.inflight, worker.calls) == (1, 1)
        if error is not None:
            raise error
    assert (worker.inflight, worker.calls, worker.failures, worker.resting_until > 0) == (0, 1, failures, rests)


@pytest.mark.parametrize("outage_s", [0.0, 5.0])
@pytest.mark.parametrize(
    ("resting", "draining", "problem", "down"),
    [
        ([], [], None, True),  # as long as no server was added
        ([0.0, 0.0], [0, 0], None, False),
        ([9.0, 0.0], [0, 0], None, False),
        ([9.0, 9.0], [0, 0], "all engines are down", True),
        ([9.0, 0.0], [0, 1], None, True),
    ],
)
def test_all_servers_are_down_if_all_that_take_calls_rest(
    resting: list[float], draining: list[int], problem: str | None, down: bool, outage_s: float
) -> None:
    router, workers = routed(len(resting), outage_s=outage_s)
    for worker, until, drained in zip(workers, resting, draining, strict=True):
        worker.resting_until, worker.draining = until, bool(drained)
    assert (router.problem, router.is_down) == (problem, down and outage_s > 0)


def test_a_server_that_names_its_first_weights_after_a_version_was_restarted(caplog: pytest.LogCaptureFixture) -> None:
    router, [worker, _] = routed(2)
    found = []
    for version in ("default", "3", None, "default", "default", 4, "other", "default"):
        worker.report_weights(version)
        found.append(worker.forgot)
    assert found == [False, False, False, True, True, False, False, True]
    assert len(caplog.records) == 2
    assert router.problem == "an engine was restarted and does not have the published weights"


def test_a_server_is_added_once_and_drained_when_its_calls_are_done() -> None:
    router, [first, second] = routed(2)
    assert list(router.workers) == ["w0", "w1"]
    assert router.add(UpstreamConfig(url="http://127.0.0.1:1/")) is first
    with pytest.raises(ConfigError, match="another upstream with id w1"):
        router.add(UpstreamConfig(url="http://127.0.0.9:1", worker_id="w1"))
    second.inflight = 1
    assert router.drain("w1") is second
    assert list(router.workers) == ["w0", "w1"]
    second.inflight = 0
    router.sweep()
    assert list(router.workers) == ["w0"]
    assert router.drain("w1") is None


@pytest.mark.parametrize(("status", "up"), [(200, True), (404, True), (499, True), (500, False)])
async def test_a_server_that_answers_a_probe_is_up(monkeypatch: pytest.MonkeyPatch, status: int, up: bool) -> None:
    _, [worker] = routed(1)

    async def answered(path: bytes, body: bytes | None = None, *, timeout_s: float) -> tuple[int, bytes]:
        return status, b'{"weight_version":"3"}'

    monkeypatch.setattr(worker, "ask", answered)
    worker.failed(unreachable=True, why="x")
    await worker.probe()
    assert (worker.resting_until == 0) is up
    worker.report_weights("default")
    assert worker.forgot is (status == 200)  # it had reported a version


def test_an_error_of_a_connection_is_the_servers_or_the_gateways() -> None:
    _, [worker] = routed(1, stream_idle_s=7)
    key: Any = aiohttp.client_reqrep.ConnectionKey("h", 1, False, True, None, None, None)
    for number, refused in ((errno.EMFILE, False), (errno.ENFILE, False), (errno.ECONNREFUSED, True)):
        found = worker.error_of(aiohttp.ClientConnectorError(key, OSError(number, "x")))
        assert isinstance(found, ServerLostError if refused else RequestError)
        assert getattr(found, "refused", False) is refused
    for error, message in (
        (aiohttp.SocketTimeoutError(), "the engine sent nothing for 7 s"),
        (aiohttp.ConnectionTimeoutError(), UNREACHABLE),
        (aiohttp.ServerDisconnectedError(), BROKEN_OFF),
    ):
        assert str(worker.error_of(error)) == message
