"""`agentcore-rl runs stuck`: in which stage the rollouts of a run are, while it hangs.

Three witnesses are put together: the process that waits for the rollouts (`in_flight.json`), the gateway, which it asks, and the
local runtime, which is asked here. Each has a deadline of a few seconds, so that whoever hangs is named and not waited for.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..errors import AgentCoreRLError, LocalRuntimeError
from ..runs import RunReader, find_run, read_in_flight
from .options import as_json
from .output.terminal import visible

ASK_S = 3.0  # what a server may take to answer
OLD_S = 10.0  # a file that is rewritten every two seconds should not be older
LOG_LINES = 5
SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What the local runtime says; ``problem``: why it says nothing."""

    url: str
    sessions: Mapping[str, Mapping[str, Any]]
    problem: str | None = None


@click.command("stuck", short_help="Say where the rollouts of a run hang.")
@click.argument("run", required=False)
@as_json
def command(run: str | None, as_json: bool) -> None:
    """Say where the rollouts of RUN hang: in which stage, since when, until which deadline, and who is waited for.

    RUN is a folder or a name under runs/ [default: the run written last], of a trainer or of eval, while it is under way.

    \b
    Example:
        agentcore-rl runs stuck
    """
    folder = find_run(run)
    found = read_in_flight(folder)
    facts = {"run": folder.resolve().name, **(idle(folder) if found is None else explained(found))}
    click.echo(json.dumps(facts, indent=2) if as_json else visible("\n".join(_lines(facts))))


def idle(folder: Path) -> dict[str, Any]:
    """Of a run without rollouts in flight."""
    last_s: float | None = None
    try:
        with RunReader(folder) as reader:
            last_s = max((s["last_s"] for s in reader.steps() if s["last_s"] is not None), default=None)
    except AgentCoreRLError:
        pass
    since = "" if last_s is None else f"; the last one ended {_span(time.time() - last_s)} ago"
    text = (
        f"no rollout is in flight{since}. The run has ended, is starting, or its trainer computes between two batches"
    )
    return {"waiting_for": [], "rollouts": [], "note": text}


def explained(found: Mapping[str, Any]) -> dict[str, Any]:
    """Each rollout with the place where it hangs, and the places with their counts, the most frequent first."""
    age_s = time.time() - found["at_s"]
    process = _process(found["pid"])
    note = None
    if age_s > OLD_S:
        # Nothing in the file is true any more: the one that writes it is what hangs.
        state = {None: "is gone", "T": "is stopped (SIGSTOP)"}.get(process, "does not write")
        note = f"the process {found['pid']} that waits for the rollouts {state}: its last word is {_span(age_s)} old"
    runtime = _runtime(found.get("runtime_url"))
    rollouts = []
    for rollout in found["rollouts"]:
        where, why = _place(rollout, found.get("gateway"), runtime)
        rollouts.append({**rollout, "where": where, "why": why, "log": None})
    rollouts.sort(key=lambda r: -r["stage_s"])
    for rollout in rollouts[:3]:
        rollout["log"] = _log(runtime, rollout["session_id"])
    places: dict[str, dict[str, Any]] = {}
    for rollout in rollouts:
        place = places.setdefault(rollout["where"], {"where": rollout["where"], "rollouts": 0, "longest_s": 0.0})
        place["rollouts"] += 1
        if rollout["stage_s"] >= place["longest_s"]:
            place |= {"longest_s": rollout["stage_s"], "why": rollout["why"]}
    waiting = sorted(places.values(), key=lambda p: (-p["rollouts"], -p["longest_s"]))
    return {"count": found["count"], "age_s": age_s, "note": note, "waiting_for": waiting, "rollouts": rollouts}


def _place(rollout: Mapping[str, Any], gateway: Mapping[str, Any] | None, runtime: Runtime | None) -> tuple[str, str]:
    """Who is waited for, and what is known of that."""
    stage, seconds = rollout["stage"], _span(rollout["stage_s"])
    if stage == "queue":
        return "queue", f"waits for {seconds} for a free place, the pace of requests or a quota (docs: client, limits)"
    if rollout["trouble"]:
        return "object store", f"its record cannot be looked for: {rollout['trouble']}"
    if stage == "result":
        return "object store", f"its record is there and is being read for {seconds}"
    if runtime is not None and runtime.problem is not None:
        return "runtime", runtime.problem
    session = runtime.sessions.get(rollout["session_id"]) if runtime is not None else None
    if stage == "start":
        state = "is not known to the runtime yet" if session is None else f"is {session['state']}"
        return "runtime", f"the invoke is unanswered for {seconds}; its session {state}"
    if stage == "stop":
        return "runtime", f"its session is being stopped for {seconds}"
    return _running(rollout, gateway, session, runtime)


