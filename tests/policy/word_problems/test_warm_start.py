"""The recipe of the shipped weights, and what they promise."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest
import torch

from agentcore_rl_toolkit.policy.model import WEIGHTS_DIR, PolicyShape, new_model
from agentcore_rl_toolkit.policy.tokens import ChatTokenizer
from agentcore_rl_toolkit.policy.word_problems.demonstrations import (
    EXAMPLE_AGENT,
    SYSTEM_PROMPT,
    Surroundings,
    demonstrate,
    tool_spec,
    varied_surroundings,
)
from agentcore_rl_toolkit.policy.word_problems.problems import problems, reward
from agentcore_rl_toolkit.policy.word_problems.rollouts import measure
from agentcore_rl_toolkit.policy.word_problems.warm_start import (
    WarmStartConfig,
    assistant_spans,
    batches,
    build_tokenizer,
    train,
)

SMALL = WarmStartConfig(batch=4, shape=PolicyShape(hidden=32, layers=1, heads=2, feed_forward=64, context=512))


def test_expert_demonstrations_earn_the_reward_and_sloppy_ones_rarely() -> None:
    rng = random.Random(0)
    tasks = problems("train", 400)
    expert = [reward(demonstrate(p, varied_surroundings(rng), rng)[-1]["content"], p.answer) for p in tasks]
    sloppy = [reward(demonstrate(p, EXAMPLE_AGENT, rng, expert_share=0.0)[-1]["content"], p.answer) for p in tasks]
    assert sum(expert) == len(tasks)
    assert sum(sloppy) / len(tasks) < 0.05


def test_the_assistants_words_are_weighted_and_nothing_else(tokenizer: ChatTokenizer) -> None:
    problem = problems("train", 1)[0]
    messages = demonstrate(problem, EXAMPLE_AGENT, random.Random(1))
    ids = tokenizer.encode_chat(messages, tools=EXAMPLE_AGENT.tools, add_generation_prompt=False)
    spans = assistant_spans(ids, tokenizer.encode("<|im_start|>assistant\n"), tokenizer.end_id)
    texts = [tokenizer.decode(ids[a:b]) for a, b in spans]
    assert len(texts) == len(problem.steps) + 1
    assert all(t.startswith("<tool_call>") for t in texts[:-1])
    assert texts[-1] == f"The answer is {problem.answer}."
    assert all(ids[b - 1] == tokenizer.end_id for _, b in spans)


def test_the_tokenizer_is_made_again_the_same() -> None:
    template = (WEIGHTS_DIR / "chat_template.jinja").read_text()
    one, other = (build_tokenizer(template, vocabulary=576, seed=0, conversations=200) for _ in range(2))
    assert one.tokenizer.to_str() == other.tokenizer.to_str()


def test_batches_repeat_with_their_seed(tokenizer: ChatTokenizer) -> None:
    a, b = (list(islice(batches(tokenizer, SMALL, expert_share=0.5, seed="x"), 3)) for _ in range(2))
    for one, other in zip(a, b, strict=True):
        assert torch.equal(one.ids_BT, other.ids_BT)
        assert torch.equal(one.weights_BT, other.weights_BT)
        assert one.weights_BT.unique().tolist() == pytest.approx([0.0, 0.1, 1.0])


def test_a_short_training_lowers_the_loss_and_repeats_with_its_seed(tokenizer: ChatTokenizer) -> None:
    runs = []
    for _ in range(2):
        model = new_model(tokenizer, SMALL.shape, seed=3)
        stream = batches(tokenizer, SMALL, expert_share=1.0, seed="smoke")
        runs.append(train(model, stream, steps=25, peak_rate=4e-3))
    assert runs[0] == pytest.approx(runs[1], rel=1e-4)
    assert sum(runs[0][-5:]) < 0.85 * sum(runs[0][:5])


def test_shipped_weights_start_between_a_tenth_and_a_third(hf: tuple[Any, Any], tokenizer: ChatTokenizer) -> None:
    start = measure(hf[0], tokenizer, n=200, seed=21)
    assert 0.10 <= start.reward <= 0.33
    assert 0.3 < start.tool_use < 0.95  # wide support: using the tool and not using it are both tried


# None of these texts occurs in the warm start.
EDITS = {
    "system prompt left out": Surroundings(system_prompt=None, tools=[tool_spec()]),
    "system prompt reworded": Surroundings(
        system_prompt="You are a math wizard. Compute everything with tools, then state the result.",
        tools=[tool_spec()],
    ),
    "tool reworded": Surroundings(
        system_prompt=SYSTEM_PROMPT,
        tools=[tool_spec(description="Works out a formula of whole numbers.", argument_description="e.g. 12*3")],
    ),
    "tool renamed": Surroundings(system_prompt=SYSTEM_PROMPT, tools=[tool_spec("do_math", argument="equation")]),
    "text around the problem": Surroundings(
        system_prompt=SYSTEM_PROMPT, tools=[tool_spec()], prefix="Solve: ", suffix="\nOutput the final answer, please."
    ),
}


@pytest.fixture(scope="module")
def usual_reward(hf: tuple[Any, Any], tokenizer: ChatTokenizer) -> float:
    return measure(hf[0], tokenizer, n=50, seed=4, temperature=0.0).reward


@pytest.mark.parametrize("edit", sorted(EDITS))
def test_a_small_edit_of_the_agent_does_not_throw_the_policy_off(
    hf: tuple[Any, Any], tokenizer: ChatTokenizer, usual_reward: float, edit: str
) -> None:
    likeliest = measure(hf[0], tokenizer, n=50, seed=4, temperature=0.0, surroundings=EDITS[edit])
    assert usual_reward > 0.7
    assert likeliest.reward > usual_reward - 0.3
    sampled = measure(hf[0], tokenizer, n=100, seed=4, surroundings=EDITS[edit])
    assert 0.07 <= sampled.reward <= 0.4
