"""The parts of a gateway that its calls share."""

from __future__ import annotations

import itertools
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

    def ignored(self, session: Session, names: Iterable[str]) -> None:
        """Count what an agent sends in vain, each name once a session."""
        for name in names:
            if name[:80] not in session.ignored and len(session.ignored) < _MOST_IGNORED:
                session.ignored[name[:80]] = None
                self.counters["ignored"] += 1
