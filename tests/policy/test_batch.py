"""Many sequences at once must be what each is alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from agentcore_rl_toolkit.policy.batch import BLOCK, Batch, Generation, PrefixCache
from agentcore_rl_toolkit.policy.decoder import Decoder
from agentcore_rl_toolkit.policy.loading import load_decoder
from agentcore_rl_toolkit.policy.model import WEIGHTS_DIR
from agentcore_rl_toolkit.policy.sampling import SamplingParams


def finish(batch: Batch, waiting: list[Generation], *, together: int) -> None:
    """Run all, feeding new ones in between steps."""
    queue = list(reversed(waiting))
    while queue or batch.running:
        while queue and batch.has_room(queue[-1]) and len(batch.running) < together:
            batch.add(queue.pop())
        batch.step()


def close(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) and all(abs(x - y) < 2e-5 for x, y in zip(a, b, strict=True))


def test_batched_equals_single(prompts: list[list[int]], decoder: Decoder) -> None:
    rng = random.Random(0)
    texts = [*prompts, *prompts[:4]]  # again, so that whole prompts come from the prefix cache
    settings = [
        SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 30), ignore_eos=rng.random() < 0.5)
        if rng.random() < 0.5
        else SamplingParams(seed=k, top_p=0.9, max_tokens=rng.randint(5, 30))
        for k in range(len(texts))
    ]
    alone = [Generation(prompt_ids=ids, params=p) for ids, p in zip(texts, settings, strict=True)]
    for generation in alone:
        finish(Batch(decoder, seed=1, cache_blocks=0), [generation], together=1)
    for cache_blocks in (24, 2048):
        batch = Batch(decoder, seed=1, cache_blocks=cache_blocks)
        many = [Generation(prompt_ids=ids, params=p) for ids, p in zip(texts, settings, strict=True)]
        finish(batch, many, together=9)
        for one, other in zip(alone, many, strict=True):
            assert other.token_ids == one.token_ids
            assert close(other.logprobs, one.logprobs)
            assert other.finish_reason == one.finish_reason
    assert many[-1].cached_tokens >= len(texts[-1]) - 16


def test_prompts_that_are_read_in_parts_are_read_alike(
    prompts: list[list[int]], decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=0)
    whole, parts = ([Generation(prompt_ids=ids[k:], params=params) for k, ids in enumerate(prompts)] for _ in range(2))
    finish(Batch(decoder, cache_blocks=0), whole, together=12)
    monkeypatch.setattr("agentcore_rl_toolkit.policy.batch._TOKENS_OF_PART", 0)
    for name in ("_LEAST_PART", "_LOGITS_AT_ONCE"):
        monkeypatch.setattr(f"agentcore_rl_toolkit.policy.batch.{name}", 7)
    finish(Batch(decoder, cache_blocks=0), parts, together=12)
    for one, other in zip(whole, parts, strict=True):
        assert other.token_ids == one.token_ids
        assert close(other.logprobs + other.prompt_logprobs, one.logprobs + one.prompt_logprobs)


def test_logprobs_equal_a_full_forward_also_when_a_turn_goes_on_from_the_last(
    prompts: list[list[int]], decoder: Decoder, hf: tuple[Any, Any]
) -> None:
    worst, batch = 0.0, Batch(decoder, seed=5)
    histories = [list(prompt) for prompt in prompts[:6]]
    for _ in range(3):
        turns = [Generation(prompt_ids=list(ids), params=SamplingParams(max_tokens=20)) for ids in histories]
        finish(batch, turns, together=16)
        for ids, turn in zip(histories, turns, strict=True):
            ids += turn.token_ids
            with torch.no_grad():
                full = torch.log_softmax(hf[0](input_ids=torch.tensor([ids])).logits[0], -1)
            first = len(turn.prompt_ids)
            expected = [full[first + k - 1, token].item() for k, token in enumerate(turn.token_ids)]
            worst = max(worst, *(abs(a - b) for a, b in zip(turn.logprobs, expected, strict=True)))
    assert [turn.cached_tokens for turn in turns] == [(len(turn.prompt_ids) - 1) // BLOCK * BLOCK for turn in turns]
    assert 0.0 < worst < 1e-4


def test_a_context_that_is_full_ends_with_length(prompts: list[list[int]], decoder: Decoder) -> None:
    context = decoder.shape.context
    ids = (prompts[0] * 40)[: context - 3]
    generation = Generation(prompt_ids=ids, params=SamplingParams(max_tokens=500, ignore_eos=True))
    finish(Batch(decoder, seed=0), [generation], together=1)
    assert (len(generation.token_ids), generation.finish_reason) == (3, "length")


def test_stop_strings_and_stop_tokens_end_a_completion(decoder: Decoder, hf: tuple[Any, Any]) -> None:
    tokenizer = Tokenizer.from_file(str(WEIGHTS_DIR / "tokenizer.json"))
    prompt = tokenizer.encode("<|im_start|>assistant\nThe answer is").ids
    free = Generation(prompt_ids=prompt, params=SamplingParams(temperature=0.0, max_tokens=8))
    finish(Batch(decoder), [free], together=1)
    stop = tokenizer.decode(free.token_ids)[2:4]
    by_text = Generation(prompt_ids=prompt, params=SamplingParams(temperature=0.0, max_tokens=8, stop=("zzz", stop)))
    by_token = Generation(
        prompt_ids=prompt, params=SamplingParams(temperature=0.0, stop_token_ids=(free.token_ids[1],))
    )
    finish(Batch(decoder, tokenizer), [by_text, by_token], together=2)
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", stop)
    assert by_text.token_ids == free.token_ids[: len(by_text.token_ids)]
    assert stop not in tokenizer.decode(by_text.token_ids[:-1])
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", free.token_ids[1])
    assert by_token.token_ids == free.token_ids[:2]
    wide = Generation(
        prompt, SamplingParams(stop=("😀😀",)), token_ids=tokenizer.encode("😀😀").ids
    )  # a token for each byte
    assert (len(wide.token_ids), Batch(decoder, tokenizer)._stop_in(wide)) == (8, "😀😀")


def test_new_weights_take_effect_between_steps_and_both_versions_are_told(
    prompts: list[list[int]], decoder: Decoder, hf: tuple[Any, Any]
) -> None:
    prompt = prompts[0]
    batch = Batch(decoder, version=3)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    spanning = Generation(prompt_ids=prompt, params=params)
    batch.add(spanning)
    for _ in range(5):
        batch.step()
    changed = {name: tensor.clone() for name, tensor in hf[0].state_dict().items()}
    changed["model.norm.weight"] *= -1
    batch.load(changed, 4)
    late = Generation(prompt_ids=prompt, params=params)
    batch.add(late)
    while batch.running:
        batch.step()
    assert (spanning.weight_version_first, spanning.weight_version_last) == (3, 4)
    assert (late.weight_version_first, late.weight_version_last) == (4, 4)
    assert late.cached_tokens == 0  # what was computed with the old weights is forgotten
    again = Generation(prompt_ids=prompt, params=params)
    batch.add(again)
    while batch.running:
        batch.step()
    assert again.cached_tokens > 0
    assert again.token_ids == late.token_ids
    assert again.token_ids != spanning.token_ids


def test_weights_that_change_before_a_prompt_is_read_are_used_for_all_of_it(
    prompts: list[list[int]], decoder: Decoder, hf: tuple[Any, Any]
) -> None:
    prompt = prompts[0]
    batch = Batch(decoder)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    finish(batch, [Generation(prompt_ids=prompt, params=params)], together=1)
    changed = {name: tensor * 1.1 for name, tensor in hf[0].state_dict().items()}
    waiting = Generation(prompt_ids=prompt, params=params)
    batch.add(waiting)
    assert waiting.cached_tokens > 0
    batch.load(changed, 1)
    while batch.running:
        batch.step()
    fresh = Generation(prompt_ids=prompt, params=params)
    finish(Batch(decoder, cache_blocks=0), [fresh], together=1)
    assert waiting.token_ids == fresh.token_ids
    assert close(waiting.logprobs, fresh.logprobs)


def test_cancelled_sequences_leave_and_the_others_are_untouched(prompts: list[list[int]], decoder: Decoder) -> None:
    texts = prompts[:6]
    params = SamplingParams(temperature=0.0, max_tokens=15, ignore_eos=True)
    alone = [Generation(prompt_ids=ids, params=params) for ids in texts]
    for generation in alone:
        finish(Batch(decoder), [generation], together=1)
    batch = Batch(decoder)
    many = [Generation(prompt_ids=ids, params=params) for ids in texts]
    for generation in many[:5]:
        batch.add(generation)
    batch.step()
    many[0].cancelled = True
    many[2].cancelled = True
    batch.add(many[5])
    many[5].cancelled = True  # before its prompt was read
    gone = batch.step()
    assert {id(g) for g in gone} == {id(many[0]), id(many[2]), id(many[5])}
    assert [many[k].finish_reason for k in (0, 2, 5)] == ["cancelled"] * 3
    while batch.running:
        batch.step()
    for k in (1, 3, 4):
        assert many[k].token_ids == alone[k].token_ids
        assert close(many[k].logprobs, alone[k].logprobs)


def ended(batch: Batch, ids: list[int], **how: Any) -> Generation:
    """Complete one prompt in a batch where nothing else runs."""
    generation = Generation(prompt_ids=ids, params=SamplingParams(ignore_eos=True, **how))
    finish(batch, [generation], together=1)
    return generation


def test_the_cache_holds_what_runs_and_not_the_most_rows_times_the_longest(
    prompts: list[list[int]], decoder: Decoder
) -> None:
    decoder.cache_tokens = 16 * 128
    batch, params = Batch(decoder, seed=0), SamplingParams(max_tokens=20, ignore_eos=True)
    short = [ids[:80] for ids in prompts[:16]]
    long = (prompts[0] * 40)[:900]
    alone = ended(Batch(load_decoder(rows=1)), long, max_tokens=3, temperature=0.0)
    for _ in range(2):  # many short, one long, many short again
        finish(batch, [Generation(prompt_ids=ids, params=params) for ids in short], together=16)
        assert decoder.keys[0].shape[0] * decoder.keys[0].shape[2] <= decoder.cache_tokens
        one = ended(batch, long, max_tokens=3, temperature=0.0)
        assert decoder.keys[0].shape[0] * decoder.keys[0].shape[2] <= decoder.cache_tokens
        assert one.token_ids == alone.token_ids
        assert close(one.logprobs, alone.logprobs)


def test_a_cache_that_shrinks_keeps_the_rows_that_run(prompts: list[list[int]], decoder: Decoder) -> None:
    decoder.cache_tokens = 1600
    batch, how = Batch(decoder, seed=0), {"temperature": 0.0, "ignore_eos": True}
    long = Generation(prompt_ids=(prompts[0] * 40)[:600], params=SamplingParams(max_tokens=4, **how))  # type: ignore[arg-type]
    short = [Generation(prompt_ids=prompts[1], params=SamplingParams(max_tokens=60, **how))]  # type: ignore[arg-type]
    short += [Generation(prompt_ids=ids, params=SamplingParams(max_tokens=30, **how)) for ids in prompts[2:12]]  # type: ignore[arg-type]
    batch.add(long)
    batch.add(short[0])  # runs on while the long one ends and the cache gets more and shorter rows
    while long in batch.running:
        batch.step()
    finish(batch, short[1:], together=12)
    assert decoder.keys[0].shape[0] * decoder.keys[0].shape[2] <= decoder.cache_tokens
    alone = Batch(load_decoder(rows=1))
    for generation in (long, *short):
        one = ended(alone, generation.prompt_ids, max_tokens=generation.params.max_tokens, temperature=0.0)
        assert generation.token_ids == one.token_ids
        assert close(generation.logprobs, one.logprobs)


def test_a_prompt_from_the_cache_and_a_new_one_are_read_within_the_limit(
    prompts: list[list[int]], decoder: Decoder
) -> None:
    texts = [(ids * 40)[:600] for ids in prompts[:2]]
    reader = Batch(load_decoder(rows=1))
    alone = [ended(reader, ids, max_tokens=4, temperature=0.0) for ids in texts]
    decoder.cache_tokens = 2 * 604
    batch = Batch(decoder)
    ended(batch, texts[0], max_tokens=1)
    both = [Generation(prompt_ids=ids, params=one.params) for ids, one in zip(texts, alone, strict=True)]
    finish(batch, both, together=2)
    assert decoder.keys[0].shape[0] * decoder.keys[0].shape[2] <= decoder.cache_tokens
    assert both[0].cached_tokens > 500
    for one, other in zip(alone, both, strict=True):
        assert other.token_ids == one.token_ids
        assert close(other.logprobs, one.logprobs)


def test_weights_under_the_same_version_leave_no_prefix_of_the_old_ones(
    prompts: list[list[int]], decoder: Decoder, hf: tuple[Any, Any]
) -> None:
    old = {name: tensor.clone() for name, tensor in hf[0].state_dict().items()}
    new = {name: tensor * 1.02 for name, tensor in old.items()}
    batch = Batch(decoder, seed=0)
    batch.load(old, 3)
    batch.add(Generation(prompt_ids=prompts[0], params=SamplingParams(max_tokens=20, ignore_eos=True)))
    for _ in range(3):
        batch.step()
    batch.load(new, 3)  # another run's version 3
    while batch.running:
        batch.step()
    fresh = Batch(load_decoder(rows=1))
    fresh.load(new, 3)
    again, first = (ended(b, prompts[0], max_tokens=4, temperature=0.0) for b in (batch, fresh))
    assert close(again.logprobs, first.logprobs)


def test_the_keys_of_a_prompt_take_time_of_its_length() -> None:
    """Each block knows the one before it. Keys of whole prefixes took seconds for a prompt of 32,000 tokens."""
    sizes = {}
    for tokens in (1_600, 16_000):
        decoder = load_decoder(rows=1)
        decoder.shape = replace(decoder.shape, context=tokens)
        decoder.reserve(1, tokens)
        cache, ids = PrefixCache(decoder), list(range(tokens))
        cache.keep(ids, 0)
        assert cache.fill([*ids, 1], 0) == tokens
        sizes[tokens] = sum(len(ids) for _, ids in cache._blocks)
    assert sizes[16_000] == 10 * sizes[1_600]


def test_blocks_of_the_end_of_a_prompt_leave_the_cache_before_those_of_its_beginning() -> None:
    decoder = load_decoder(rows=1)
    decoder.reserve(1, 128)
    cache = PrefixCache(decoder, capacity=6)
    one, other = list(range(64)), list(range(100, 164))
    cache.keep(one, 0)
    cache.keep(other, 0)
    assert cache.fill([*other, 1], 0) == 64
    assert cache.fill([*one, 1], 0) == 32
