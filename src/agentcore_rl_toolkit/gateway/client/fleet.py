"""Several gateways used as one: each session belongs to one of them, what holds for all is sent to all.

Requests to several gateways run at the same time, each with its own deadline, so that one that hangs delays nobody else's. A
gateway that does not answer is *away*: it gets no new sessions, and is looked at again after a rest that grows to half a minute.
When it answers again it is first sent what it missed (weight version, pause, sessions to delete), then used like the others.

With a single gateway nothing of this happens: every request goes to it, and what fails is raised.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ...errors import GatewayError, GatewayLostError
from .captures import SessionCapture
from .members import Member, Members
from .one import OneGateway, SessionHandle

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 3.0  # what a gateway may take to say that it is there
_LOOK_EVERY_S = 1.0  # a trainer collects many groups at a time, and all of them ask
_ELSEWHERE = (None, 429, 502, 503, 504)  # answers after which another gateway may take a session


class Fleet:
    """The gateways of a client, and what holds for all of them."""

    def __init__(self, gateways: Iterable[OneGateway]) -> None:
        self.members = Members(gateways)
        self._weights: tuple[int, str | None] | None = None
        self._paused: str | None = None  # what becomes of running calls; "": resumed; None: neither was ever asked for
        self._look_at_s = 0.0

    @property
    def only(self) -> OneGateway | None:
        """The gateway, where there is just one."""
        return self.members.all[0].gateway if len(self.members.all) == 1 else None

    # -- whether a gateway answers

    async def ask(self, member: Member, request: Awaitable[T]) -> T:
        """The answer to a request; whether there was one is remembered. Raises: GatewayError."""
        try:
            answer = await request
        except GatewayError as e:
            if e.status is None:
                self._missed(member, e)
            raise
        if member.away_since_s is not None:
            await self._welcome(member)
        return answer

    def _missed(self, member: Member, error: GatewayError) -> None:
        if member.missed(time.monotonic()):
            log.warning("gateway %s does not answer; the other gateways get its new sessions: %s", member.url, error)

    async def _look(self, member: Member) -> bool:
        """Whether an away gateway answers again and has what it missed."""
        member.look_at_s = time.monotonic() + LOOK_S  # who comes meanwhile goes on without it
        try:
            await member.gateway.call("GET", "/healthz", timeout_s=min(LOOK_S, member.gateway.timeout_s))
        except GatewayError as e:
            self._missed(member, e)
            return False
        return await self._welcome(member)

    async def _welcome(self, member: Member) -> bool:
        """Send a gateway that answers again what it missed. Returns whether it took that."""
        away_s = time.monotonic() - (member.away_since_s or time.monotonic())
        try:
            await self.catch_up(member)
        except GatewayError as e:
            log.warning("gateway %s answers again but does not take what it missed: %s", member.url, e)
            member.missed(time.monotonic())
            return False
        member.answers()
        log.warning("gateway %s answers again after %.0f s, and gets new sessions again", member.url, away_s)
        return True

    async def catch_up(self, member: Member) -> None:
        """Send a gateway the weight version and the pause that hold, and delete what it should not have.

        Raises: GatewayError.
        """
        gateway = member.gateway
        if self._weights is not None:
            await gateway.publish(*self._weights)
        if self._paused:
            await gateway.pause("continue" if self._paused == "finish" else self._paused, 0.0)
        elif self._paused is not None:
            await gateway.resume()
        strays = list(member.strays)
        if strays:
            await gateway.delete(strays)
            member.strays.difference_update(strays)

    async def _present(self, *, due_only: bool) -> list[Member]:
        """The gateways that answer, after a look at those that are away; all of them where none does."""
        now_s = time.monotonic()
        away = [m for m in self.members.all if m.away_since_s is not None and (not due_only or now_s >= m.look_at_s)]
        await asyncio.gather(*map(self._look, away))
        return [m for m in self.members.all if m.away_since_s is None] or list(self.members.all)

    @property
    def silent(self) -> dict[str, float]:
        """The gateways that did not answer when they were last asked, and since how many seconds."""
        now_s = time.monotonic()
        return {m.url: now_s - m.away_since_s for m in self.members.all if m.away_since_s is not None}

    async def away(self) -> dict[str, float]:
        """The gateways that do not answer, and since how many seconds they have not. Looks at each, once a second at most."""
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_EVERY_S
            await asyncio.gather(*map(self._check, self.members.all))
        return self.silent

    async def _check(self, member: Member) -> None:
        if member.away_since_s is not None:
            await self._look(member)
            return
        try:
            await self.ask(member, member.gateway.call("GET", "/healthz", timeout_s=LOOK_S))
        except GatewayError as e:
            log.debug("gateway %s: %s", member.url, e)

    # -- what holds for all

    async def everywhere(self, what: str, request: Callable[[OneGateway], Awaitable[T]]) -> dict[str, T]:
        """Every gateway's answer by its URL. One that is away learns it when it answers again.

        Raises: GatewayError when a gateway refuses, or none answers.
        """
        if self.only is not None:
            return {self.only.url: await request(self.only)}
        present = await self._present(due_only=False)
        answers, failures = await self._gather([(m, self.ask(m, request(m.gateway))) for m in present])
        for error in failures.values():
            if error.status is not None:
                raise error
        if not answers:
            raise next(iter(failures.values()))
        for member in self.members.all:
            if member not in answers:
                log.warning("gateway %s did not %s: that follows when it answers again", member.url, what)
        return {member.url: answer for member, answer in answers.items()}

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

    async def create(self, session_ids: Sequence[str], settings: Mapping[str, Any]) -> list[SessionHandle]:
        """Open sessions, all or none. Where a gateway does not take its share, the others do.

        A session that is open stays where it is, unless that gateway does not answer: then it begins anew on another.
        """
        if self.only is not None:
            return await self.only.create(session_ids, settings)
        handles: dict[str, SessionHandle] = {}
        open_before = {name for name in session_ids if self.members.owner(name) is not None}
        present = await self._present(due_only=True)
        waiting, refusal = list(session_ids), None
        while waiting:
            if refusal is not None and (not present or refusal.status not in _ELSEWHERE):
                await self._take_back([handle for name, handle in handles.items() if name not in open_before])
                raise refusal
            shares = self.members.spread(waiting, present)
            answers, failures = await self._gather(
                [(m, self.ask(m, self._open(m, names, settings))) for m, names in shares.items()]
            )
            for opened in answers.values():
                handles |= {handle.session_id: handle for handle in opened}
            waiting = [name for member in failures for name in shares[member]]
            present = [member for member in present if member not in failures]
            for member, error in failures.items():
                if refusal is None or error.status not in _ELSEWHERE:
                    refusal = error
                if error.status is None:
                    member.strays.update(shares[member])  # they may be open there all the same
        by_url = {member.url: member for member in self.members.all}
        for name, handle in handles.items():
            self.members.opened(by_url[handle.gateway], name)
        return [handles[name] for name in session_ids]

    async def _open(self, member: Member, names: list[str], settings: Mapping[str, Any]) -> list[SessionHandle]:
        """Open sessions anew: what an earlier try may have left there goes first, and not later with the open ones."""
        strays = member.strays.intersection(names)
        if strays:
            await member.gateway.delete(list(strays))
            member.strays -= strays
        return await member.gateway.create(names, settings)

    async def _take_back(self, handles: Sequence[SessionHandle]) -> None:
        """Delete what a refused request has opened."""
        for member in self.members.all:
            names = [handle.session_id for handle in handles if handle.gateway == member.url]
            member.strays.update(names)
            if names:
                try:
                    await self.ask(member, member.gateway.delete(names))
                    member.strays.difference_update(names)
                except GatewayError as e:
                    log.warning(
                        "gateway %s keeps %d sessions of a refused request for now: %s", member.url, len(names), e
                    )

    async def fetch(self, session_ids: Sequence[str], *, close: bool) -> dict[str, SessionCapture]:
        """What was recorded of sessions. Raises: GatewayLostError, with what the other gateways gave, when one is away."""
        if self.only is not None:
            return await self.only.fetch(session_ids, close=close)
        shares = dict(self.members.by_owner(session_ids))
        answers, failures = await self._gather(
            [(m, self.ask(m, m.gateway.fetch(names, close=close))) for m, names in shares.items()]
        )
        found = {name: capture for captures in answers.values() for name, capture in captures.items()}
        if close:
            self.members.ended(found)
        for member, error in failures.items():
            if error.status is not None:
                raise error
            missing = [name for name in shares[member] if name not in found]
            if missing:
                raise GatewayLostError(
                    f"gateway {member.url} does not answer, and may have {len(missing)} of the sessions asked for: {error}",
                    gateway=member.url,
                    session_ids=missing,
                    found=found,
                ) from error
        return found

    async def close(self, session_ids: Sequence[str]) -> int:
        """End sessions. Returns how many were open. Raises: GatewayError when a gateway that has one is away."""
        if self.only is not None:
            return await self.only.close(session_ids)
        shares = self.members.by_owner(session_ids)
        answers, failures = await self._gather([(m, self.ask(m, m.gateway.close(names))) for m, names in shares])
        self.members.ended(name for member, names in shares if member in answers for name in names)
        for error in failures.values():
            raise error
        return sum(answers.values())

    async def delete(self, session_ids: Sequence[str]) -> int:
        """Forget sessions. Returns how many there were. A gateway that is away deletes its own when it answers again.

        Raises: GatewayError when a gateway refuses, or none answers.
        """
        if self.only is not None:
            return await self.only.delete(session_ids)
        shares = dict(self.members.by_owner(session_ids))
        present = await self._present(due_only=True)
        answers, failures = await self._gather(
            [(m, self.ask(m, m.gateway.delete(names))) for m, names in shares.items() if m in present]
        )
        for error in failures.values():
            if error.status is not None:
                raise error
        for member, names in shares.items():
            if member not in answers:
                member.strays.update(names)
                log.warning("gateway %s deletes %d sessions when it answers again", member.url, len(names))
        self.members.deleted(session_ids)
        if failures and all(member.away_since_s is not None for member in self.members.all):
            raise next(iter(failures.values()))
        return sum(answers.values())

    async def _gather(
        self, requests: Sequence[tuple[Member, Awaitable[T]]]
    ) -> tuple[dict[Member, T], dict[Member, GatewayError]]:
        """Answers and failures by gateway. Raises: what is no GatewayError, when all have ended."""
        results = await asyncio.gather(*(request for _, request in requests), return_exceptions=True)
        answers: dict[Member, T] = {}
        failures: dict[Member, GatewayError] = {}
        for (member, _), result in zip(requests, results, strict=True):
            if isinstance(result, GatewayError):
                failures[member] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                answers[member] = result
        return answers, failures
