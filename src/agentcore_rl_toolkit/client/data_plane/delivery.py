"""Whether an invoke that was answered with 500 or 503 may be sent again, with the same session id.

Such an answer leaves open whether the agent got the payload. Sent again, the payload may reach it twice. That does no harm to an
agent that runs a session's payload once however often it is delivered, and says so in its answers (``runs_once``, as agents of
this toolkit do); any other agent might run twice in one session.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from ...contract import RUNS_ONCE_FIELD

# answers in a row that say so, once one did not: a fleet in the middle of an update has both kinds
CONVINCED_AFTER = 100


class AgentWord:
    """What the answers of one agent have said so far. Thread-safe; shared by all clients of the process that talk to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._needed = 1

    def answered(self, reply: Mapping[str, Any]) -> None:
        """The agent answered an invoke."""
        with self._lock:
            if reply.get(RUNS_ONCE_FIELD) is True:
                self._in_a_row += 1
            else:
                self._in_a_row, self._needed = 0, CONVINCED_AFTER

    @property
    def runs_once(self) -> bool:
        """Whether every session of this agent is known to run its payload once."""
        with self._lock:
            return self._in_a_row >= self._needed


_words: dict[tuple[str, str], AgentWord] = {}  # process-wide, as paces are: it is the agent that says so, whoever asks
_words_lock = threading.Lock()


def shared_word(agent_runtime_arn: str, endpoint_url: str | None, qualifier: str | None) -> AgentWord:
    """What is known of an agent; an endpoint of its own (``qualifier``) may be another version."""
    with _words_lock:
        return _words.setdefault((f"{agent_runtime_arn} {qualifier or ''}", endpoint_url or ""), AgentWord())
