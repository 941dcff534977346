"""The parts of a gateway that its calls share."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter
from functools import partial

from ..messages.wire.responses import Recorded
from .config import GatewayConfig
from .routing.outage import Outage
from .routing.router import Router
from .routing.running import RunningCalls
from .sessions.registry import Sessions
from .sessions.session import Session


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
        self.outage = Outage(router, config.limits)
        self.started_s = time.time()
        prefix = secrets.token_hex(5)  # ids of one run of the gateway must not meet those of the last one
        self.call_ids = (f"{prefix}-{n:x}" for n in itertools.count())

    def replies_of(self, session: Session) -> Recorded:
        """Return what finds a recorded reply of a session by its id."""
        return partial(session.replies.find, self.sessions.store, session.number)
