"""A trainer's client of the gateway: open sessions, fetch what was recorded, move weight versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..._portal import Portal
from ...errors import ConfigError
from .captures import SessionCapture
from .fleet import Fleet
from .one import OneGateway, SessionHandle

_portal = Portal("agentcore-rl-gateway-client")
Urls = str | Sequence[str]


def gateway_urls(given: Urls) -> tuple[str, ...]:
    """One URL, several in a list, or several in one text with commas between. Raises: ConfigError for none, or one twice."""
    parts = given.split(",") if isinstance(given, str) else given
    urls = tuple(part.strip().rstrip("/") for part in parts)
    if not urls or not all(urls):
        raise ConfigError(f"{given!r} names no gateway: give a URL, or several with commas between")
    if len(set(urls)) < len(urls):
        raise ConfigError(f"{given!r} names a gateway twice")
    return urls


def public_urls(urls: Sequence[str], given: Urls | None) -> tuple[str, ...]:
    """The same gateways as agents see them, in the same order. Raises: ConfigError where the numbers differ."""
    if given is None:
        return tuple(urls)
    public = gateway_urls(given)
    if len(public) != len(urls):
        raise ConfigError(
            f"there are {len(urls)} gateways and {len(public)} public URLs: give one for each, in their order"
        )
    return public


class GatewayClient:
    """Talks to one gateway, or to several as one. Every method has an `_async` twin. ``timeout_s`` bounds each request, and
    for bulk fetches each read.

    ``url`` is one URL, several in a list, or several in one text with commas between. Of several, each new session goes to the
    one on which this client has the fewest open sessions (between equals its id decides); the session's ``base_url`` names it.
    Weight versions and pauses go to all. One that does not answer delays no other: its sessions cannot be fetched
    (GatewayLostError), the others take the new ones, and it is used again when it answers again.

    ``admin_key`` is by default that of the environment (AGENTCORE_RL_GATEWAY_ADMIN_KEY), else the one that a gateway of this
    machine made for itself. ``public_url`` is the gateway as agents see it, when that is another address than the trainer's; of
    several, one for each, in the same order.
    Raises: GatewayError (its ``status`` is the HTTP status, None when the gateway could not be reached).
    """

    def __init__(
        self, url: Urls, *, admin_key: str | None = None, timeout_s: float = 30.0, public_url: Urls | None = None
    ) -> None:
        self.urls = gateway_urls(url)
        self.public_urls = public_urls(self.urls, public_url)
        self.timeout_s = timeout_s
        self._fleet = Fleet(
            OneGateway(at, public_url=seen, admin_key=admin_key, timeout_s=timeout_s)
            for at, seen in zip(self.urls, self.public_urls, strict=True)
        )

    @property
    def url(self) -> str:
        """The gateway, or all of them with commas between."""
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

        ``sampling_params`` win over what the agent asks for, ``model_id`` replaces its model name, ``max_tokens``
        bounds the length of a reply. ``train`` is kept with the session: the rule of what trains (`trajectory.selection`).
        """
        settings = {
            "sampling_params": dict(sampling_params or {}),
            "model_id": model_id,
            "max_turns": max_turns,
            "max_tokens": max_tokens,
            "metadata": dict(metadata or {}),
            **({} if train is None else {"train": train}),
        }
        return await self._fleet.create(_listed(session_ids), settings)

    async def fetch_async(self, session_ids: Iterable[str], *, close: bool = True) -> dict[str, SessionCapture]:
        """The recorded calls of these sessions; unknown ones are absent from the result.

        ``close`` ends the sessions first: a call that is still running is stopped and becomes no turn, and none can
        come later.
        Raises: GatewayLostError when one of several gateways that may have them is away; its ``found`` is what the others gave.
        """
        return await self._fleet.fetch(_listed(session_ids), close=close)

    async def sessions_async(self, *, running: bool = False) -> list[dict[str, Any]]:
        """The gateway's sessions: turns, errors, when their last call was recorded, and ``calls`` under way with their state,
        seconds since their start and left until their deadline, and the server. ``running``: only those with such calls.

        Of several gateways those of all that answer, each with its URL under ``gateway``.
        """
        path = "/admin/sessions?running=1" if running else "/admin/sessions"
        answers = await self._fleet.everywhere("list its sessions", lambda g: g.call("GET", path))
        return [{**session, "gateway": url} for url, answer in answers.items() for session in answer["sessions"]]

    async def close_sessions_async(self, session_ids: Iterable[str]) -> int:
        """End sessions without fetching them. Returns how many were open."""
        return await self._fleet.close(_listed(session_ids))

    async def delete_async(self, session_ids: Iterable[str]) -> int:
        """Forget sessions and their calls, for good. Returns how many there were."""
        return await self._fleet.delete(_listed(session_ids))

    # -- weights

    async def set_weight_version_async(self, version: int, *, sampler: str | None = None) -> None:
        """Tell which weights answer from now on. An engine that says it itself in its replies is believed instead.

        ``sampler`` is for a sampling service: its path of these weights, from which calls are sampled once this
        returns.
        """
        await self._fleet.publish(version, sampler)

    async def pause_async(self, *, in_flight: str = "finish", timeout_s: float = 60.0) -> dict[str, Any]:
        """Start no further calls: new ones wait; running ones "finish" (waited for), "abort" or "continue".

        Returns {"paused": True, "in_flight": calls still running}.
        """
        return {"paused": True, "in_flight": await self._fleet.pause(in_flight, timeout_s)}

    async def resume_async(self) -> None:
        await self._fleet.resume()

    # -- operation

    @property
    def silent(self) -> dict[str, float]:
        """The gateways that did not answer their last request, and since how many seconds. Sends no request."""
        return self._fleet.silent

    async def away_async(self) -> dict[str, float]:
        """The gateways that do not answer, and since how many seconds they have not. Looks at each, once a second at most."""
        return await self._fleet.away()

    async def catch_up_async(self, url: str) -> None:
        """Send a gateway that was started again the weight version and the pause that hold."""
        for gateway in self._fleet.all:
            if gateway.url == url.rstrip("/"):
                await self._fleet.catch_up(gateway)

    async def stats_async(self) -> dict[str, Any]:
        """The gateway's counters; see `metrics.snapshot`. Of several: each one's under ``gateways``, by its URL."""
        answers = await self._fleet.everywhere("say what it counts", lambda g: g.call("GET", "/admin/stats"))
        return dict(answers[self.url]) if len(self.urls) == 1 else {"gateways": answers}

    async def health_async(self) -> dict[str, Any]:
        """How the gateway is. Of several: "ok" when all are, and each one's own answer under ``gateways``, by its URL."""
        answers = await self._fleet.everywhere("say how it is", lambda g: g.call("GET", "/healthz"))
        if len(self.urls) == 1:
            return dict(answers[self.url])
        found = {url: answers[url]["status"] if url in answers else "does not answer" for url in self.urls}
        unwell = [f"{url}: {status}" for url, status in found.items() if status != "ok"]
        return {"status": "; ".join(unwell) or "ok", "gateways": answers}

    async def workers_async(self) -> list[dict[str, Any]]:
        """The inference servers. Of several gateways each one's, with its URL under ``gateway``."""
        answers = await self._fleet.everywhere("list its servers", lambda g: g.call("GET", "/admin/workers"))
        if len(self.urls) == 1:
            return list(answers[self.urls[0]])
        return [{**worker, "gateway": url} for url, workers in answers.items() for worker in workers]

    async def aclose(self) -> None:
        """Nothing is kept open between requests; here for symmetry with other clients."""

    async def __aenter__(self) -> GatewayClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # -- the sync face

    create_sessions = _portal.sync(create_sessions_async)
    fetch = _portal.sync(fetch_async)
    close_sessions = _portal.sync(close_sessions_async)
    delete = _portal.sync(delete_async)
    set_weight_version = _portal.sync(set_weight_version_async)
    pause = _portal.sync(pause_async)
    resume = _portal.sync(resume_async)
    away = _portal.sync(away_async)
    catch_up = _portal.sync(catch_up_async)
    stats = _portal.sync(stats_async)
    health = _portal.sync(health_async)
    sessions = _portal.sync(sessions_async)
    workers = _portal.sync(workers_async)

    def close(self) -> None:
        """See `aclose`."""

    def __enter__(self) -> GatewayClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _listed(session_ids: Iterable[str]) -> list[str]:
    """Raises: ConfigError for a single id, whose letters would be taken for ids."""
    if isinstance(session_ids, str):
        raise ConfigError(f"session_ids are several ids: give [{session_ids!r}]")
    return list(session_ids)
