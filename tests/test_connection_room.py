from dataclasses import dataclass

from agentcore_rl_toolkit._connection_room import ConnectionRoom


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
    assert not any(arrive(room, everyone, Open("a", float(n)), n) for n in range(48))


def test_the_longest_idle_that_never_asked_anything_go_first() -> None:
    room, everyone = ConnectionRoom(64), []
    everyone_old = [Open("a", float(n), used=True) for n in range(24)]
    for each in [*everyone_old, *(Open("a", 100.0 + n) for n in range(24))]:
        arrive(room, everyone, each, 200.0)
    closed = arrive(room, everyone, Open("a", 300.0), 300.0)
    assert [c.idle_since for c in closed] == [100.0, 101.0, 102.0, 103.0]
    assert all(each in everyone for each in everyone_old)


def test_a_request_under_way_is_never_closed_and_a_crowd_leaves_room_for_others() -> None:
    room, everyone = ConnectionRoom(64), []
    for n in range(48):
        assert arrive(room, everyone, Open("crowd", None), float(n)) == []
    one_more = Open("crowd", 50.0)
    assert arrive(room, everyone, one_more, 50.0) == [one_more]
    assert arrive(room, everyone, Open("other", 51.0), 51.0) == []
    assert len(everyone) == 49


def test_the_peer_with_most_connections_makes_room_for_others() -> None:
    room, everyone = ConnectionRoom(64), []
    for n in range(16):
        arrive(room, everyone, Open("quiet", float(n)), 0.0)
    for n in range(48):
        arrive(room, everyone, Open("crowd", 100.0 + n), 0.0)
    closed = arrive(room, everyone, Open("third", 300.0), 300.0)
    assert closed
    assert {c.address for c in closed} == {"crowd"}


def test_with_nobody_idle_nobody_is_looked_for_again_at_once() -> None:
    room, everyone = ConnectionRoom(64), []
    for n in range(48):
        arrive(room, everyone, Open("a", None), float(n))
    arrive(room, everyone, Open("a", 50.0), 50.0)
    everyone[0].idle_since = 50.0
    refused = Open("a", 50.01)
    assert arrive(room, everyone, refused, 50.01) == [refused]
    assert len(arrive(room, everyone, Open("a", 51.0), 51.0)) == 1  # the one that is idle by now
    assert all(each.idle_since is None or each.idle_since == 51.0 for each in everyone)
