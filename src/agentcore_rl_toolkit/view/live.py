"""A running gateway as a run: its sessions are copied into a folder as they grow, and the page reads that folder.

Sessions that the gateway has deleted stay visible for as long as this process lives.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..backends.collection.recording import captured
from ..contract import DEFAULT_TRAIN
from ..errors import AgentCoreRLError
from ..gateway import GatewayClient
from ..runs import Rollout, RunWriter, TokenTexts, write_config
from ..trajectory import Trajectory, build_trajectory

log = logging.getLogger(__name__)

LOOK_S = 1.0
AT_ONCE = 64  # sessions of one fetch: what they hold is in memory meanwhile
NEWEST = 5000  # of a gateway with more sessions, so many are copied first


class GatewayMirror:
    """Copies a gateway's sessions into ``folder``, which becomes a run. ``start`` raises GatewayError when it does not answer."""

    def __init__(
        self, urls: str, folder: Path, *, admin_key: str | None = None, texts: TokenTexts | None = None
    ) -> None:
        self.folder, self._urls = folder, urls
        self._client = GatewayClient(urls, admin_key=admin_key, timeout_s=10.0)
        self._texts = texts
        self._known: dict[str, tuple[Any, ...]] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="agentcore-rl-gateway-mirror", daemon=True)
        self._run: RunWriter | None = None
        self._silent = False

    def start(self) -> None:
        sessions = self._client.sessions()
        self._run = RunWriter(self.folder, max_gb=2.0, texts=self._texts)
        write_config(self.folder, {"gateway": self._urls})
        self._copy(sessions)
        self._run.flush()
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(15)
        if self._run is not None:
            self._run.close()

    def _follow(self) -> None:
        while not self._ending.wait(LOOK_S):
            try:
                self._copy(self._client.sessions())
                self._silent = False
            except Exception as e:  # of one look: what the gateway holds later is shown all the same
                if not self._silent:
                    unknown = not isinstance(e, AgentCoreRLError)
                    log.warning("the gateway's sessions are shown as they were: %s", e, exc_info=unknown)
                self._silent = True

    def _copy(self, sessions: Sequence[Mapping[str, Any]]) -> None:
        """Write those that changed since the last look."""
        run = self._run
        assert run is not None
        changed = [s for s in sessions if self._known.get(s["session_id"]) != _seen(s)]
        changed.sort(key=lambda s: s["created_s"])
        for start in range(0, len(changed := changed[-NEWEST:]), AT_ONCE):
            if self._ending.is_set():
                return
            part = {s["session_id"]: s for s in changed[start : start + AT_ONCE]}
            captures = self._client.fetch([name for name, s in part.items() if s["records"]], close=False)
            for name, session in part.items():
                run.rollout(as_row(session, captures.get(name)))
                self._known[name] = _seen(session)
        gone = self._known.keys() - {s["session_id"] for s in sessions}
        for name in gone:
            del self._known[name]


def _seen(session: Mapping[str, Any]) -> tuple[Any, ...]:
    return session["records"], session["closed_s"], tuple(call["state"] for call in session["calls"])


def as_row(session: Mapping[str, Any], capture: Any) -> Rollout:
    """A session as a run keeps it. Its outcome is "open" or "closed": what the agent made of it, a gateway does not know."""
    trajectory: Trajectory | None = None
    if capture is not None:
        try:
            trajectory = build_trajectory(capture.session_id, capture.turns, train=capture.train or DEFAULT_TRAIN)
        except AgentCoreRLError:
            trajectory = None  # the dialogue is still worth reading
    running = [f"a model call is {call['state']}, since {call['seconds']:.1f} s" for call in session["calls"]]
    closed_s, last_s = session["closed_s"], session["last_call_s"]
    metadata = session["metadata"]
    found = captured(capture, trajectory)
    if capture is not None and not found.get("dialogue"):
        found["dialogue"] = capture.dialogue
    return Rollout(
        session_id=session["session_id"],
        phase="session",
        group=str(metadata.get("input_id") or session["session_id"]),
        outcome="open" if closed_s is None else "closed",
        elapsed_s=(closed_s or time.time()) - session["created_s"],
        ended_s=closed_s or last_s,
        error="; ".join(running) or _last_error(found.get("call_errors") or ()),
        payload=dict(metadata),
        **found,
    )


def _last_error(errors: Iterable[Mapping[str, Any]]) -> str | None:
    messages = [f"{e.get('status')}: {e.get('message')}" for e in errors]
    return messages[-1] if messages else None
