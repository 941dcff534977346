"""The parts of a gateway that its calls share."""

from __future__ import annotations

import difflib
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable

from ..config import GatewayConfig
from ..sessions.registry import Sessions
from ..sessions.session import Session
from ..upstreams.router import Router
from .outage import Outage
from .running import RunningCalls

log = logging.getLogger(__name__)

_SAMPLING = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "stop",
]
_MOST_IGNORED = 100  # names of one session: an agent may make them up


class Context:
    """The gateway's parts that each call uses. ``engine`` is the kind of the inference servers; ``allow_fields`` are
    fields of requests that pass besides the known ones.
    """

    def __init__(self, config: GatewayConfig, *, counters: Counter[str], sessions: Sessions, router: Router) -> None:
        self.limits = config.limits
        self.engine = config.kind
        self.allow_fields = config.allow_fields
        self.train_constrained = config.train_constrained
        self.counters = counters
        self.sessions = sessions
        self.router = router
        self.running = RunningCalls(config.limits, counters)
        self.outage = Outage(router, self.running, config.limits, counters)
        self.started_s = time.time()
        prefix = secrets.token_hex(5)  # ids of one run of the gateway must not meet those of the last one
        self.call_ids = (f"{prefix}-{n:x}" for n in itertools.count())
        self._mistyped: set[str] = set()

    def ignored(self, session: Session, names: Iterable[str]) -> None:
        """Count what an agent sends in vain, each name once a session."""
        for name in names:
            if name[:80] not in session.ignored and len(session.ignored) < _MOST_IGNORED:
                session.ignored[name[:80]] = None
                self.counters["ignored"] += 1
                self._warn_of_mistyped(session, name[:80])

    def _warn_of_mistyped(self, session: Session, name: str) -> None:
        """Say once that a field is left out whose name is nearly that of a sampling parameter."""
        meant = difflib.get_close_matches(name.lower(), _SAMPLING, 1, 0.8)
        if meant and name not in (*_SAMPLING, *self._mistyped) and len(self._mistyped) < _MOST_IGNORED:
            self._mistyped.add(name)
            log.warning("session %s sends %r, which is left out: is %s meant?", session.id, name, meant[0])
