"""Rollout clients side by side: ours and the published one, on the same runtime and the same S3 endpoint.

    python benchmarks/client.py [--quick] [--json FILE] [--only ours]

The published client (agentcore-rl-toolkit 0.2.0) is installed with uv into an environment of its own under `.venvs/`. Three
processes stand around the client under test: a scripted AgentCore data plane whose agents store their records when their payload
says so, moto's S3 server, and a counting proxy between the client and S3. Nothing is simulated in time: a rollout of 60 s takes
60 s.

Rows:
    detection    n rollouts of 5 to 60 s in flight: lag from the record being stored to the item being handed out (p50, p99, max),
                 and the client's requests to S3 per rollout
    collection   rollouts that finish at once, 25 requests/s allowed: seconds until the last item
    cold starts  invokes of a 3 s cold start, 25 requests/s allowed: seconds until the last one is accepted
    cpu          client CPU per rollout (ms), 64 at a time
    in flight    rollouts held by one process, and its resident memory (MB)
    listings     256 rollouts in flight, old records in their experiment (100,000): LIST requests per second
    clients      clients that are dropped after a rollout: descriptors and threads that are left of them
    batch        a batch of 100,000 inputs with a slow consumer: most inputs taken and not handed out yet, 64 at a time
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import http.server
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

ROOT = Path(__file__).resolve().parent.parent
PEER_VENV = ROOT / ".venvs" / "client-published"
PEER = "agentcore-rl-toolkit[rollout]==0.2.0"
BUCKET = "bench-results"
WIDTHS = (7, 7, 7, 15, 8, 7, 6, 7, 5, 5)
ENV = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-west-2",
    "AWS_DEFAULT_REGION": "us-west-2",
}


# ---------------------------------------------------------------- one measurement, in the environment of the client under test


def make_client(kind: str, exp_id: str, tps: float, **options: Any) -> Any:
    from agentcore_rl_toolkit import RolloutClient

    arn = os.environ["BENCH_ARN"]
    if kind == "published":
        return RolloutClient(arn, BUCKET, exp_id, tps_limit=tps, max_pool_connections=100)
    return RolloutClient(arn, BUCKET, exp_id, tps_limit=tps, **options)


def rows(n: int, low_s: float, high_s: float) -> list[dict[str, Any]]:
    """Durations spread evenly over the range, in an order that has nothing to do with them."""
    return [
        {"script": {"run_s": low_s + (high_s - low_s) * ((i * 0.618) % 1.0), "result": {"rewards": 1.0}}}
        for i in range(n)
    ]


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def session_of(item: Any) -> str:
    return str(item.result["result_key"]).rsplit("/", 1)[1].removesuffix(".json")


def detection(kind: str, exp_id: str, n: int, low_s: float, high_s: float) -> dict[str, Any]:
    client = make_client(kind, exp_id, 1000)
    seen: dict[str, float] = {}
    for item in client.run_batch(rows(n, low_s, high_s), max_concurrent_sessions=n, timeout=high_s + 240):
        at_s = time.monotonic()
        assert item.success, item.error
        seen[session_of(item)] = at_s
    with urllib.request.urlopen(os.environ["AWS_ENDPOINT_URL_BEDROCK_AGENTCORE"] + "/_local/records") as answer:
        stored = json.load(answer)
    lags = [at_s - stored[session_id] for session_id, at_s in seen.items()]
    return {"n": len(lags), "p50_s": percentile(lags, 0.5), "p99_s": percentile(lags, 0.99), "max_s": max(lags)}


def collection(kind: str, exp_id: str, n: int) -> dict[str, Any]:
    client = make_client(kind, exp_id, 25)
    began_s = time.monotonic()
    items = list(client.run_batch(rows(n, 0.0, 0.0), max_concurrent_sessions=n))
    assert all(item.success for item in items)
    return {"n": n, "seconds": time.monotonic() - began_s}


def cold_starts(kind: str, exp_id: str, n: int, cold_s: float) -> dict[str, Any]:
    client = make_client(kind, exp_id, 25)

    async def start_all() -> float:
        began_s = time.monotonic()
        await asyncio.gather(*(client.invoke_async({"script": {"cold_start_s": cold_s}}) for _ in range(n)))
        return time.monotonic() - began_s

    return {"n": n, "seconds": asyncio.run(start_all())}


def cpu(kind: str, exp_id: str, n: int) -> dict[str, Any]:
    client = make_client(kind, exp_id, 1000)
    list(client.run_batch(rows(8, 0.1, 0.1), max_concurrent_sessions=8))  # imports and connections are not counted
    before_s = cpu_s()
    items = list(client.run_batch(rows(n, 0.5, 2.0), max_concurrent_sessions=64))
    assert all(item.success for item in items)
    if hasattr(client, "flush"):
        client.flush()
    return {"n": n, "ms": 1e3 * (cpu_s() - before_s) / n}


def in_flight(kind: str, exp_id: str, n: int) -> dict[str, Any]:
    client = make_client(kind, exp_id, 2000)
    futures = [client.submit({"script": {"hang": True}}) for _ in range(n)]
    deadline_s = time.monotonic() + 240
    while sum(future.stage == "run" for future in futures) < n:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    time.sleep(2.0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    held = len(client.flights())
    os.write(1, (json.dumps({"n": held, "mb": pages * os.sysconf("SC_PAGE_SIZE") / 2**20}) + "\n").encode())
    os._exit(0)  # thousands of stops are not what is measured


class OldRecords(http.server.BaseHTTPRequestHandler):
    """An S3 endpoint whose bucket has this many records of an experiment, in pages of a thousand."""

    protocol_version = "HTTP/1.1"
    records = 0
    lists = 0

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        prefix, begin = query.get("prefix", [""])[0], int(query.get("continuation-token", ["0"])[0])
        whole = prefix.count("/") <= 1
        type(self).lists += 1
        numbers = range(begin, min(begin + 1000, self.records if whole else 0))
        row = "<Contents><Key>{}/old{}/s.json</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>9</Size></Contents>"
        found = "".join(row.format(prefix.strip("/"), n) for n in numbers)
        more = whole and begin + 1000 < self.records
        token = f"<NextContinuationToken>{begin + 1000}</NextContinuationToken>" if more else ""
        text = f"<ListBucketResult>{found}<IsTruncated>{str(more).lower()}</IsTruncated>{token}</ListBucketResult>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def listings(kind: str, exp_id: str, records: int, seconds: float) -> dict[str, Any]:
    OldRecords.records = records
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OldRecords) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ["AWS_ENDPOINT_URL_S3"] = f"http://127.0.0.1:{server.server_port}"
        client = make_client(kind, exp_id, 1000)
        futures = [client.submit({"script": {"hang": True, "heartbeat": False}}) for _ in range(256)]
        while sum(future.stage == "run" for future in futures) < len(futures):
            time.sleep(0.2)
        before, began_s = OldRecords.lists, time.monotonic()
        time.sleep(seconds)
        rate = (OldRecords.lists - before) / (time.monotonic() - began_s)
        os.write(1, (json.dumps({"n": 256, "rate": rate}) + "\n").encode())
        os._exit(0)  # the stops are not what is measured


def clients(kind: str, exp_id: str, n: int) -> dict[str, Any]:
    def open_now() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd")) + threading.active_count()

    make_client(kind, exp_id, 1000).invoke({"script": {}}).result(60)  # imports and the store's own threads
    time.sleep(3.0)
    before = open_now()
    for _ in range(n):
        make_client(kind, exp_id, 1000).invoke({"script": {}}).result(60)
    deadline_s = time.monotonic() + 30
    while open_now() > before and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return {"n": n, "left": max(0, open_now() - before)}


def batch(kind: str, exp_id: str, n: int, received: int) -> dict[str, Any]:
    taken = 0

    def inputs() -> Iterator[dict[str, Any]]:
        nonlocal taken
        for _ in range(n):
            taken += 1
            yield {"script": {"result": {"rewards": 1.0}}}

    client = make_client(kind, exp_id, 2000)
    most = 0
    running = iter(client.run_batch(inputs(), max_concurrent_sessions=64))
    for done in range(received):
        assert next(running).success
        most = max(most, taken - done)
        time.sleep(0.02)
    running.close()
    return {"n": n, "held": most}


def several(kind: str, exp_id: str, parts: list[list[Any]]) -> dict[str, Any]:
    """Measurements one after another in one process, which are not about requests to S3."""
    results = [MEASUREMENTS[what](kind, f"{exp_id}-{what}", **arguments) for what, arguments in parts]
    return {"parts": results}


MEASUREMENTS = {
    f.__name__: f for f in (detection, collection, cold_starts, cpu, in_flight, listings, clients, batch, several)
}


# ---------------------------------------------------------------- the world around it


def serve() -> None:
    """The scripted data plane, in a process of its own."""
    sys.path.append(str(ROOT / "tests"))
    from scripted_runtime import ScriptedRuntime

    with ScriptedRuntime() as runtime:
        print(json.dumps({"url": runtime.url, "arn": runtime.arn}), flush=True)
        sys.stdin.read()


class CountingProxy:
    """Forwards TCP and counts requests; a request without a body starts a segment of its own, which is what the client sends."""

    METHODS = (b"GET ", b"HEAD ", b"PUT ", b"POST ", b"DELETE ")

    def __init__(self, upstream: str) -> None:
        host, port = upstream.removeprefix("http://").rstrip("/").split(":")
        self._upstream = (host, int(port))
        self.count = 0
        self.port = 0
        ready = threading.Event()
        threading.Thread(target=self._run, args=(ready,), daemon=True).start()
        ready.wait()

    def _run(self, ready: threading.Event) -> None:
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024))
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        down, up = await asyncio.open_connection(*self._upstream)
        back = asyncio.ensure_future(self._pump(down, writer))
        try:
            while data := await reader.read(65536):
                self.count += data.startswith(self.METHODS)
                up.write(data)
        except ConnectionError:
            pass
        finally:
            up.close()
            await back

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
        except ConnectionError:
            pass
        writer.close()


class World:
    def __init__(self, runtime: dict[str, str], proxy: CountingProxy) -> None:
        self.runtime, self.proxy = runtime, proxy
        self._runs = 0

    def measure(self, kind: str, what: str, **arguments: Any) -> dict[str, Any]:
        """Run one measurement in a fresh process of the client's environment."""
        self._runs += 1
        python = PEER_VENV / "bin" / "python" if kind == "published" else Path(sys.executable)
        job = json.dumps({"kind": kind, "what": what, "exp_id": f"bench-{self._runs}", **arguments})
        environment = {
            **os.environ,
            **ENV,
            "BENCH_ARN": self.runtime["arn"],
            "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE": self.runtime["url"],
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{self.proxy.port}",
        }
        before = self.proxy.count
        command = [str(python), "-W", "ignore", str(Path(__file__).resolve()), "--job", job]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
        if done.returncode != 0:
            return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"}
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        result["s3_per_rollout"] = (self.proxy.count - before) / max(1, result.get("n", 1))
        return result


