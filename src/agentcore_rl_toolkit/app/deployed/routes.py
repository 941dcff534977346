"""The model calls of an agent, found in its HTTP requests, and the gateway's address for each of them.

Standard library only. `Route.redirect` decides about one request. It reads the address, and the body only where the address does
not tell whether a request is a chat of the policy.
"""

from __future__ import annotations

import json
import mmap
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from ...contract import CALLS_FIELD

# Hosts of model APIs. Requests to other hosts are left alone unless the user names the host.
_MODEL_HOSTS = """bedrock-runtime.*.amazonaws.com bedrock-runtime-fips.*.amazonaws.com bedrock-runtime.*.amazonaws.com.cn
    *.bedrock-runtime.*.vpce.amazonaws.com *.bedrock-mantle.*.vpce.amazonaws.com bedrock-runtime*.api.aws bedrock-mantle*.api.aws
    api.openai.com *.api.openai.com *.openai.azure.com *.services.ai.azure.com *.cognitiveservices.azure.com api.anthropic.com
    generativelanguage.googleapis.com aiplatform.googleapis.com *-aiplatform.googleapis.com aiplatform.*.rep.googleapis.com"""
# Paths of chats. A provider may have anything before the group `path`, which is the path below a session of the gateway.
_CHAT = re.compile(
    r"(?:(?:.*/)?deployments/(?P<deployment>[^/]+)/|.*/)?"
    r"(?P<path>(?P<aws>model/(?P<id>(?:(?!/model/).)+)/(?:converse|converse-stream|(?P<invoke>invoke|invoke-with-response-stream)))"
    r"|models/(?P<name>[^/]+):(?:generateContent|streamGenerateContent)|(?<=/v1/)messages|chat/completions|responses)"
)
# Headers that are not sent to the gateway: the address, and credentials of the agent.
_REMOVED = """host authorization proxy-authorization cookie set-cookie x-api-key x-goog-api-key api-key x-amz-security-token
    x-amz-date x-amz-content-sha256 subscription-key ocp-apim-subscription-key x-auth-token x-access-token x-auth-key
    helicone-auth x-goog-iam-authorization-token x-serverless-authorization cf-aig-authorization x-portkey-api-key"""
_PARAMETERS = frozenset({"alt", "beta"})  # parameters of a query that are kept; others may be credentials

Body = Callable[[], Any]  # the body of a request: bytes, text, decoded JSON, or anything else for a stream


@dataclass(kw_only=True)
class Route:
    """The way of a rollout's model calls to its session at the gateway.

    Args:
        hosts: patterns of hosts, besides those of model APIs, a port may follow.
        models: patterns of the names of the policy's models. Empty: all chats are the policy's.

    ``elsewhere`` counts requests that went to their own address, by a description of the address and the reason.
    """

    base_url: str
    api_key: str = field(repr=False)
    hosts: Sequence[str] = ()
    models: Sequence[str] = ()
    elsewhere: Counter[str] = field(default_factory=Counter)
    ended: bool = False
    _taken: Any = field(default_factory=lambda: memoryview(mmap.mmap(-1, 8)).cast("Q"), repr=False)  # shared with forks

    @property
    def calls(self) -> dict[str, Any]:
        """The counts, also those of forks, as a rollout's record has them."""
        return {CALLS_FIELD: {"gateway": self._taken[0], "elsewhere": dict(self.elsewhere)}}

    def redirect(self, method: str, url: str, headers: Any, body: Body) -> str | None:
        """Return a request's new address, and change its headers, a mutable mapping. None for a request that is left alone."""
        if method.upper() != "POST":
            return None
        if url.startswith(f"{self.base_url}/"):
            self._taken[0] += 1  # an agent that uses `app.model()`
            return None
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
        known = self._is_model_host(host, parts.netloc.rpartition("@")[2])
        leaves = {".", ".."} & {*unquote(parts.path).split("/")}  # it would lead out of the session
        found = None if leaves else _CHAT.fullmatch(parts.path)
        if found is None and not known:
            return None
        reason = None
        if found is None or (known and found["invoke"] and not isinstance(_member(body, "messages"), list)):
            reason = "no chat"
        elif not known:
            reason = "another host"
        elif self.models:
            named = found["id"] or found["name"]
            model = unquote(named) if named else str(_member(body, "model") or found["deployment"])
            if not any(fnmatchcase(model, pattern) for pattern in self.models):
                reason = f"model {model}"
        if found is None or reason is not None:
            self.elsewhere[f"{host}{parts.path} ({reason})"] += 1
            return None
        self._taken[0] += 1
        path = f"bedrock/{found['path']}" if found["aws"] else found["path"]
        query = urlencode([(k, v) for k, v in parse_qsl(parts.query) if k.lower() in _PARAMETERS])
        for name in {name.lower() for name in headers}.intersection(_REMOVED.split()):
            del headers[name]
        headers["Host"], headers["Authorization"] = urlsplit(self.base_url).netloc, f"Bearer {self.api_key}"
        return f"{self.base_url}/{path}" + (f"?{query}" if query else "")

    def _is_model_host(self, host: str, with_port: str) -> bool:
        # A host may be given as a URL. The brackets of an IPv6 address are no set of characters.
        given = (re.sub(r"^\w+://|/.*", "", host).lower().replace("[", "[[]") for host in self.hosts)
        names = (host, f"[{host}]", with_port.lower())
        return any(fnmatchcase(name, pattern) for pattern in (*_MODEL_HOSTS.split(), *given) for name in names)


def _member(body: Body, name: str) -> Any:
    found = body()
    try:
        decoded = json.loads(found) if isinstance(found, (str, bytes, bytearray)) else found
    except (ValueError, RecursionError):
        return None
    return decoded.get(name) if isinstance(decoded, Mapping) else None


_current: Route | None = None
_turn = threading.Lock()


@contextmanager
def routed(route: Route | None) -> Iterator[None]:
    """Send the model calls of this process along the route. Rollouts take turns.

    What an agent leaves running keeps the route, and the gateway refuses the calls of a closed session.
    """
    global _current
    with _turn:
        _current = route
        try:
            yield
        finally:
            if route is not None:
                route.ended = True


def unroute() -> None:
    """Redirect nothing until the next rollout."""
    global _current
    _current = None


def current_route() -> Route | None:
    """Return the route of the rollout that runs or ran last in this process, or None in production."""
    return _current
