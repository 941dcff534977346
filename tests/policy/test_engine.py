"""The computing thread: joining, leaving, waiting, changing weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from agentcore_rl_toolkit.errors import PolicyError
from agentcore_rl_toolkit.policy.batch import Generation
from agentcore_rl_toolkit.policy.engine import Engine
from agentcore_rl_toolkit.policy.sampling import SamplingParams

LONG = SamplingParams(max_tokens=900, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.from_directory(max_batch=2, seed=1) as running:
        yield running


def begin(engine: Engine, params: SamplingParams, **options: Any) -> tuple[Generation, threading.Event]:
    done = threading.Event()
    generation = Generation(prompt_ids=[5, 6, 7], params=params, listener=lambda _: done.set(), **options)
    engine.submit([generation])
    return generation, done


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "not empty"),
        ([576], "from 0 to 575"),
        ([-1], "from 0 to 575"),
        ([5] * 1024, "maximum context length"),
    ],
)
def test_what_the_model_cannot_sample_is_refused_as_a_whole(engine: Engine, ids: list[int], message: str) -> None:
    good = Generation(prompt_ids=[5], params=LONG)
    with pytest.raises(PolicyError, match=message):
        engine.submit([good, Generation(prompt_ids=ids, params=SamplingParams())])
    assert engine.idle


def test_a_cancelled_completion_ends_early_wherever_it_is(engine: Engine) -> None:
    running = [begin(engine, LONG) for _ in range(2)]  # as many as there is place for
    waiting, waiting_done = begin(engine, LONG)
    engine.cancel(waiting)
    for generation, _ in running:
        engine.cancel(generation)
    assert all(done.wait(30) for _, done in running)
    assert waiting_done.wait(30)
    assert {generation.finish_reason for generation, _ in running} == {"cancelled"}
    assert (waiting.finish_reason, waiting.token_ids) == ("cancelled", [])


def test_weights_change_under_a_running_completion(engine: Engine, hf: tuple[Any, Any]) -> None:
    generation, done = begin(engine, LONG)
    while not generation.token_ids:
        time.sleep(0.001)
    state = dict(hf[0].state_dict())
    assert engine.update_weights(state).result(30) == 1
    assert engine.update_weights(state, 7).result(30) == 7
    assert done.wait(30)
    assert (generation.weight_version_first, generation.weight_version_last) == (0, 7)
    with pytest.raises(PolicyError, match="lack"):
        engine.update_weights({}).result(30)
    assert engine.weight_version == 7


def test_a_failing_step_ends_its_requests_and_not_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = engine._batch.decoder.forward

    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine._batch.decoder, "forward", broken)
    generation, done = begin(engine, LONG)
    assert done.wait(30)
    assert (generation.finish_reason, generation.error) == ("error", "RuntimeError: out of luck")
    monkeypatch.setattr(engine._batch.decoder, "forward", forward)
    assert len(engine.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


def test_a_listener_is_called_at_the_first_token_then_every_few_and_at_the_end(engine: Engine) -> None:
    seen, done = list[int](), threading.Event()

    def listen(generation: Generation) -> None:
        seen.append(len(generation.token_ids))
        if generation.finish_reason is not None:
            done.set()

    params = SamplingParams(max_tokens=20, ignore_eos=True)
    engine.submit([Generation(prompt_ids=[0, 575], params=params, listener=listen, notify_every=8)])
    assert done.wait(30)
    assert seen == [1, 8, 16, 20]


def test_weights_that_overflow_are_told_and_not_sampled_from(engine: Engine, hf: tuple[Any, Any]) -> None:
    state = {name: tensor.clone() for name, tensor in hf[0].state_dict().items()}
    state["model.norm.weight"] *= 1e36
    state["model.embed_tokens.weight"] *= 1e4
    engine.update_weights(state).result(30)
    (generation,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
    assert generation.finish_reason == "error"
    assert "not finite" in str(generation.error)
    assert generation.logprobs == []


def test_closing_ends_what_is_left_and_refuses_more() -> None:
    engine = Engine.from_directory(max_batch=1).start()
    first, first_done = begin(engine, LONG)
    second, second_done = begin(engine, LONG)
    engine.close()
    assert first_done.is_set()
    assert second_done.is_set()
    assert second.finish_reason == "cancelled"
    assert first.finish_reason in ("cancelled", "length")
    with pytest.raises(PolicyError, match="shutting down"):
        engine.submit([Generation(prompt_ids=[1], params=LONG)])
    with pytest.raises(PolicyError, match="shutting down"):
        engine.update_weights({}).result(30)
