"""Compares the report with the report of a separate copy of the log, because the agent could change /app/access.log."""

import collections
import json
import pathlib
import re
import sys

LINE = re.compile(r'\S+ \S+ \S+ \[[^]]+\] "\S+ (\S+) HTTP/[\d.]+" (\d{3}) (\d+|-)')
rows = [LINE.fullmatch(row) for row in pathlib.Path("/tests/access.log").read_text().splitlines()]
rows = [row.groups() for row in rows if row]
paths = collections.Counter(path.partition("?")[0] for path, _, _ in rows)
expected = {
    "requests": len(rows),
    "by_status": dict(collections.Counter(status for _, status, _ in rows)),
    "bytes": sum(0 if size == "-" else int(size) for _, _, size in rows),
    "top_path": min(path for path, n in paths.items() if n == max(paths.values())),
}
try:
    found = json.loads(pathlib.Path("/app/report.json").read_text())
except (OSError, ValueError) as e:
    sys.exit(f"/app/report.json cannot be read: {e}")
if found != expected:
    sys.exit(f"expected {expected}, found {found}")
