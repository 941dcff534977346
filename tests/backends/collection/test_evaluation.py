"""Evaluations beside the training: one at a time, each after its weights; errors end the run, an ended run ends them."""

import asyncio
import threading

import pytest

from agentcore_rl_toolkit.backends.collection.evaluation import EvaluationBeside


async def test_each_waits_for_the_one_before_and_follows_its_weights() -> None:
    happened: list[str] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def evaluate(version: int) -> None:
        happened.append(f"evaluation of {version} begins")
        begun.set()
        await go_on.wait()
        happened.append(f"evaluation of {version} ends")

    def publish(version: int) -> None:
        assert threading.current_thread() is not threading.main_thread()
        happened.append(f"weights {version}")

    async with EvaluationBeside(evaluate) as beside:
        await beside.start(1, lambda: publish(1))
        assert beside.version == 1
        second = asyncio.create_task(beside.start(2, lambda: publish(2)))
        await begun.wait()
        assert not second.done()
        go_on.set()
        await second
        assert beside.version == 2
    assert happened == [f"{what} {v}{end}" for v in (1, 2) for what, end in WHAT]


WHAT = [("weights", ""), ("evaluation of", " begins"), ("evaluation of", " ends")]


async def test_what_an_evaluation_raises_ends_the_run() -> None:
    async def evaluate(version: int) -> None:
        raise ValueError(f"version {version}")

    async def run(*versions: int) -> None:
        async with EvaluationBeside(evaluate) as beside:
            for version in versions:
                await beside.start(version, lambda: None)

    with pytest.raises(ValueError, match="version 1"):
        await run(1, 2)
    with pytest.raises(ValueError, match="version 3"):
        await run(3)


async def test_an_error_of_the_run_cancels_what_runs() -> None:
    ended: list[str] = []

    async def evaluate(version: int) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def run() -> None:
        async with EvaluationBeside(evaluate) as beside:
            await beside.start(1, lambda: None)
            await asyncio.sleep(0)
            raise KeyError

    with pytest.raises(KeyError):
        await run()
    assert ended == ["cancelled"]