def peer_environment() -> None:
    """Make the environment of the published client, once."""
    if (PEER_VENV / ".ready").exists():
        return
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "-q", "--clear", "--python", sys.executable, str(PEER_VENV)], check=True)
    subprocess.run(
        [*uv, "pip", "install", "-q", "--python", str(PEER_VENV / "bin" / "python"), "--compile-bytecode", PEER],
        check=True,
    )
    (PEER_VENV / ".ready").touch()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextmanager
def world() -> Iterator[World]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    s3 = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    runtime = None
    try:
        deadline_s = time.monotonic() + 60
        while not _listens(port):
            assert s3.poll() is None, "the S3 server did not start"
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT"), timeout=10).close()
        runtime = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env={**os.environ, **ENV, "AWS_ENDPOINT_URL_S3": url},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert runtime.stdout is not None
        yield World(json.loads(runtime.stdout.readline()), CountingProxy(url))
    finally:
        for process in (runtime, s3):
            if process is not None:
                process.terminate()
                process.wait(timeout=30)


# ---------------------------------------------------------------- table and checks


def fmt(value: Any, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def show(row: dict[str, Any], table: list[dict[str, Any]]) -> None:
    """Print a row and keep it."""
    table.append(row)
    columns = (
        ("p50_s", 3),
        ("p99_s", 3),
        ("max_s", 2),
        ("s3_per_rollout", 1),
        ("seconds", 1),
        ("ms", 2),
        ("mb", 0),
        ("rate", 1),
    )
    columns += (("left", 0), ("held", 0))
    cells = [fmt(row.get(key), digits) for key, digits in columns]
    line = " ".join(cell.rjust(w) for cell, w in zip(cells, WIDTHS, strict=True))
    error = f"  {row['error']}" if "error" in row else ""
    print(f"{row['what']:12} {row['client']:14} {row.get('n', '-'):>5} {line}{error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute")
    parser.add_argument("--json", type=Path, help="write rows and checks here")
    parser.add_argument("--only", choices=["ours"], help="leave the published client out")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve()
    if options.job:
        job = json.loads(options.job)
        return print(json.dumps(MEASUREMENTS[job.pop("what")](**job)))

    peers = [] if options.only else ["published"]
    if peers:
        peer_environment()
    quick = options.quick
    sizes: list[tuple[int, float, float]] = [(24, 1.0, 3.0)] if quick else [(100, 5.0, 60.0), (1000, 5.0, 60.0)]
    jobs: list[tuple[str, str, dict[str, Any]]] = []
    for n, low_s, high_s in sizes:
        for kind in ("ours", *peers):
            jobs.append((kind, "detection", {"n": n, "low_s": low_s, "high_s": high_s}))
    n_collect, n_cold, cold_s, n_cpu, n_held = (30, 20, 1.0, 40, 300) if quick else (100, 100, 3.0, 300, 5000)
    parts = [["collection", {"n": n_collect}], ["cold_starts", {"n": n_cold, "cold_s": cold_s}], ["cpu", {"n": n_cpu}]]
    for kind in ("ours", *peers):
        jobs.append((kind, "several", {"parts": parts}))
    jobs.append(("ours", "in_flight", {"n": n_held}))
    jobs.append(("ours", "listings", {"records": 3_000 if quick else 100_000, "seconds": 5.0 if quick else 60.0}))
    jobs.append(("ours", "clients", {"n": 10 if quick else 100}))
    jobs.append(("ours", "batch", {"n": 100_000, "received": 100 if quick else 1000}))

    table: list[dict[str, Any]] = []
    with world() as around:
        heads = ("p50 s", "p99 s", "max s", "S3 req/rollout", "seconds", "CPU ms", "MB", "LIST/s", "left", "held")
        print(f"{'what':12} {'client':14} {'n':>5} " + " ".join(h.rjust(w) for h, w in zip(heads, WIDTHS, strict=True)))
        for kind, what, arguments in jobs:
            result = around.measure(kind, what, **arguments)
            if what != "several" or "error" in result:
                show({"what": what, "client": kind, **arguments, **result}, table)
                continue
            for (part, given), found in zip(arguments["parts"], result["parts"], strict=True):
                show({"what": part, "client": kind, **given, **found}, table)

    checks = check(table, n_collect, n_cold, cold_s, n_held)
    print()
    for one in checks:
        print(
            f"{'ok  ' if one['ok'] else 'FAIL'} {one['name']}: {fmt(one['value'], 3)} (target {fmt(one['target'], 2)})"
        )
    if options.json:
        options.json.write_text(json.dumps({"quick": quick, "rows": table, "checks": checks}, indent=2) + "\n")
    sys.exit(0 if all(one["ok"] for one in checks) else 1)


def check(table: list[dict[str, Any]], n_collect: int, n_cold: int, cold_s: float, n_held: int) -> list[dict[str, Any]]:
    """Our figures against what is promised. The pace alone (25/s after a burst of 5) gives the floor of the two times."""
    checks: list[dict[str, Any]] = []

    def add(name: str, row: dict[str, Any], key: str, target: float) -> None:
        value = row.get(key)
        checks.append({"name": name, "value": value, "target": target, "ok": value is not None and value <= target})

    for row in table:
        if row["client"] == "published":
            continue
        if row["what"] == "detection":
            add(f"lag p99, {row.get('n')} in flight", row, "p99_s", 1.5)
            add(f"S3 requests per rollout, {row.get('n')} in flight", row, "s3_per_rollout", 3.0)
        elif row["what"] == "collection":
            add("seconds to collect, against the pace plus one second", row, "seconds", (n_collect - 5) / 25 + 1.0)
        elif row["what"] == "cold_starts":
            add(
                "seconds of cold starts, against pace plus one cold start plus one second",
                row,
                "seconds",
                (n_cold - 5) / 25 + cold_s + 1.0,
            )
        elif row["what"] == "in_flight":
            add(f"MB with {n_held} in flight", row, "mb", 300.0)
        elif row["what"] == "listings":
            add(f"LIST requests per second with {row['records']} old records", row, "rate", 4.0)
        elif row["what"] == "clients":
            add(f"descriptors and threads left of {row['n']} dropped clients", row, "left", 0)
        elif row["what"] == "batch":
            add("inputs held by a batch of 64 at a time", row, "held", 2 * 64 + 1)
    return checks


if __name__ == "__main__":
    main()
