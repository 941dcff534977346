"""Places for rollouts on several event loops, as slime's fully asynchronous rollouts and evaluations have them."""

from __future__ import annotations

import asyncio
import threading

from agentcore_rl_toolkit.backends.slime.rollout import Places


def test_places_are_waited_for_on_several_event_loops_at_once() -> None:
    places = Places(2)
    most = {"a": 0, "b": 0}
    both = threading.Barrier(2, timeout=10)

    async def work(name: str) -> None:
        inside = 0

        async def one() -> None:
            nonlocal inside
            async with places:
                inside += 1
                most[name] = max(most[name], inside)
                await asyncio.sleep(0.005)
                inside -= 1

        both.wait()
        await asyncio.gather(*(one() for _ in range(10)))

    threads = [threading.Thread(target=lambda name=name: asyncio.run(work(name))) for name in most]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == {"a": 2, "b": 2}
