"""The gateways of one client: which sessions each has, whether it answers, and which one gets a new session. No I/O."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from .one import OneGateway

FIRST_REST_S, LONGEST_REST_S = 1.0, 30.0


class Member:
    """One gateway of several. ``open`` are the sessions that this client opened there and has not ended.

    ``strays`` are sessions that may be there though they are of no use: it did not answer when they were opened or
    deleted. They are deleted when it answers again.
    """

    def __init__(self, gateway: OneGateway) -> None:
        self.gateway = gateway
        self.open: set[str] = set()
        self.strays: set[str] = set()
        self.away_since_s: float | None = None  # when it first did not answer, by the monotonic clock
        self.look_at_s = 0.0  # when to look again whether it answers
        self._rest_s = FIRST_REST_S

    @property
    def url(self) -> str:
        return self.gateway.url

    def missed(self, now_s: float) -> bool:
        """It did not answer. Returns whether that is new."""
        first = self.away_since_s is None
        if first:
            self.away_since_s, self._rest_s = now_s, FIRST_REST_S
        self.look_at_s = now_s + self._rest_s
        self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
        return first

    def answers(self) -> None:
        self.away_since_s = None


class Members:
    """All of them, and whose each session is."""

    def __init__(self, gateways: Iterable[OneGateway]) -> None:
        self.all = [Member(gateway) for gateway in gateways]
        self._owners: dict[str, Member] = {}

    def owner(self, session_id: str) -> Member | None:
        return self._owners.get(session_id)

    def opened(self, member: Member, session_id: str) -> None:
        before = self._owners.get(session_id)
        if before is not None and before is not member:
            before.open.discard(session_id)
            before.strays.add(session_id)
        member.open.add(session_id)
        member.strays.discard(session_id)
        self._owners[session_id] = member

    def ended(self, session_ids: Iterable[str]) -> None:
        for session_id in session_ids:
            member = self._owners.get(session_id)
            if member is not None:
                member.open.discard(session_id)

    def deleted(self, session_ids: Iterable[str]) -> None:
        for session_id in session_ids:
            member = self._owners.pop(session_id, None)
            if member is not None:
                member.open.discard(session_id)

    def by_owner(self, session_ids: Iterable[str]) -> list[tuple[Member, list[str]]]:
        """Whom to ask about which sessions; of one that nobody is known to have, everybody."""
        shares: dict[Member, list[str]] = {}
        for session_id in session_ids:
            owner = self.owner(session_id)
            for member in self.all if owner is None else (owner,):
                shares.setdefault(member, []).append(session_id)
        return list(shares.items())

    def spread(self, session_ids: Iterable[str], present: Sequence[Member]) -> dict[Member, list[str]]:
        """Give each session to the gateway that has it, else to the one with the fewest open sessions; between equals its
        id decides, so that several clients that start with nothing do not all begin at the first gateway.
        """
        load = {member: len(member.open) for member in present}
        shares: dict[Member, list[str]] = {}
        for session_id in session_ids:
            member = self.owner(session_id)
            if member not in load:
                member = min(present, key=lambda m: (load[m], zlib.crc32(f"{session_id} {m.url}".encode())))
                load[member] += 1
            shares.setdefault(member, []).append(session_id)
        return shares
