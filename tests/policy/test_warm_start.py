"""The recipe of the shipped weights, and what they promise."""

from __future__ import annotations

import random
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.policy.model import WEIGHTS_DIR
from agentcore_rl_toolkit.policy.word_problems import problems

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "policy"))

import demonstrations
import make
import rollouts

from small_model import PolicyShape, assistant_spans, new_model, train

SMALL = make.WarmStartConfig(batch=4, shape=PolicyShape(hidden=32, layers=1, heads=2, feed_forward=64, context=512))
# None of these texts occurs in the warm start.
EDITS = [
    demonstrations.Surroundings(system_prompt=None, tools=[demonstrations.tool_spec()]),
    demonstrations.Surroundings(
        system_prompt="You are a math wizard. Compute everything with tools, then state the result.",
        tools=[demonstrations.tool_spec("do_math", argument="equation")],
        prefix="Solve: ",
        suffix="\nOutput the final answer, please.",
    ),
]


def test_the_assistants_words_are_weighted_and_nothing_else(hf: tuple[Any, Any]) -> None:
    tokenizer, around = hf[1], demonstrations.EXAMPLE_AGENT
    problem = problems("train", 1)[0]
    messages = demonstrations.demonstrate(problem, around, random.Random(1))
    ids = tokenizer.apply_chat_template(messages, tools=around.tools)["input_ids"]
    spans = assistant_spans(ids, tokenizer("<|im_start|>assistant\n")["input_ids"], tokenizer.eos_token_id)
    texts = [tokenizer.decode(ids[a:b], skip_special_tokens=True) for a, b in spans]
    assert len(texts) == len(problem.steps) + 1
    assert all(t.startswith("<tool_call>") for t in texts[:-1])
    assert texts[-1] == f"The answer is {problem.answer}."
    assert all(ids[b - 1] == tokenizer.eos_token_id for _, b in spans)


@pytest.mark.nightly
def test_the_recipe_makes_a_tokenizer_and_a_training_that_lowers_the_loss() -> None:
    template = (WEIGHTS_DIR / "chat_template.jinja").read_text()
    tokenizer = make.build_tokenizer(template, vocabulary=576, seed=0, conversations=200)
    batch = next(islice(make.batches(tokenizer, SMALL, expert_share=0.5, seed="x"), 1))
    assert batch.weights_BT.unique().tolist() == pytest.approx([0.0, 0.1, 1.0])
    model = new_model(tokenizer, SMALL.shape, seed=3)
    losses = train(model, make.batches(tokenizer, SMALL, expert_share=1.0, seed="smoke"), steps=25, peak_rate=4e-3)
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5])


@pytest.mark.system
def test_shipped_weights_start_between_a_tenth_and_a_third_also_for_an_edited_agent(hf: tuple[Any, Any]) -> None:
    start = rollouts.measure(*hf, n=120, seed=21)
    assert 0.10 <= start.reward <= 0.33
    assert 0.3 < start.tool_use < 0.95  # wide support: using the tool and not using it are both tried
    usual = rollouts.measure(*hf, n=40, seed=4, temperature=0.0).reward
    assert usual > 0.7
    for edit in EDITS:
        assert rollouts.measure(*hf, n=40, seed=4, temperature=0.0, surroundings=edit).reward > usual - 0.3
        assert 0.05 <= rollouts.measure(*hf, n=60, seed=4, surroundings=edit).reward <= 0.45
