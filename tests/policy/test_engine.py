"""The computing thread: joining, leaving, waiting, changing weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from agentcore_rl_toolkit.errors import PolicyError
from agentcore_rl_toolkit.policy.batch import Generation
from agentcore_rl_toolkit.policy.engine import Engine, QueueFullError
from agentcore_rl_toolkit.policy.sampling import SamplingParams
from agentcore_rl_toolkit.policy.tokens import ChatTokenizer

LONG = SamplingParams(max_tokens=900, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.from_directory(max_batch=2, max_queue=3, seed=1) as running:
        yield running


def begin(engine: Engine, params: SamplingParams, **options: Any) -> tuple[Generation, threading.Event]:
    done = threading.Event()
    generation = Generation(prompt_ids=[5, 6, 7], params=params, listener=lambda _: done.set(), **options)
    engine.submit([generation])
    return generation, done


def test_prompts_are_completed_in_any_number(engine: Engine, tokenizer: ChatTokenizer) -> None:
    prompt = tokenizer.encode("<|im_start|>assistant\n")
    done = engine.generate([prompt] * 3, SamplingParams(max_tokens=5, ignore_eos=True))
    assert [len(g.token_ids) for g in done] == [5, 5, 5]
    assert all(g.finish_reason == "length" and len(g.logprobs) == 5 for g in done)
    assert engine.stats()["generated_tokens"] == 15


def test_too_many_waiting_are_refused_as_a_whole(engine: Engine) -> None:
    engine.pause().result(30)
    engine.submit([Generation(prompt_ids=[1], params=LONG) for _ in range(3)])
    with pytest.raises(QueueFullError, match="limit is 3") as caught:
        engine.submit([Generation(prompt_ids=[1], params=LONG)])
    assert caught.value.retry_after_s > 0
    assert engine.stats()["waiting"] == 3


def test_pause_stops_tokens_and_resume_goes_on(engine: Engine) -> None:
    generation, done = begin(engine, LONG)
    while not generation.token_ids:
        time.sleep(0.001)
    engine.pause().result(30)
    assert engine.paused
    held = len(generation.token_ids)
    time.sleep(0.1)
    assert len(generation.token_ids) == held < 900
    engine.resume().result(30)
    assert done.wait(30)
    assert len(generation.token_ids) == 900


def test_a_cancelled_completion_ends_early_wherever_it_is(engine: Engine) -> None:
    running, running_done = begin(engine, LONG)
    while not running.token_ids:
        time.sleep(0.001)
    engine.cancel(running)
    assert running_done.wait(30)
    assert (running.finish_reason, len(running.token_ids) < 900) == ("cancelled", True)
    engine.pause().result(30)
    waiting, waiting_done = begin(engine, LONG)
    engine.cancel(waiting)
    assert waiting_done.wait(30)
    assert (waiting.finish_reason, waiting.token_ids) == ("cancelled", [])


def test_a_deadline_holds_while_running_waiting_and_paused(engine: Engine) -> None:
    late, late_done = begin(engine, LONG, deadline=time.monotonic() - 1)
    assert late_done.wait(30)
    assert late.finish_reason == "timeout"
    running, running_done = begin(engine, LONG)
    while not running.token_ids:
        time.sleep(0.001)
    engine.pause().result(30)
    running.deadline = time.monotonic() + 0.05
    queued, queued_done = begin(engine, LONG, deadline=time.monotonic() + 0.05)
    assert running_done.wait(30)
    assert queued_done.wait(30)
    assert (running.finish_reason, queued.finish_reason) == ("timeout", "timeout")


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
