"""Sources of traffic: a file, or CloudWatch Logs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError

PAGE = 10_000  # CloudWatch's largest result of a query
QUERY_S, PAUSE_S = 300.0, 0.5
_QUERY = "fields @timestamp, @message | filter ispresent(traceId) and ispresent(spanId) | sort @timestamp asc"
SPANS = "aws/spans"

Call = Callable[..., Any]  # (operation, **parameters) of the service `logs`


def read_file(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file: one JSON object or list, or one in each line. Raises: ConfigError that names the line."""
    with path.open(
        encoding="utf-8", errors="replace", newline="\n"
    ) as lines:  # texts have other line separators in them
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError as e:
                if number > 1:
                    raise ConfigError(f"{path}:{number} is not JSON: {e}") from e
                found = _whole(path, line + lines.read())
            yield from (each for each in (found if isinstance(found, list) else [found]) if isinstance(each, dict))


def _whole(path: Path, text: str) -> Any:
    """Read a JSON document of several lines."""
    try:
        return json.loads(text)
    except ValueError as e:
        raise ConfigError(f"{path} is not JSON: {e}") from e


def log_groups(source: str) -> list[str]:
    """Return the log groups of an agent's ARN, or the named log group. The spans of split mode are in a shared group."""
    if ":runtime/" not in source:
        return [source]
    agent, _, endpoint = source.rsplit(":runtime/", 1)[1].partition("/runtime-endpoint/")
    return [f"/aws/bedrock-agentcore/runtimes/{agent}-{endpoint or 'DEFAULT'}", SPANS]


def read_cloudwatch(call: Call, source: str, *, begin_s: int, end_s: int) -> Iterator[dict[str, Any]]:
    """Yield the spans and event records of an agent, or of a log group, between two times (seconds since 1970).

    Raises: RefusedError, with AWS's message; ConfigError for a query that does not end.
    """
    agent = source.rsplit(":runtime/", 1)[1].partition("/")[0] if ":runtime/" in source else None
    for group in log_groups(source):
        for record in _window(call, group, begin_s, end_s):
            if group != SPANS or agent is None or agent in json.dumps(record.get("resource", {})):
                yield record


def _window(call: Call, group: str, begin_s: int, end_s: int) -> Iterator[dict[str, Any]]:
    """Query a window of time. A window with too many records is halved."""
    started = call(
        "StartQuery",
        logGroupName=group,
        startTime=begin_s,
        endTime=end_s,
        queryString=_QUERY,
        limit=PAGE,
        absent=("ResourceNotFoundException",),
    )
    if started is None:
        return
    deadline = time.monotonic() + QUERY_S
    while (found := call("GetQueryResults", queryId=started["queryId"]))["status"] in ("Scheduled", "Running"):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"the query of {group} did not end within {QUERY_S:.0f} s: choose a shorter time with --since"
            )
        time.sleep(PAUSE_S)
    if found["status"] != "Complete":
        raise ConfigError(f"the query of {group} ended as {found['status']}")
    results = found["results"]
    if len(results) >= PAGE:
        if begin_s >= end_s:
            raise ConfigError(f"{group} has more records in one second than CloudWatch returns, {PAGE:,}")
        middle = (begin_s + end_s) // 2
        yield from _window(call, group, begin_s, middle)
        yield from _window(call, group, middle + 1, end_s)
        return
    for row in results:
        values: Mapping[str, str] = {each["field"]: each["value"] for each in row}
        try:
            record = json.loads(values.get("@message", ""))
        except ValueError:
            continue
        # Filtered again: other services write to the same groups.
        if isinstance(record, dict) and record.get("traceId") and record.get("spanId"):
            yield record
