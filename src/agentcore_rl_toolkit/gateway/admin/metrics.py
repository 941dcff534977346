"""The counters of a gateway, as one dict and in Prometheus' text format."""

from __future__ import annotations

import os
import time
from typing import Any

from .state import Parts

_HELP = {
    "calls": "Model calls received from agents",
    "refused": "Calls refused before they were sent on (keys, closed sessions, bad requests)",
    "ignored": "Fields, tools and blocks that agents sent in vain, each once a session",
    "markers_in_text": "Markers of the chat format in agents' texts (text with --model; where the engine renders, tokens)",
    "retries": "Calls sent to another inference server after a failure",
    "stale_connections": "Calls repeated because the server had closed an idle connection",
    "turns_error": "Calls that ended in an error, not stored as turns",
    "turns_partial": "Replies that broke off at the engine, not stored as turns",
    "turns_aborted": "Calls the agent gave up on, not stored as turns",
    "turns_invalid": "Replies whose tokens do not fit together, not stored as turns",
    "turns_joined": "Repeated requests answered from the record of the first",
    "deadlines": "Calls ended because they took too long",
    "tokens_cut": "Tokens that a sampling service gave beyond what was asked for, left out of turns",
    "stalled_agents": "Connections dropped because the agent stopped reading",
    "store_failures": "Calls whose record the disk did not take (their agents got an error)",
    "admin_requests": "Requests to administrative routes",
}


def snapshot(parts: Parts) -> dict[str, Any]:
    """Everything that is counted. Units: seconds, bytes."""
    sessions, store, running = parts.sessions, parts.sessions.store, parts.running
    histories = parts.token_mode.histories if parts.token_mode is not None else None
    return {
        **{name: parts.counters[name] for name in _HELP},
        "turns": sessions.turns,
        "sessions": len(sessions.by_id),
        "sessions_created": sessions.created,
        "sessions_deleted": sessions.deleted,
        "in_flight": len(running),
        "held": len(running.waiting),
        "connections": len(parts.connections),
        "paused": running.paused,
        "weight_version": running.weight_version,
        "event_loop_lag_s": parts.lag.now_s,
        "event_loop_lag_max_s": parts.lag.most_s,
        "history_bytes": histories.held_bytes if histories is not None else 0,
        "history_reloads": histories.reloads if histories is not None else 0,
        "histories_lost": histories.lost if histories is not None else 0,
        "store_queue": store.queue_depth,
        "store_bytes": store.total_bytes,
        "store_slow_commits": store.slow_commits,
        "store_checkpoints": store.wal.checkpoints,
        "store_damaged_calls": store.reader.damaged_calls,
        "uptime_s": time.time() - parts.started_s,
        "pid": os.getpid(),
        "workers": parts.servers(),
    }


_GAUGES = {
    "sessions": "Sessions held",
    "in_flight": "Model calls under way, held ones included",
    "held": "Model calls waiting for a pause to end",
    "connections": "Open client connections",
    "event_loop_lag_s": "How late the last timer ran",
    "event_loop_lag_max_s": "How late a timer ran at worst",
    "history_bytes": "Tokens and messages of sessions held in memory, where the gateway tokenises",
    "history_reloads": "Histories made again from the store since the start",
    "histories_lost": "Histories that could not be made again (their sessions began a new branch)",
    "store_queue": "Calls waiting to be committed",
    "store_bytes": "Size of the store",
}


def exposition(parts: Parts) -> bytes:
    """The same for Prometheus."""
    values = snapshot(parts)
    lines: list[str] = []
    for name, text in [*_HELP.items(), ("turns", "Turns stored")]:
        metric = f"agentcore_rl_gateway_{name}_total"
        lines += [f"# HELP {metric} {text}", f"# TYPE {metric} counter", f"{metric} {values[name]}"]
    for name, text in _GAUGES.items():
        metric = f"agentcore_rl_gateway_{name.removesuffix('_s')}" + ("_seconds" if name.endswith("_s") else "")
        lines += [f"# HELP {metric} {text}", f"# TYPE {metric} gauge", f"{metric} {values[name]}"]
    metric = "agentcore_rl_gateway_upstream_in_flight"
    lines += [f"# HELP {metric} Model calls at an inference server", f"# TYPE {metric} gauge"]
    lines += [f'{metric}{{worker="{_label(w["worker_id"])}"}} {w["active"]}' for w in values["workers"]]
    metric = "agentcore_rl_gateway_upstream_healthy"
    lines += [f"# HELP {metric} 1 while calls to the server succeed", f"# TYPE {metric} gauge"]
    lines += [f'{metric}{{worker="{_label(w["worker_id"])}"}} {int(w["healthy"])}' for w in values["workers"]]
    return ("\n".join(lines) + "\n").encode()


def _label(value: str) -> str:
    """A label's value, escaped: the name of a server may hold any character. Source: Prometheus' exposition format 0.0.4."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
