"""The load generator: one wrk process, each connection asks again as soon as it is answered."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .processes import LOAD_CORE, pinned

# Requests are formatted once per session; `calls` of them in a row go to the same one. The header is what OpenAI's client
# sends with a first attempt: the gateway has to look whether it knows the call.
_SCRIPT = """
local sessions = {}
init = function()
  for line in io.lines("%(sessions)s") do
    local path, key = line:match("^(%%S+) (%%S+)$")
    sessions[#sessions + 1] = wrk.format("POST", path, {["content-type"] = "application/json",
      ["x-stainless-retry-count"] = "0", ["authorization"] = "Bearer " .. key}, [==[%(body)s]==])
  end
end
local n = %(offset)d
request = function()
  local s = sessions[math.floor(n / %(calls)d) %% #sessions + 1]
  n = n + 1
  return s
end
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format('RESULT {"requests":%%d,"us":%%d,"errors":%%d,"timeouts":%%d,', summary.requests, summary.duration,
    e.connect + e.read + e.write + e.status, e.timeout))
  io.write(string.format('"p50":%%f,"p99":%%f,"worst":%%f}\\n',
    latency:percentile(50), latency:percentile(99), latency.max))
end
"""


@dataclass(frozen=True)
class Load:
    """The result of wrk. Units: ms, and CPU seconds of wrk itself. Latencies are None when no answer came in the window."""

    requests: int
    seconds: float
    errors: int
    p50_ms: float | None
    p99_ms: float | None
    worst_ms: float | None
    cpu_s: float

    @property
    def rps(self) -> float:
        return self.requests / self.seconds


def chat_request(tokens: int, *, stream: bool, model: str = "m") -> str:
    """A call of about 1.2 KB."""
    system = {"role": "system", "content": "You are a careful assistant. " * 20}
    user = {"role": "user", "content": "Work it out step by step. " * 20}
    body = {"model": model, "messages": [system, user], "max_tokens": tokens, "temperature": 1.0}
    if stream:
        body["stream"] = True
    return json.dumps(body, separators=(",", ":"))


def load(
    url: str,
    sessions: Path,
    *,
    tokens: int,
    stream: bool,
    connections: int,
    seconds: float,
    model: str = "m",
    calls: int = 10,
    offset: int = 0,
) -> Load:
    """Ask for `seconds` (at least one). The sessions' turn begins as if `offset` calls had been made."""
    body = chat_request(tokens, stream=stream, model=model)
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        values = {"sessions": sessions, "body": body, "calls": calls, "offset": offset}
        script.write(_SCRIPT % values)
        script.flush()
        command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "60s"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            pinned(LOAD_CORE, [*command, "-s", script.name, url]),
            capture_output=True,
            text=True,
            timeout=seconds + 120,
            check=False,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = re.search(r"RESULT (\{.*\})", done.stdout)
    if not found:
        raise SystemExit(f"wrk failed: {done.stderr or done.stdout}")
    values = json.loads(found[1])
    if 0 < values["requests"] <= values["errors"]:
        raise SystemExit(f"{url} refused every call, so there was no load")
    answered = values["requests"] > 0
    return Load(
        requests=values["requests"],
        seconds=values["us"] / 1e6,
        errors=values["errors"] + values["timeouts"],
        p50_ms=values["p50"] / 1000 if answered else None,
        p99_ms=values["p99"] / 1000 if answered else None,
        worst_ms=values["worst"] / 1000 if answered else None,
        cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    )
