"""Much work at once leaves room for others, keeps its order and is all done."""

from __future__ import annotations

import asyncio
import itertools
import time

from agentcore_rl_toolkit.gateway.slices import SLICE_S, Slices


async def test_little_work_is_done_at_once() -> None:
    done: list[int] = []
    slices = Slices()
    slices.run(lambda: done.append(1))
    assert done == [1]


async def test_much_work_is_spread_over_turns_of_the_loop_in_order() -> None:
    slices, done, between = Slices(), list[int](), list[int]()

    def work(i: int) -> None:
        time.sleep(SLICE_S / 4)
        done.append(i)

    for i in range(60):
        slices.run(lambda i=i: work(i))  # type: ignore[misc]
    assert len(slices) >= 50
    while slices:
        between.append(len(done))
        await asyncio.sleep(0)
    assert done == list(range(60))
    assert len(between) >= 8
    assert max(b - a for a, b in itertools.pairwise(between)) <= 6
    slices.run(lambda: done.append(60))
    assert done[-1] == 60
