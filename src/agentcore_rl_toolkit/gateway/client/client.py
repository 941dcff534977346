"""The trainer's client: open sessions, fetch records, publish weight versions, at one gateway or at several used as one.

Requests to several gateways run at the same time, each with its own deadline, so a gateway that hangs does not delay the others.
A gateway that does not answer is *away*: it gets no new sessions, and is tried again after a rest, or when weight version or
pause change. When it answers again, it first gets the current weight version and pause, and is then used like the others.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from ..._portal import Portal
from ..._servers.keys import key_for
from ...errors import ConfigError, GatewayError, GatewayLostError
from ...messages.errors import NOT_JSON
from ..http.client import error_message, request, stream
from .captures import SessionCapture, read_captures

log = logging.getLogger(__name__)
_portal = Portal("agentcore-rl-gateway-client")

T = TypeVar("T")
Urls = str | Sequence[str]

ADMIN_KEY_ENV = "AGENTCORE_RL_GATEWAY_ADMIN_KEY"
REST_S = 5.0  # pause before an away gateway is asked again
LOOK_S = 3.0  # the time in which a live gateway answers
_SAMPLER_S = 600.0  # opening new weights at a sampling service takes longer than other requests
_ELSEWHERE = (None, 429, 502, 503, 504)  # statuses after which another gateway may take a session


def gateway_urls(given: Urls) -> tuple[str, ...]:
    """Return the URLs of a text with commas, or of a list. Raises: ConfigError for no URL, or a repeated URL."""
    parts = given.split(",") if isinstance(given, str) else given
    urls = tuple(part.strip().rstrip("/") for part in parts)
    if not urls or not all(urls):
        raise ConfigError(f"{given!r} contains no gateway: give a URL, or several with commas between")
    if len(set(urls)) < len(urls):
        raise ConfigError(f"{given!r} contains a gateway twice")
    return urls


def public_urls(urls: Sequence[str], given: Urls | None) -> tuple[str, ...]:
    """Return the agents' addresses of these gateways, in the same order. Raises: ConfigError if the numbers differ."""
    if given is None:
        return tuple(urls)
    public = gateway_urls(given)
    if len(public) != len(urls):
        raise ConfigError(
            f"there are {len(urls)} gateways and {len(public)} public URLs: give one for each, in their order"
        )
    return public


@dataclass(frozen=True, kw_only=True)
class SessionHandle:
    """A session for an agent: ``base_url`` for its OpenAI or Anthropic client, and the key that goes with it.

    ``gateway`` is the URL of the gateway that has the session, as the trainer sees it.
    """

    session_id: str
    base_url: str
    api_key: str = field(repr=False)
    gateway: str = ""


