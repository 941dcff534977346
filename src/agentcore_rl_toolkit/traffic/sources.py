"""Sources of traffic: a file, or CloudWatch Logs."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError

PAGE = 10_000  # CloudWatch's largest result of a query
PAUSE_S = 0.5
_QUERY = "fields @timestamp, @message | filter ispresent(traceId) and ispresent(spanId) | sort @timestamp asc"
SPANS = "aws/spans"  # the group that all agents of an account share in split mode

Call = Callable[..., Any]  # (operation, **parameters) of the service `logs`


def read_file(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file: one JSON object or list, or one in each line. Raises: ConfigError that names the line."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    try:
        found = [json.loads(text)]
    except ValueError:
        found = []
        for number, line in enumerate(text.split("\n"), 1):  # texts have other line separators in them
            try:
                found += [json.loads(line)] if line.strip() else []
            except ValueError as e:
                raise ConfigError(f"{path}:{number} is not JSON: {e}") from e
    records = itertools.chain.from_iterable(each if isinstance(each, list) else [each] for each in found)
    return [record for record in records if isinstance(record, dict)]


def read_cloudwatch(call: Call, source: str, *, begin_s: int, end_s: int) -> Iterator[dict[str, Any]]:
    """Yield the spans and event records of an agent, or of a log group, between two times (seconds since 1970).

    Raises: RefusedError, with AWS's message; ConfigError for a query that does not end.
    """
    if ":runtime/" not in source:
        yield from _window(call, source, begin_s, end_s)
        return
    agent, _, endpoint = source.rsplit(":runtime/", 1)[1].partition("/runtime-endpoint/")
    yield from _window(call, f"/aws/bedrock-agentcore/runtimes/{agent}-{endpoint or 'DEFAULT'}", begin_s, end_s)
    for record in _window(call, SPANS, begin_s, end_s):
        if agent in json.dumps(record.get("resource", {})):
            yield record


def _window(call: Call, group: str, begin_s: int, end_s: int) -> Iterator[dict[str, Any]]:
    """Query a window of time. A window with too many records is halved."""
    query = {"logGroupName": group, "startTime": begin_s, "endTime": end_s, "queryString": _QUERY, "limit": PAGE}
    started = call("StartQuery", **query, absent=("ResourceNotFoundException",))
    if started is None:
        return
    while (found := call("GetQueryResults", queryId=started["queryId"]))["status"] in ("Scheduled", "Running"):
        time.sleep(PAUSE_S)  # CloudWatch ends a query after an hour
    if found["status"] != "Complete":
        raise ConfigError(f"the query of {group} ended as {found['status']}: choose a shorter time with --since")
    if len(found["results"]) >= PAGE:
        if begin_s >= end_s:
            raise ConfigError(f"{group} has more records in one second than CloudWatch returns, {PAGE:,}")
        middle = (begin_s + end_s) // 2
        yield from _window(call, group, begin_s, middle)
        yield from _window(call, group, middle + 1, end_s)
        return
    for row in found["results"]:
        text = next((each["value"] for each in row if each["field"] == "@message"), "")
        with contextlib.suppress(ValueError):
            record = json.loads(text)
            # Filtered again: other services write to the same groups.
            if isinstance(record, dict) and record.get("traceId") and record.get("spanId"):
                yield record
