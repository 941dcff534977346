"""The states of a model call, and the one table of their transitions.

A retry goes back to ``ROUTED`` (or ``HELD``, while the gateway is paused). It is possible as long as nothing of the reply has
reached the agent, so no arrow leads back from ``RELAYING``. Of a stream everything is relayed at once except its end:
from the event with the finish reason on, bytes wait for ``RECORDED``.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a call is."""

    RECEIVED = "received"  # the request is being read and checked
    RENDERING = "rendering"  # a thread makes the prompt's tokens
    HELD = "held"  # the gateway is paused and lets calls wait
    ROUTED = "routed"  # a server is chosen; its connection is being opened
    SENT = "sent"  # the request is with the server; nothing of a reply has reached the agent
    RELAYING = "relaying"  # a part of the reply has reached the agent
    COMPLETE = "complete"  # the reply is whole; it is about to be recorded
    RECORDED = "recorded"  # the record is with the store; the reply's last bytes wait for its commit
    # A call ends in one of these.
    REFUSED = "refused"  # the request never became a call
    JOINED = "joined"  # a repeated request, answered by the first one's call or record
    ANSWERED = "answered"  # the agent has the last byte
    FAILED = "failed"  # the agent has an error
    ABANDONED = "abandoned"  # the agent went away


_ENDED = (State.FAILED, State.ABANDONED)

NEXT: dict[State, frozenset[State]] = {
    State.RECEIVED: frozenset((State.REFUSED, State.JOINED, State.RENDERING, State.HELD, State.ROUTED, *_ENDED)),
    State.RENDERING: frozenset((State.HELD, State.ROUTED, *_ENDED)),
    State.HELD: frozenset((State.ROUTED, *_ENDED)),
    State.ROUTED: frozenset((State.ROUTED, State.HELD, State.SENT, *_ENDED)),
    State.SENT: frozenset((State.ROUTED, State.HELD, State.RELAYING, State.COMPLETE, *_ENDED)),
    State.RELAYING: frozenset((State.COMPLETE, *_ENDED)),
    State.COMPLETE: frozenset((State.ROUTED, State.HELD, State.RECORDED, *_ENDED)),
    State.RECORDED: frozenset((State.ANSWERED, *_ENDED)),
    State.REFUSED: frozenset(),
    State.JOINED: frozenset(),
    State.ANSWERED: frozenset(),
    State.FAILED: frozenset(),
    State.ABANDONED: frozenset(),
}
ENDS = frozenset(state for state, following in NEXT.items() if not following)


class IllegalTransitionError(RuntimeError):
    """A call was to go where the table has no arrow: a fault of the gateway, which ends the call."""