class OneGateway:
    """The routes of one gateway that a trainer uses. ``timeout_s`` bounds each request, and each read of a bulk fetch.

    ``open`` are the sessions that this client opened there and has not ended. ``away_since_s`` is when it first did not answer,
    by the monotonic clock, None while it does; ``look_at_s`` is when to try again.

    Raises: GatewayError (its ``status`` is the HTTP status, None when the gateway could not be reached in time).
    """

    def __init__(self, url: str, *, public_url: str, admin_key: str | None, timeout_s: float) -> None:
        self.url = url
        self.public_url = public_url
        self.timeout_s = timeout_s
        self._admin_key = admin_key
        self.open: set[str] = set()
        self.away_since_s: float | None = None
        self.look_at_s = 0.0

    @property
    def key(self) -> str | None:
        """The admin key, looked up for each request: a restarted gateway has a new one."""
        return self._admin_key if self._admin_key is not None else key_for("gateway", self.url, ADMIN_KEY_ENV)

    async def call(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """Send a request of the admin API and return its JSON. Raises: GatewayError."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        status, data = await request(method, self.url + path, body=body, key=self.key, timeout_s=limit_s)
        if status >= 400:
            raise GatewayError(f"{method} {path}: {error_message(data)}", status=status)
        try:
            return msgspec.json.decode(data)
        except NOT_JSON as e:
            why = f"{method} {path}: the reply is not JSON ({e}): check that this is the address of a gateway"
            raise GatewayError(why, status=status) from e

    async def create(self, session_ids: Sequence[str], settings: Mapping[str, Any]) -> list[SessionHandle]:
        """Open sessions."""
        answer = await self.call("POST", "/admin/sessions", {"session_ids": session_ids, "settings": settings})
        return [
            SessionHandle(
                session_id=s["session_id"],
                base_url=f"{self.public_url}/sessions/{s['session_id']}/v1",
                api_key=s["api_key"],
                gateway=self.url,
            )
            for s in answer["sessions"]
        ]

    async def fetch(self, session_ids: Sequence[str], *, close: bool) -> dict[str, SessionCapture]:
        """Return the captures of sessions."""
        body = {"session_ids": session_ids, "close": close}
        answer = stream("POST", self.url + "/admin/fetch", body=body, key=self.key, timeout_s=self.timeout_s)
        async with aclosing(answer):
            return {found.session_id: found async for found in read_captures(answer, len(session_ids))}

    async def publish(self, version: int, sampler: str | None) -> None:
        """Set the weight version, and the sampler of a sampling service."""
        body = {"weight_version": version} | ({} if sampler is None else {"sampler": sampler})
        limit_s = self.timeout_s if sampler is None else _SAMPLER_S
        await self.call("POST", "/admin/weight_version", body, timeout_s=limit_s)

    async def pause(self, in_flight: str, timeout_s: float) -> dict[str, Any]:
        """Pause model calls, or resume them if ``in_flight`` is empty."""
        if not in_flight:
            return dict(await self.call("POST", "/admin/resume", {}))
        body = {"in_flight": in_flight, "timeout_s": timeout_s}
        return dict(await self.call("POST", "/admin/pause", body, timeout_s=timeout_s + self.timeout_s))


class GatewayClient:
    """Talks to one gateway, or to several as one. Every method has an `_async` twin.

    ``url`` is one URL, several in a list, or several in one text with commas between. Of several, each new session goes to the
    one on which this client has the fewest open sessions; the session's ``base_url`` names it.
    Weight versions and pauses go to all. A gateway that does not answer does not delay the others. Its sessions cannot be
    fetched (GatewayLostError), and the others take new sessions until it answers again.

    ``timeout_s`` bounds each request, and for bulk fetches each read.

    ``admin_key`` is by default AGENTCORE_RL_GATEWAY_ADMIN_KEY, or the key that a gateway on this machine made. ``public_url`` is
    the agents' address of the gateway, if it differs from the trainer's. Several gateways have one each, in the same order.
    Raises: GatewayError (its ``status`` is the HTTP status, None when the gateway could not be reached).
    """

    def __init__(
        self, url: Urls, *, admin_key: str | None = None, timeout_s: float = 30.0, public_url: Urls | None = None
    ) -> None:
        self.urls = gateway_urls(url)
        self.public_urls = public_urls(self.urls, public_url)
        self.timeout_s = timeout_s
        self._all = tuple(
            OneGateway(at, public_url=seen, admin_key=admin_key, timeout_s=timeout_s)
            for at, seen in zip(self.urls, self.public_urls, strict=True)
        )
        self._owners: dict[str, OneGateway] = {}
        self._weights: tuple[int, str | None] | None = None
        self._paused: str | None = None  # what becomes of running calls; "": resumed; None: neither was ever asked for

    @property
    def url(self) -> str:
        """Return the gateway, or all of them with commas between."""
        return ",".join(self.urls)

    # -- sessions

    async def create_sessions_async(
        self,
        session_ids: Sequence[str],
        *,
        sampling_params: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        max_turns: int | None = None,
        max_tokens: int | None = None,
        train: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> list[SessionHandle]:
        """Open sessions, all with the same settings.

        ``sampling_params`` replace those of the agent, ``model_id`` replaces its model name, ``max_tokens``
        bounds the length of a reply. ``train`` is kept with the session: the rule of what trains (`trajectory.selection`).

        Where a gateway does not take its share, the others do. A session that is open stays where it is, unless that gateway does
        not answer: then it starts again on another gateway.
        Raises: GatewayError; of several gateways, some may have opened their share.
        """
        session_ids = _listed(session_ids)
        settings = {
            "sampling_params": dict(sampling_params or {}),
            "model_id": model_id,
            "max_turns": max_turns,
            "max_tokens": max_tokens,
            "metadata": dict(metadata or {}),
            "train": train,
        }
        handles: dict[str, SessionHandle] = {}
        present = await self._present()
        waiting = list(dict.fromkeys(session_ids))
        while waiting:
            shares = self._spread(waiting, present)
            answers, failures = await self._gather(
                {g: partial(g.create, names, settings) for g, names in shares.items()}
            )
            for gateway, made in answers.items():
                names = [handle.session_id for handle in made]
                self._ended(names)
                gateway.open.update(names)
                self._owners.update(dict.fromkeys(names, gateway))
                handles.update(zip(names, made, strict=True))
            waiting = [name for gateway in failures for name in shares[gateway]]
            present = [gateway for gateway in present if gateway not in failures]
            for error in failures.values():
                if error.status not in _ELSEWHERE or not present:
                    raise error
        return [handles[name] for name in session_ids]

    async def fetch_async(self, session_ids: Iterable[str], *, close: bool = True) -> dict[str, SessionCapture]:
        """Return the recorded calls of these sessions. Unknown sessions are absent from the result.

        ``close`` ends the sessions first: a call that is still running is stopped and becomes no turn, and none can
        come later.
        Raises: GatewayLostError when one of several gateways that may have them is away; its ``found`` is what the others gave.
        """
        shares = self._by_owner(_listed(session_ids))
        answers, failures = await self._gather({g: partial(g.fetch, names, close=close) for g, names in shares.items()})
        found: dict[str, SessionCapture] = {}
        for captures in answers.values():
            for name, capture in captures.items():
                if name not in found or capture.records:  # a gateway that answered late may have opened it, too
                    found[name] = capture
        if close:
            self._ended(found)
        for gateway, error in failures.items():
            if error.status is not None or len(self._all) == 1:
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

    async def sessions_async(self, *, running: bool = False) -> list[dict[str, Any]]:
        """Return the sessions of all gateways that answer, each with the URL of its gateway under ``gateway``.

        A session has its turns, its errors, the time of its last record, its server, and its running ``calls``: their state, the
        seconds since their start and until their deadline. ``running``: only sessions with running calls.
        """
        path = "/admin/sessions?running=1" if running else "/admin/sessions"
        answers = await self._everywhere(lambda g: g.call("GET", path))
        return [{**session, "gateway": url} for url, answer in answers.items() for session in answer["sessions"]]

    async def delete_async(self, session_ids: Iterable[str]) -> int:
        """Delete sessions and their calls permanently, and return how many existed.

        A gateway that cannot be reached keeps its sessions.
        Raises: GatewayError when a gateway refuses, or none answers.
        """
        shares = self._by_owner(_listed(session_ids))
        present = await self._present()
        answers, failures = await self._gather(
            {
                gateway: partial(gateway.call, "POST", "/admin/delete", {"session_ids": names})
                for gateway, names in shares.items()
                if gateway in present
            }
        )
        for error in failures.values():
            if error.status is not None or len(self.silent) == len(self._all):
                raise error
        for names in shares.values():
            self._ended(names)
            for session_id in names:
                self._owners.pop(session_id, None)
        return sum(int(answer["deleted"]) for answer in answers.values())

    # -- weights

    async def set_weight_version_async(self, version: int, *, sampler: str | None = None) -> None:
        """Set the version of the weights that answer from now on. A version in the engine's replies wins.

        ``sampler`` is for a sampling service: its path of these weights, from which calls are sampled once this
        returns.
        """
        before, self._weights = self._weights, (version, sampler)  # also for a gateway that comes back meanwhile
        try:
            await self._everywhere(lambda gateway: gateway.publish(version, sampler), rest=False)
        except BaseException:
            self._weights = before
            raise

    async def pause_async(self, *, in_flight: str = "finish", timeout_s: float = 60.0) -> dict[str, Any]:
        """Start no further calls: new ones wait; running ones "finish" (waited for), "abort" or "continue".

        Returns {"paused": True, "in_flight": calls still running}.
        """
        before, self._paused = self._paused, in_flight  # also for a gateway that comes back meanwhile
        try:
            answers = await self._everywhere(lambda gateway: gateway.pause(in_flight, timeout_s), rest=False)
        except BaseException:
            self._paused = before
            raise
        return {"paused": True, "in_flight": sum(int(answer["in_flight"]) for answer in answers.values())}

    async def resume_async(self) -> None:
        """Resume the model calls of all gateways."""
        self._paused = ""  # also for a gateway that comes back while the others resume
        await self._everywhere(lambda gateway: gateway.pause("", 0.0), rest=False)

    # -- operation

    @property
    def silent(self) -> dict[str, float]:
        """Return the gateways that did not answer their last request, and the seconds since. Sends no request."""
        now_s = time.monotonic()
        return {g.url: now_s - g.away_since_s for g in self._all if g.away_since_s is not None}

    async def away_async(self) -> dict[str, float]:
        """Ask each gateway for an answer. Return those without one, and the seconds since their last."""
        await asyncio.gather(*map(self._look, self._all))
        return self.silent

    async def stats_async(self) -> dict[str, Any]:
        """Return the gateway's counters. With several gateways, ``gateways`` has the counters of each by its URL."""
        return await self._shown("/admin/stats")

    async def health_async(self) -> dict[str, Any]:
        """Return the gateway's status. With several gateways, ``gateways`` has the status of each by its URL."""
        return await self._shown("/healthz")

    async def _shown(self, path: str) -> dict[str, Any]:
        answers = await self._everywhere(lambda g: g.call("GET", path))
        return dict(answers[self.url]) if len(self.urls) == 1 else {"gateways": answers}

    # -- which gateway has a session

    def _spread(self, session_ids: Iterable[str], present: Sequence[OneGateway]) -> dict[OneGateway, list[str]]:
        """Assign each session to its gateway, or a new session to the gateway with the fewest open sessions."""
        load = {gateway: len(gateway.open) for gateway in present}
        shares: dict[OneGateway, list[str]] = {}
        for session_id in session_ids:
            gateway = self._owners.get(session_id)
            if gateway not in load:
                gateway = min(present, key=lambda g: (load[g], random.random()))  # several clients share the gateways
                load[gateway] += 1
            shares.setdefault(gateway, []).append(session_id)
        return shares

    def _by_owner(self, session_ids: Iterable[str]) -> dict[OneGateway, list[str]]:
        """Return the sessions to ask each gateway for. If the gateway of a session is unknown, all are asked."""
        shares: dict[OneGateway, list[str]] = {}
        for session_id in session_ids:
            owner = self._owners.get(session_id)
            for gateway in self._all if owner is None else (owner,):
                shares.setdefault(gateway, []).append(session_id)
        return shares

    def _ended(self, session_ids: Iterable[str]) -> None:
        for session_id in session_ids:
            if (gateway := self._owners.get(session_id)) is not None:
                gateway.open.discard(session_id)

    # -- whether a gateway answers

    async def _ask(self, gateway: OneGateway, request: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to a request, and mark the gateway as present or away. Raises: GatewayError.

        A gateway that answers again gets the missed changes. It stays away if it refuses them.
        """
        try:
            answer = await request()
        except GatewayError as e:
            if e.status is None:
                self._missed(gateway, e)
            raise
        if (since_s := gateway.away_since_s) is not None:
            try:
                await self._catch_up(gateway)
            except GatewayError as e:
                self._missed(gateway, e)
            else:
                gateway.away_since_s = None
                log.warning("gateway %s answers again after %.0f s", gateway.url, time.monotonic() - since_s)
        return answer

    def _missed(self, gateway: OneGateway, error: GatewayError) -> None:
        now_s = time.monotonic()
        gateway.look_at_s = now_s + REST_S
        if gateway.away_since_s is None:
            gateway.away_since_s = now_s
            log.warning("gateway %s does not answer: %s", gateway.url, error)

    async def _catch_up(self, gateway: OneGateway) -> None:
        """Send a gateway the current weight version and pause, and those set meanwhile. Raises: GatewayError."""
        sent: object = None
        while sent != (current := (self._weights, self._paused)):
            sent = weights, paused = current
            if weights is not None:
                await gateway.publish(*weights)
            if paused is not None:
                await gateway.pause("continue" if paused == "finish" else paused, 0.0)

    async def _look(self, gateway: OneGateway) -> None:
        """Check if a gateway answers."""
        gateway.look_at_s = time.monotonic() + LOOK_S  # concurrent requests do not wait for it
        try:
            await self._ask(gateway, partial(gateway.call, "GET", "/healthz", timeout_s=min(LOOK_S, gateway.timeout_s)))
        except GatewayError as e:
            log.debug("gateway %s: %s", gateway.url, e)

    async def _present(self) -> list[OneGateway]:
        """Return the gateways that answer, after a check of those that are away. If none answers, return all."""
        now_s = time.monotonic()
        away = [g for g in self._all if g.away_since_s is not None and now_s >= g.look_at_s]
        await asyncio.gather(*map(self._look, away))
        return [g for g in self._all if g.away_since_s is None] or list(self._all)

    # -- all of them

    async def _everywhere(self, request: Callable[[OneGateway], Awaitable[T]], *, rest: bool = True) -> dict[str, T]:
        """Return the response of every gateway by its URL. A gateway that is away gets the state when it answers again.

        ``rest`` False is for changes of the state: an away gateway may answer again, and its agents use it. So it is checked also
        in its rest, and the others do not wait for that.
        Raises: GatewayError when a gateway refuses, or none answers.
        """

        async def returned(gateway: OneGateway) -> tuple[dict[OneGateway, T], dict[OneGateway, GatewayError]]:
            await self._look(gateway)
            return await self._gather({} if gateway.away_since_s is not None else {gateway: partial(request, gateway)})

        present = await self._present() if rest else [g for g in self._all if g.away_since_s is None]
        away = [] if rest else [g for g in self._all if g not in present]
        requests = {g: partial(request, g) for g in present}
        (answers, failures), *others = await asyncio.gather(self._gather(requests), *map(returned, away))
        for found, failed in others:
            answers |= found
            failures |= failed
        if not (answers or failures):
            answers, failures = await self._gather({g: partial(request, g) for g in self._all})
        for error in failures.values():
            if error.status is not None or not answers:
                raise error
        for gateway in self._all:
            if gateway not in answers:
                log.warning("gateway %s missed a request to all", gateway.url)
        return {gateway.url: answer for gateway, answer in answers.items()}

    async def _gather(
        self, requests: Mapping[OneGateway, Callable[[], Awaitable[T]]]
    ) -> tuple[dict[OneGateway, T], dict[OneGateway, GatewayError]]:
        """Return answers and failures by gateway. Raises: another error than GatewayError, when all have ended."""
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

    # -- the sync face

    create_sessions = _portal.sync(create_sessions_async)
    fetch = _portal.sync(fetch_async)
    delete = _portal.sync(delete_async)
    set_weight_version = _portal.sync(set_weight_version_async)
    pause = _portal.sync(pause_async)
    resume = _portal.sync(resume_async)
    away = _portal.sync(away_async)
    stats = _portal.sync(stats_async)
    health = _portal.sync(health_async)
    sessions = _portal.sync(sessions_async)

    # The client keeps no connection between requests, so `with` closes nothing.

    def __enter__(self) -> GatewayClient:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    async def __aenter__(self) -> GatewayClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass


def _listed(session_ids: Iterable[str]) -> list[str]:
    """Return the ids as a list. Raises: ConfigError for a single string, whose letters would count as ids."""
    if isinstance(session_ids, str):
        raise ConfigError(f"session_ids is a single text: give a list, [{session_ids!r}]")
    return list(session_ids)
