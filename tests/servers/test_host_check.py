from unittest.mock import AsyncMock

import pytest

from agentcore_rl_toolkit._servers.host_check import CheckedApp, HostCheck

OWN = [
    "127.0.0.1:8000",
    "127.0.0.1",
    "127.9.9.9:1",
    "localhost",
    "LocalHost:8000",
    "localhost.:8000",
    "[::1]:8000",
    "[::1]",
]
CONTAINERS = ["host.docker.internal:8000", "host.containers.internal", "172.17.0.1:8000"]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "a@localhost",
    "",
    "?",
    "[::1",
]


@pytest.mark.parametrize("host", [*OWN, *CONTAINERS])
def test_a_server_on_loopback_answers_to_its_names_and_to_addresses(host: str) -> None:
    check = HostCheck()
    assert check.refusal(host.encode(), None) is None


@pytest.mark.parametrize("host", FOREIGN)
def test_another_name_is_refused_and_the_option_is_named(host: str) -> None:
    refusal = HostCheck().refusal(host.encode(), None)
    assert refusal is not None
    assert (refusal.status, "--allowed-host" in refusal.message) == (421, True)


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "http://evil.example",
        "http://localhost:3000",
        "http://127.0.0.1:8000",
        "file://",
        "",
        "http://",
        "ws://localhost:8000",
    ],
)
def test_other_origins_are_refused_whatever_the_host(origin: str) -> None:
    refusal = HostCheck().refusal(b"localhost:8000", origin.encode())
    assert refusal is not None
    assert refusal.status == 403
    assert "--allowed-host" in refusal.message


@pytest.mark.parametrize(
    ("host", "origin", "passes"),
    [
        (b"localhost", b"http://localhost:80", True),
        (b"localhost:80", b"http://localhost", True),
        (b"localhost:8000", b"http://localhost:8000", True),
        (b"localhost", b"http://localhost:81", False),
        (b"localhost:81", b"http://localhost", False),
        (b"host.docker.internal:80", b"http://host.docker.internal", False),
    ],
)
def test_a_page_of_the_server_itself_passes_with_the_same_port(host: bytes, origin: bytes, passes: bool) -> None:
    assert (HostCheck().refusal(host, origin) is None) is passes


def test_allowed_names_and_patterns() -> None:
    check = HostCheck(allowed=["gw.example", "*.svc.cluster.local", "localhost:3000"])
    for host in (b"gw.example:443", b"GW.example", b"policy.default.svc.cluster.local"):
        assert check.refusal(host, None) is None
    assert check.refusal(b"notgw.example", None) is not None
    assert check.refusal(b"localhost:8000", b"http://localhost:3000") is None
    assert check.refusal(b"localhost:8000", b"http://localhost:3001") is not None
    assert HostCheck(allowed=["*"]).refusal(b"any.example", b"null") is None
    for origin, passes in (("http://gw.example", True), ("https://gw.example:8443", True), ("ws://gw.example", False)):
        assert (check.refusal(b"localhost:8000", origin.encode()) is None) is passes
    for scheme, passes in (("https", True), ("http", False)):  # a page without a port has that of its scheme
        found = HostCheck(allowed=["gw.example:443"]).refusal(b"localhost", f"{scheme}://gw.example".encode())
        assert (found is None) is passes


def test_a_server_beyond_loopback_knows_this_machines_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "Node7.lab.example")
    for name in (b"node7", b"node7.lab.example:80"):
        assert HostCheck(("0.0.0.0",)).refusal(name, None) is None
        assert HostCheck(("127.0.0.1",)).refusal(name, None) is not None


@pytest.mark.parametrize(
    ("kind", "headers", "statuses"),
    [
        ("http", [("host", "localhost"), ("accept", "a.b")], []),
        ("http", [("host", "a.b")], [421]),
        ("http", [("host", "localhost")] * 2, [421]),
        ("http", [("host", "localhost"), ("origin", "http://a.b")], [403]),
        ("lifespan", [("host", "a.b")], []),
    ],
)
async def test_an_application_gets_only_requests_that_pass(
    kind: str, headers: list[tuple[str, str]], statuses: list[int]
) -> None:
    app, send = AsyncMock(), AsyncMock()
    scope = {"type": kind, "headers": [(name.encode(), value.encode()) for name, value in headers]}
    await CheckedApp(app, HostCheck())(scope, None, send)
    assert [call[0][0]["status"] for call in send.call_args_list[:1]] == statuses
    assert app.called is not bool(statuses)


@pytest.mark.parametrize(
    ("host", "shown", "name"),
    [
        (b"a\x1b[\xe9.example", "a?[?.example", "NAME"),
        (b"Shop.example:8000", "Shop.example:8000", "shop.example"),
        (b"a" * 101, "a" * 100, "a" * 101),
    ],
)
def test_a_refusal_shows_the_option_and_no_character_that_a_terminal_obeys(host: bytes, shown: str, name: str) -> None:
    way = f"start it with --allowed-host {name}."
    unknown = f"'{shown}' is not a name of this server. If it is meant to be, {way}"
    assert HostCheck().refusal(host, None) == (421, unknown)
    foreign = f"web pages of '{f'http://{shown}'[:100]}' may not use this server. If they are to, {way}"
    assert HostCheck().refusal(None, b"http://" + host) == (403, foreign)
