"""Several gateways used as one: each session belongs to one of them; pauses and weight versions go to all.

Requests to several gateways run at the same time, each with its own deadline, so a gateway that hangs does not delay the others.
A gateway that does not answer is *away*: it gets no new sessions, and is tried again after a rest. When it answers again it is
first sent what it missed (weight version, pause, deletions), then used like the others. A single gateway is a fleet of one.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ...errors import GatewayError, GatewayLostError
from .captures import SessionCapture
from .one import OneGateway, SessionHandle

log = logging.getLogger(__name__)

T = TypeVar("T")

REST_S = 5.0  # until an away gateway is looked at again
LOOK_S = 3.0  # what a gateway may take to say that it is there
_LOOK_EVERY_S = 1.0  # a trainer collects many groups at a time, and all of them ask
_ELSEWHERE = (None, 429, 502, 503, 504)  # answers after which another gateway may take a session


class Fleet:
    """The gateways of a client, whose each session is, and what holds for all of them."""

    def __init__(self, gateways: Iterable[OneGateway]) -> None:
        self.all = tuple(gateways)
        self._owners: dict[str, OneGateway] = {}
        self._weights: tuple[int, str | None] | None = None
        self._paused: str | None = None  # what becomes of running calls; "": resumed; None: neither was ever asked for
        self._look_at_s = 0.0

    # -- whether a gateway answers

    async def _ask(self, gateway: OneGateway, request: Awaitable[T]) -> T:
        """The answer to a request; whether there was one is remembered. Raises: GatewayError."""
        try:
            answer = await request
        except GatewayError as e:
            if e.status is None:
                self._missed(gateway, e)
            raise
        if gateway.away_since_s is not None:
            await self._welcome(gateway, gateway.away_since_s)
        return answer

    def _missed(self, gateway: OneGateway, error: GatewayError) -> None:
        now_s = time.monotonic()
        gateway.look_at_s = now_s + REST_S
        if gateway.away_since_s is None:
            gateway.away_since_s = now_s
            log.warning("gateway %s does not answer: %s", gateway.url, error)

    async def _welcome(self, gateway: OneGateway, since_s: float) -> None:
        """Send a gateway that answers again what it missed. It stays away if it does not take that."""
        try:
            await self.catch_up(gateway)
        except GatewayError as e:
            log.warning("gateway %s answers again but does not take what it missed: %s", gateway.url, e)
            self._missed(gateway, e)
            return
        gateway.away_since_s = None
        log.warning("gateway %s answers again after %.0f s", gateway.url, time.monotonic() - since_s)

    async def catch_up(self, gateway: OneGateway) -> None:
        """Send a gateway the weight version and the pause that hold, and delete what it kept. Raises: GatewayError."""
        if self._weights is not None:
            await gateway.publish(*self._weights)
        if self._paused:
            await gateway.pause("continue" if self._paused == "finish" else self._paused, 0.0)
        elif self._paused is not None:
            await gateway.resume()
        if gateway.undeleted:
            await gateway.delete(list(gateway.undeleted))
            gateway.undeleted.clear()

    async def _look(self, gateway: OneGateway) -> None:
        """See whether a gateway answers."""
        gateway.look_at_s = time.monotonic() + LOOK_S  # requests that come meanwhile go on without it
        try:
            await self._ask(gateway, gateway.call("GET", "/healthz", timeout_s=min(LOOK_S, gateway.timeout_s)))
        except GatewayError as e:
            log.debug("gateway %s: %s", gateway.url, e)

    async def _present(self, *, due_only: bool) -> list[OneGateway]:
        """The gateways that answer, after a look at those that are away; all of them where none does."""
        now_s = time.monotonic()
        away = [g for g in self.all if g.away_since_s is not None and (not due_only or now_s >= g.look_at_s)]
        await asyncio.gather(*map(self._look, away))
        return [g for g in self.all if g.away_since_s is None] or list(self.all)

    @property
    def silent(self) -> dict[str, float]:
        """The gateways that did not answer when they were last asked, and since how many seconds."""
        now_s = time.monotonic()
        return {g.url: now_s - g.away_since_s for g in self.all if g.away_since_s is not None}

    async def away(self) -> dict[str, float]:
        """The gateways that do not answer, and since how many seconds they have not. Looks at each, once a second at most."""
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_EVERY_S
            await asyncio.gather(*map(self._look, self.all))
        return self.silent

    # -- what holds for all

    async def everywhere(self, what: str, request: Callable[[OneGateway], Awaitable[T]]) -> dict[str, T]:
        """Every gateway's answer by its URL. One that is away learns it when it answers again.

        Raises: GatewayError when a gateway refuses, or none answers.
        """
        answers, failures = await self._gather({g: request(g) for g in await self._present(due_only=False)})
        for error in failures.values():
            if error.status is not None or not answers:
                raise error
        for gateway in self.all:
            if gateway not in answers:
                log.warning("gateway %s did not %s: that follows when it answers again", gateway.url, what)
        return {gateway.url: answer for gateway, answer in answers.items()}

    async def publish(self, version: int, sampler: str | None) -> None:
        before, self._weights = self._weights, (version, sampler)
        try:
            await self.everywhere("take the weight version", lambda gateway: gateway.publish(version, sampler))
        except BaseException:
            self._weights = before
            raise

    async def pause(self, in_flight: str, timeout_s: float) -> int:
        """Pause all. Returns how many calls still run."""
        before, self._paused = self._paused, in_flight
        try:
            answers = await self.everywhere("pause", lambda gateway: gateway.pause(in_flight, timeout_s))
        except BaseException:
            self._paused = before
            raise
        return sum(int(answer["in_flight"]) for answer in answers.values())

    async def resume(self) -> None:
        self._paused = ""
        await self.everywhere("resume", lambda gateway: gateway.resume())

    # -- sessions

    def spread(self, session_ids: Iterable[str], present: Sequence[OneGateway]) -> dict[OneGateway, list[str]]:
        """Give each session to the gateway that has it, else to the one with the fewest open sessions; between equals its
        id decides, so that several clients that start with nothing do not all begin at the first gateway.
        """
        load = {gateway: len(gateway.open) for gateway in present}
        shares: dict[OneGateway, list[str]] = {}
        for session_id in session_ids:
            gateway = self._owners.get(session_id)
            if gateway not in load:
                gateway = min(present, key=lambda g: (load[g], zlib.crc32(f"{session_id} {g.url}".encode())))
                load[gateway] += 1
            shares.setdefault(gateway, []).append(session_id)
        return shares

    def by_owner(self, session_ids: Iterable[str]) -> dict[OneGateway, list[str]]:
        """Which gateway to ask about which sessions: all of them about a session that none is known to have."""
        shares: dict[OneGateway, list[str]] = {}
        for session_id in session_ids:
            owner = self._owners.get(session_id)
            for gateway in self.all if owner is None else (owner,):
                shares.setdefault(gateway, []).append(session_id)
        return shares

    def opened(self, gateway: OneGateway, session_id: str) -> None:
        self.ended([session_id])
        if (before := self._owners.get(session_id)) is not None:
            before.undeleted.add(session_id)
        gateway.undeleted.discard(session_id)
        gateway.open.add(session_id)
        self._owners[session_id] = gateway

    def ended(self, session_ids: Iterable[str]) -> None:
        for session_id in session_ids:
            if (gateway := self._owners.get(session_id)) is not None:
                gateway.open.discard(session_id)

    async def create(self, session_ids: Sequence[str], settings: Mapping[str, Any]) -> list[SessionHandle]:
        """Open sessions. Where a gateway does not take its share, the others do.

        A session that is open stays where it is, unless that gateway does not answer: then it begins anew on another.
        Raises: GatewayError; of several gateways, some may have opened their share.
        """
        handles: dict[str, SessionHandle] = {}
        present = await self._present(due_only=True)
        waiting = list(dict.fromkeys(session_ids))
        late: dict[OneGateway, list[str]] = {}  # that may have opened them all the same
        while waiting:
            shares = self.spread(waiting, present)
            answers, failures = await self._gather({g: self._open(g, names, settings) for g, names in shares.items()})
            for gateway, made in answers.items():
                for handle in made:
                    handles[handle.session_id] = handle
                    self.opened(gateway, handle.session_id)
            waiting = [name for gateway in failures for name in shares[gateway]]
            present = [gateway for gateway in present if gateway not in failures]
            for gateway, error in failures.items():
                if error.status not in _ELSEWHERE or not present:
                    raise error
                if error.status is None:
                    late[gateway] = shares[gateway]
            for gateway, names in late.items():
                gateway.undeleted.update(handles.keys() & names)
        return [handles[name] for name in session_ids]

    async def _open(self, gateway: OneGateway, names: list[str], settings: Mapping[str, Any]) -> list[SessionHandle]:
        """Open sessions. What an earlier try left there is deleted before, not behind their back when they are open."""
        if left := gateway.undeleted.intersection(names):
            await gateway.delete(list(left))
            gateway.undeleted -= left
        return await gateway.create(names, settings)

    async def fetch(self, session_ids: Sequence[str], *, close: bool) -> dict[str, SessionCapture]:
        """The recorded calls of sessions. Raises: GatewayLostError, with the other gateways' captures, when one is away."""
        shares = self.by_owner(session_ids)
        answers, failures = await self._gather({g: g.fetch(names, close=close) for g, names in shares.items()})
        found: dict[str, SessionCapture] = {}
        for captures in answers.values():
            for name, capture in captures.items():
                if name not in found or capture.records:  # a gateway that answered late may have opened it, too
                    found[name] = capture
        if close:
            self.ended(found)
        for gateway, error in failures.items():
            if error.status is not None or len(self.all) == 1:
                raise error
            missing = [name for name in shares[gateway] if name not in found]
            if missing:
                raise GatewayLostError(
                    f"gateway {gateway.url} does not answer, and may have {len(missing)} of the sessions asked for: {error}",
                    gateway=gateway.url,
                    session_ids=missing,
                    found=found,
                ) from error
        return found

    async def close(self, session_ids: Sequence[str]) -> int:
        """End sessions. Returns how many were open. Raises: GatewayError when a gateway that has one is away."""
        shares = self.by_owner(session_ids)
        answers, failures = await self._gather({g: g.close(names) for g, names in shares.items()})
        for gateway in answers:
            self.ended(shares[gateway])
        for error in failures.values():
            raise error
        return sum(answers.values())

    async def delete(self, session_ids: Sequence[str]) -> int:
        """Forget sessions. Returns how many there were. A gateway that is away deletes its own when it answers again.

        Raises: GatewayError when a gateway refuses, or none answers.
        """
        shares = self.by_owner(session_ids)
        present = await self._present(due_only=True)
        answers, failures = await self._gather({g: g.delete(names) for g, names in shares.items() if g in present})
        for error in failures.values():
            if error.status is not None or len(self.silent) == len(self.all):
                raise error
        for gateway in shares.keys() - answers.keys():
            gateway.undeleted.update(shares[gateway])
            log.warning("gateway %s deletes %d sessions when it answers again", gateway.url, len(shares[gateway]))
        self.ended(session_ids)
        for session_id in session_ids:
            self._owners.pop(session_id, None)
        return sum(answers.values())

    async def _gather(
        self, requests: Mapping[OneGateway, Awaitable[T]]
    ) -> tuple[dict[OneGateway, T], dict[OneGateway, GatewayError]]:
        """Answers and failures by gateway. Raises: what is no GatewayError, when all have ended."""
        results = await asyncio.gather(
            *(self._ask(g, request) for g, request in requests.items()), return_exceptions=True
        )
        answers: dict[OneGateway, T] = {}
        failures: dict[OneGateway, GatewayError] = {}
        for gateway, result in zip(requests, results, strict=True):
            if isinstance(result, GatewayError):
                failures[gateway] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                answers[gateway] = result
        return answers, failures
