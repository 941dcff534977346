"""`evaluate.py` for code that runs in an event loop: the same options, the same table."""

from __future__ import annotations

import asyncio
import time

from evaluate import batch_options, client_of, finish, options, rows_of


async def main() -> None:
    given = options()
    rows = rows_of(given)
    began_s = time.monotonic()
    with client_of(given) as client:
        batch = client.run_batch_async([row.payload for row in rows], **batch_options(given, rows))
        items = [item async for item in batch]
    finish(given, items, time.monotonic() - began_s)


if __name__ == "__main__":
    asyncio.run(main())