def _running(
    rollout: Mapping[str, Any],
    gateway: Mapping[str, Any] | None,
    session: Mapping[str, Any] | None,
    runtime: Runtime | None,
) -> tuple[str, str]:
    """A rollout whose agent should be at work."""
    if runtime is not None and session is None:
        return "runtime", "the runtime has no session of it any more, and there is no record: it is about to be lost"
    if gateway is None:
        return "agent", "it runs, without a gateway: its model calls are not seen"
    if gateway["answered_s"] is None and time.time() - gateway["asked_s"] > ASK_S:
        return "gateway", f"the gateway has not answered for {_span(time.time() - gateway['asked_s'])}"
    if gateway.get("error"):
        return "gateway", f"the gateway does not answer: {gateway['error']}"
    known = next((s for s in gateway["sessions"] if s["session_id"] == rollout["session_id"]), None)
    if known is None or not known["calls"]:
        state = "" if session is None else f"; its session is {session['state']}"
        return "agent or its tool", f"no model call is under way: the agent's own code has the turn{state}"
    call = max(known["calls"], key=lambda c: c["seconds"])
    left = "" if call["left_s"] is None else f", {_span(call['left_s'])} left"
    if call["state"] == "held":
        return (
            "weights",
            f"the gateway holds its model call for {_span(call['seconds'])}: the trainer has paused it{left}",
        )
    if call["state"] in ("routed", "sent", "relaying"):
        server = known["server"] or "the inference server"
        return "model", f"{server} has a model call of it for {_span(call['seconds'])} ({call['state']}{left})"
    return "gateway", f"its model call is {call['state']} for {_span(call['seconds'])}{left}"


def _runtime(url: str | None) -> Runtime | None:
    """The local runtime, asked now; None where the runs's rollouts are on AWS's."""
    from ..runtime import roots
    from ..runtime.remote import RuntimeView, credential_from_env

    if url is None or "amazonaws.com" in url:
        return None
    try:
        view = RuntimeView(url, credential_from_env(os.environ), timeout_s=ASK_S)
        return Runtime(url=url, sessions={s["session_id"]: s for s in view.sessions()})
    except LocalRuntimeError as e:
        pid = next((s.get("pid") for s in roots.live_servers() if s.get("url") == url), None)
        state = _process(pid) if isinstance(pid, int) else None
        why = f"its process {pid} is stopped (SIGSTOP)" if state == "T" else str(e)
        return Runtime(url=url, sessions={}, problem=f"the runtime at {url} does not answer: {why}")


def _log(runtime: Runtime | None, session_id: str) -> list[str] | None:
    from ..runtime.remote import RuntimeView, credential_from_env

    if runtime is None or runtime.problem is not None or session_id not in runtime.sessions:
        return None
    try:
        view = RuntimeView(runtime.url, credential_from_env(os.environ), timeout_s=ASK_S)
        return "".join(view.log(session_id)).splitlines()[-LOG_LINES:]
    except LocalRuntimeError:
        return None


def _process(pid: int) -> str | None:
    """State of a process as the kernel names it (R, S, T, ...), "?" where that is not known; None: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return "?"


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    if facts["note"]:
        yield facts["note"]
    if not facts["rollouts"]:
        return
    yield f"{facts['run']}: {facts['count']} rollouts in flight, as of {_span(facts['age_s'])} ago"
    yield ""
    for place in facts["waiting_for"]:
        yield f"{place['rollouts']:>5} wait for {place['where']}, the longest for {_span(place['longest_s'])}: {place['why']}"
    yield ""
    for rollout in facts["rollouts"][:SHOWN]:
        left = "no limit" if rollout["left_s"] is None else f"{_span(rollout['left_s'])} left"
        yield (
            f"{rollout['session_id']}  input {rollout['input_id']}  attempt {rollout['attempt']}  stage {rollout['stage']} for "
            f"{_span(rollout['stage_s'])} ({left})  {rollout['where']}: {rollout['why']}"
        )
        for line in rollout["log"] or ():
            yield f"    | {line}"
    if len(facts["rollouts"]) > SHOWN:
        yield f"... and {facts['count'] - SHOWN} more (--json)"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
