"""`evaluate.py` for code that runs in an event loop: the same options, the same numbers."""

from __future__ import annotations

import asyncio
import time

from evaluate import client_of, finish, options

from agentcore_rl_toolkit.client.evaluation import read_rows


async def main() -> None:
    given = options()
    rows = read_rows(given.data)[: given.limit]
    began_s = time.monotonic()
    with client_of(given) as client:
        payloads, names = [row.payload for row in rows], [row.input_id for row in rows]
        batch = client.run_batch_async(payloads, given.concurrency, given.timeout, input_ids=names, progress=True)
        items = [item async for item in batch]
    finish(given, items, time.monotonic() - began_s)


if __name__ == "__main__":
    asyncio.run(main())
