"""CPU that the S3 endpoint spends per request, its listings, its start and its memory.

Workload: the server as its own process (`agentcore-rl s3 serve`), obstore as the client over one keep-alive pool, 1 KB objects.
CPU is user + system time of the server process alone, so a busy machine changes the wall times and not these.

Run: python benchmarks/s3_endpoint.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import obstore
import psutil
from obstore.store import S3Store


async def each(n: int, one: Callable[[int], Awaitable[Any]], at_once: int = 32) -> None:
    gate = asyncio.Semaphore(at_once)

    async def guarded(i: int) -> None:
        async with gate:
            await one(i)

    await asyncio.gather(*(guarded(i) for i in range(n)))


def start(directory: Path, *options: str) -> tuple[subprocess.Popen[bytes], str, float]:
    ready = directory.with_suffix(".ready")
    ready.unlink(missing_ok=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "s3", "serve", "--dir", str(directory)]
    process = subprocess.Popen(
        [*command, "--bucket", "bench", "--ready-file", str(ready), *options], stdout=subprocess.DEVNULL
    )
    while not ready.exists():
        time.sleep(0.005)
    return process, json.loads(ready.read_text())["url"], time.monotonic() - began


def store_at(url: str) -> S3Store:
    return S3Store(
        "bench",
        endpoint=url,
        region="us-east-1",
        access_key_id="bench",
        secret_access_key="bench-secret",
        client_options={"allow_http": True},
    )


def report(name: str, process: psutil.Process, n: int, work: Callable[[], Any]) -> None:
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    work()
    wall, cpu = time.monotonic() - began, sum(process.cpu_times()[:2]) - before
    print(f"| {name:20} | {n:6} | {cpu / n * 1000:8.3f} | {n / wall:8.0f} |")


def measure(label: str, options: list[str], directory: Path, n: int) -> None:
    server, url, _ = start(directory, *options)
    process, store, body = psutil.Process(server.pid), store_at(url), b"x" * 1024

    def key(i: int) -> str:
        return f"exp/{i:06}.json"

    async def put(i: int) -> None:
        await obstore.put_async(store, key(i), body, use_multipart=False)

    async def get(i: int) -> None:
        await (await obstore.get_async(store, key(i))).bytes_async()

    print(f"\n{label}\n| operation            |      n | CPU ms/op |    ops/s |\n|---|---|---|---|")
    report("PUT 1 KB, new", process, n, lambda: asyncio.run(each(n, put)))
    report("PUT 1 KB, replacing", process, n, lambda: asyncio.run(each(n, put)))
    report("HEAD", process, n, lambda: asyncio.run(each(n, lambda i: obstore.head_async(store, key(i)))))
    report("GET 1 KB", process, n, lambda: asyncio.run(each(n, get)))
    rounds = 10
    report(
        "LIST 1,000 keys",
        process,
        rounds * n // 1000,
        lambda: [obstore.list(store, "exp/").collect() for _ in range(rounds)],
    )
    big = b"y" * (64 * 2**20)
    report("PUT 64 MB", process, 1, lambda: obstore.put(store, "big", big, use_multipart=False))
    report("GET 64 MB", process, 1, lambda: bytes(obstore.get(store, "big").bytes()))
    print(f"memory after all this: {process.memory_info().rss / 2**20:.0f} MB")
    server.terminate()
    server.wait()
    server, _, seconds = start(directory, *options)
    print(f"start over {n + 1} objects: {seconds:.2f} s")
    server.terminate()
    server.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    n = 1_000 if parser.parse_args().quick else 5_000
    with tempfile.TemporaryDirectory() as scratch:
        measure(
            "signatures verified", ["--access-key", "bench", "--secret-key", "bench-secret"], Path(scratch) / "a", n
        )
        measure("open", [], Path(scratch) / "b", n)


if __name__ == "__main__":
    main()
