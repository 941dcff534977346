from dataclasses import dataclass

from agentcore_rl_toolkit._servers.connection_room import ConnectionRoom

HERE = "127.0.0.1"


@dataclass(eq=False)
class Open:
    address: str
    idle_since: float | None
    used: bool = False


def arrive(room: ConnectionRoom, everyone: list[Open], new: Open, now: float) -> list[Open]:
    everyone.append(new)
    if not room.opened(new.address) and len(everyone) <= room.limit:
        return []
    closed = room.make_room(new, everyone, now)
    for each in closed:
        everyone.remove(each)
        room.closed(each.address)
    return closed


def test_nobody_is_closed_while_there_is_room() -> None:
    room, everyone = ConnectionRoom(64), []
    assert not any(arrive(room, everyone, Open(HERE, float(n)), 100.0) for n in range(64))


def test_the_longest_idle_that_never_asked_anything_go_first() -> None:
    room, everyone = ConnectionRoom(64), []
    old = [Open(HERE, float(n), used=True) for n in range(32)]
    for each in [*old, *(Open(HERE, 100.0 + n) for n in range(32))]:
        arrive(room, everyone, each, 200.0)
    closed = arrive(room, everyone, Open(HERE, 300.0), 300.0)
    assert [c.idle_since for c in closed] == [100.0, 101.0, 102.0, 103.0]
    assert all(each in everyone for each in old)


def test_a_client_that_is_slow_to_ask_stays_while_there_is_any_room() -> None:
    room, everyone = ConnectionRoom(64), []
    for n in range(room.most):
        assert arrive(room, everyone, Open(HERE, 10.0), 10.0 + n / 20) == []


def test_what_came_a_moment_ago_stays_while_there_is_any_room() -> None:
    room, everyone = ConnectionRoom(64), []
    for n in range(room.most):
        assert arrive(room, everyone, Open(HERE, 10.0), 10.0 + n / 1000) == []
    last = Open(HERE, 10.9)
    closed = arrive(room, everyone, last, 10.9)
    assert closed
    assert last not in closed


def test_a_request_under_way_is_never_closed() -> None:
    room, everyone = ConnectionRoom(64), []
    for n in range(room.most):
        assert arrive(room, everyone, Open(HERE, None), float(n)) == []
    one_more = Open(HERE, 500.0)
    assert arrive(room, everyone, one_more, 500.0) == [one_more]


def test_another_machine_leaves_room_for_others() -> None:
    room, everyone = ConnectionRoom(64), []
    refused = 0
    for n in range(200):
        refused += bool(arrive(room, everyone, Open("10.0.0.1", None), float(n)))
    assert len(everyone) == room.most - room.most // 4
    assert refused == 200 - len(everyone)
    assert arrive(room, everyone, Open("10.0.0.2", 300.0), 300.0) == []


def test_the_peer_with_most_connections_makes_room_for_others() -> None:
    room, everyone = ConnectionRoom(64), []
    for n in range(16):
        arrive(room, everyone, Open("10.0.0.1", float(n)), 0.0)
    for n in range(48):
        arrive(room, everyone, Open("10.0.0.2", 100.0 + n), 0.0)
    closed = arrive(room, everyone, Open("10.0.0.3", 300.0), 300.0)
    assert closed
    assert {c.address for c in closed} == {"10.0.0.2"}


def test_with_nobody_idle_nobody_is_looked_for_again_at_once() -> None:
    room, everyone = ConnectionRoom(64), []
    for n in range(room.most):
        arrive(room, everyone, Open(HERE, None), float(n))
    arrive(room, everyone, Open(HERE, 500.0), 500.0)
    everyone[0].idle_since = 400.0
    refused = Open(HERE, 500.01)
    assert arrive(room, everyone, refused, 500.01) == [refused]
    idle = everyone[0]
    assert arrive(room, everyone, Open(HERE, 501.0), 501.0) == [idle]
