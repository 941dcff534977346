"""`agentcore-rl runs show --in-flight`: the stage of each running rollout, and the part for which it waits.

It joins three sources: the process that waits for the rollouts (`in_flight.json`), the gateway (asked by that process) and the
local runtime (asked here).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import LocalRuntimeError
from ..runs import RunReader
from ..runs.in_flight import read_in_flight

ASK_S = 3.0  # the runtime answers within this time, or hangs
OLD_S = 10.0  # a file that is rewritten every two seconds should not be older
LOG_LINES, LOGS, SHOWN = 5, 3, 20
NONE = "nothing is in flight: the run has ended, is starting, or its trainer computes between two batches"


def facts(reader: RunReader) -> dict[str, Any]:
    """Return each rollout with the place where it waits, and the places with their counts, the most frequent first."""
    from ..runtime.remote import RuntimeView

    found = read_in_flight(reader.folder)
    if found is None:
        return {"run": reader.name, "count": 0, "waiting_for": [], "rollouts": [], "note": NONE}
    age_s, note = time.time() - found["at_s"], None
    if age_s > OLD_S:
        note = f"process {found['pid']} has ended, or waits for its gateway: its file is {_span(age_s)} old"
    sessions: dict[str, Mapping[str, Any]] | None = None  # None for AWS's runtime
    problem, url = None, found.get("runtime_url")
    view = None if url is None or "amazonaws.com" in url else RuntimeView(url, timeout_s=ASK_S)
    if view is not None:
        try:
            sessions = {session["session_id"]: session for session in view.sessions()}
        except LocalRuntimeError as e:
            problem = f"the runtime at {url} does not answer: {e}"
    rollouts: list[dict[str, Any]] = []
    places: dict[str, dict[str, Any]] = {}
    for rollout in sorted(found["rollouts"], key=lambda r: -r["stage_s"]):
        where, why = _place(rollout, found.get("gateway"), sessions, problem)
        log = None
        if view is not None and rollout["session_id"] in (sessions or ()) and len(rollouts) < LOGS:
            with contextlib.suppress(LocalRuntimeError):
                log = "".join(view.log(rollout["session_id"])).splitlines()[-LOG_LINES:]
        rollouts.append({**rollout, "where": where, "why": why, "log": log})
        first = {"where": where, "rollouts": 0, "longest_s": rollout["stage_s"], "why": why}
        places.setdefault(where, first)["rollouts"] += 1
    waiting = sorted(places.values(), key=lambda p: (-p["rollouts"], -p["longest_s"]))
    whole = {"run": reader.name, "count": found["count"], "age_s": age_s, "note": note}
    return {**whole, "waiting_for": waiting, "rollouts": rollouts}


def _place(
    rollout: Mapping[str, Any],
    gateway: Mapping[str, Any] | None,
    sessions: Mapping[str, Mapping[str, Any]] | None,
    problem: str | None,
) -> tuple[str, str]:
    """Return the part for which a rollout waits, and its state."""
    stage, seconds = rollout["stage"], _span(rollout["stage_s"])
    if stage == "queue":
        return "queue", f"has waited {seconds} for a free slot, the pace of requests or a quota (docs: client, limits)"
    if rollout["trouble"]:
        return "object store", f"the search for its record fails: {rollout['trouble']}"
    if stage == "result":
        return "object store", f"its record exists, and the client has been reading it for {seconds}"
    if problem is not None:
        return "runtime", problem
    session = (sessions or {}).get(rollout["session_id"])
    state = (
        "" if sessions is None else f"; its session is {session['state'] if session else 'not known to the runtime'}"
    )
    if stage in ("start", "stop") or (sessions is not None and session is None):
        return "runtime", f"it has been in stage {stage} for {seconds}{state}"
    if gateway is None:
        return "agent", "it runs without a gateway, so its model calls are not known"
    if gateway["error"]:
        return "gateway", f"the gateway does not answer: {gateway['error']}"
    known = next((s for s in gateway["sessions"] if s["session_id"] == rollout["session_id"]), None)
    if known is None or not known["calls"]:
        return "agent or its tool", f"there is no running model call: the agent's own code runs{state}"
    call = max(known["calls"], key=lambda c: c["seconds"])
    seconds, left = _span(call["seconds"]), "" if call["left_s"] is None else f", {_span(call['left_s'])} left"
    if call["state"] == "held":
        return "weights", f"the gateway holds its model call for {seconds}: the trainer has paused it{left}"
    if call["state"] == "sampling":
        return "model", f"{known['server'] or 'the engine'} has a model call of it for {seconds}{left}"
    return "gateway", f"its model call is {call['state']} for {seconds}{left}"


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the same facts as lines of text."""
    if found["note"]:
        yield found["note"]
    if found["rollouts"]:
        yield f"{found['run']}: {found['count']} rollouts in flight, as of {_span(found['age_s'])} ago\n"
    for place in found["waiting_for"]:
        yield f"{place['rollouts']:>5} wait for {place['where']}, the longest for {_span(place['longest_s'])}: {place['why']}"
    for rollout in found["rollouts"][:SHOWN]:
        left = "no limit" if rollout["left_s"] is None else f"{_span(rollout['left_s'])} left"
        yield (
            f"{rollout['session_id']}  input {rollout['input_id']}  attempt {rollout['attempt']}  stage {rollout['stage']} for "
            f"{_span(rollout['stage_s'])} ({left})  {rollout['where']}: {rollout['why']}"
        )
        yield from (f"    | {line}" for line in rollout["log"] or ())
    if len(found["rollouts"]) > SHOWN:
        yield f"... and {found['count'] - SHOWN} more (--json)"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
