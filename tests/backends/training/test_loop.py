"""The loop with recorded episodes and a training client that only counts."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collection.collect import collect_async
from agentcore_rl_toolkit.backends.collection.groups import CollectedRollout, Group, GroupRequest
from agentcore_rl_toolkit.backends.training.batch import Datum
from agentcore_rl_toolkit.backends.training.client import Adam, Loss, Passed
from agentcore_rl_toolkit.backends.training.loop import probe_of, row_at, train, update
from agentcore_rl_toolkit.backends.training.metrics import group_metrics
from agentcore_rl_toolkit.backends.training.service_settings import ServiceTrainingConfig
from agentcore_rl_toolkit.backends.training.settings import LoopSettings, Services, State
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.errors import CaptureError, ConfigError, RolloutError
from examples.loading import load

from ..recorded import Episode, Replay, recorded_episodes

STEP_METRICS = load(Path(__file__).parents[3] / "scripts" / "metrics_page.py").STEP_METRICS
ADAM = Adam(learning_rate=1e-3, beta1=0.9, beta2=0.95, grad_clip_norm=0.0)
PER_GROUP = 8


@dataclass
class ScriptedClient:
    """Remembers what it was asked, and when its results were awaited. Its logprobs differ from the sampler's by ``off``."""

    service = "scripted"
    max_logprob_gap: float | None = 1e-3
    penalizes = False
    off: float = 0.0
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def forward_backward(self, data: Sequence[Datum], loss: Loss, tokens: float) -> Awaitable[Passed]:
        self.calls.append(("forward_backward", data, loss, tokens))
        logprobs = [[lp + self.off for lp in datum.logprobs] for datum in data]
        return self._result(Passed(metrics={"loss": 1.5}, logprobs=logprobs))

    def step(self, adam: Adam) -> Awaitable[Any]:
        self.calls.append(("step", adam))
        return self._result({"grad_norm": 0.5})

    async def publish(self, version: int, gateway: Any, probe: Any) -> None:
        self.calls.append(("publish", version))

    async def save(self, steps: int) -> str:
        self.calls.append(("save", steps))
        return f"state/{steps}"

    async def close(self, status: str) -> None: ...

    async def _result(self, result: Any) -> Any:
        self.calls.append(("await",))
        return result

    def names(self) -> list[str]:
        return [c[0] for c in self.calls]

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [c[1:] for c in self.calls if c[0] == name]


def settings(**more: Any) -> LoopSettings:
    return LoopSettings(**{"steps": 2, "groups": 4, "rollouts": PER_GROUP, "learning_rate": 1e-3, **more})


def trained_as(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes as rollouts of the training's inputs."""
    return [replace(e, input_id=f"train/{k // PER_GROUP:05d}") for k, e in enumerate(episodes)]


async def run(
    episodes: Sequence[Episode],
    how: LoopSettings,
    folder: Path,
    *,
    held_out: Sequence[dict[str, Any]] = (),
    resumed: State | None = None,
    client: ScriptedClient | None = None,
    gateway: dict[str, Any] | None = None,
) -> tuple[ScriptedClient, list[tuple[str, dict[str, Any]]], Replay]:
    replay, training = Replay(episodes), client or ScriptedClient()
    vars(replay.gateway).update(gateway or {})
    events: list[tuple[str, dict[str, Any]]] = []
    services: Any = Services(client=replay.client, gateway=replay.gateway, run_dir=folder)  # type: ignore[arg-type]
    rows = [{"prompt": str(k)} for k in range(3)]
    observe = lambda event, facts: events.append((event, facts))  # noqa: E731
    async with asyncio.timeout(60):
        assert await train(services, training, how, rows, held_out, observe, resumed=resumed) == how.steps
    return training, events, replay


def of(events: list[tuple[str, dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    return [facts for event, facts in events if event == name]


async def test_each_step_updates_and_publishes_new_weights(tmp_path: Path) -> None:
    loss = Loss(name="ppo", options={"clip_high_threshold": 1.3})
    how = settings(clip_high=0.3, minibatches=2, schedule="linear", warmup_steps=2)
    client, events, _ = await run(trained_as(recorded_episodes()), how, tmp_path)
    assert [adam.learning_rate for [adam] in client.of("step")] == pytest.approx([1e-3 / 3] * 4)
    update = ["forward_backward", "step", "await", "await"]  # both requests are sent before either is awaited
    step = [*update, *update, "publish"]
    assert client.names() == ["publish", *step, *step]
    assert client.of("publish") == [(0,), (1,), (2,)]
    assert all(call[1] == loss for call in client.of("forward_backward"))
    calls_of = (client.of("forward_backward")[:2], client.of("forward_backward")[2:])
    for facts, calls in zip(of(events, "step"), calls_of, strict=True):
        assert (facts["loss"], facts["grad_norm"], facts["learning_rate"]) == (1.5, 0.5, pytest.approx(1e-3 / 3))
        assert facts["too_long"] == 0
        assert {tokens for *_, tokens in calls} == {facts["usable_tokens"] / 2}, "every token of a step weighs the same"
        assert sum(datum.trained_tokens for data, *_ in calls for datum in data) == facts["gradient_tokens"]


async def test_every_number_of_a_step_and_of_an_evaluation_has_a_formula(tmp_path: Path) -> None:
    episodes = recorded_episodes()
    good = next(e for e in episodes if e.failure is None and e.record)
    held = [replace(good, input_id=f"{when}/0000") for when in ("before", "after")]
    _, events, _ = await run([*trained_as(episodes), *held], settings(), tmp_path, held_out=[{}])
    named = {metric.name: metric.of for metrics in STEP_METRICS.values() for metric in metrics}
    for event, extra in (("step", {"step"}), ("evaluated", {"when", "version"})):
        numbers = set(of(events, event)[-1]) - extra
        assert numbers <= {name for name, where in named.items() if where in (event, "both")}
        optional = {"reward_by_source", "kl_start", "kl_teacher", "peak_memory_gb", "judge"}
        assert {name for name, where in named.items() if where in (event, "both")} - numbers <= optional


@pytest.mark.parametrize(
    ("schedule", "warmup", "rates"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("linear", 1, [0.5, 0.75, 0.5, 0.25]),
        ("cosine", 0, [1, 0.05 + 0.95 * 0.853553, 0.525, 0.05 + 0.95 * 0.146447]),
    ],
)
def test_the_learning_rate_follows_its_schedule(schedule: Any, warmup: int, rates: list[float]) -> None:
    how = settings(schedule=schedule, warmup_steps=warmup)
    assert [how.optimizer.at(step, 4).learning_rate / 1e-3 for step in range(4)] == pytest.approx(rates, abs=1e-6)
    assert settings(schedule="cosine").optimizer.at(999, 1000).learning_rate >= 0.05e-3


def test_groups_are_counted_by_what_they_could_teach() -> None:
    def group(name: str, source: str, *rewards: float) -> Group:
        rollouts = [
            CollectedRollout(session_id=f"{name}{i}", input_id=name, index=i, outcome=Outcome.OK, reward=reward)
            for i, reward in enumerate(rewards)
        ]
        request = GroupRequest(input_id=name, payload={"data_source": source})
        return Group(input_id=name, rollouts=rollouts, request=request)

    found = group_metrics([group("a", "easy", 1, 1), group("b", "hard", 0, 0), group("c", "hard", 0, 1)])
    assert found["groups_all_solved"] == found["groups_all_failed"] == pytest.approx(1 / 3)
    assert found["reward_spread_within"] == pytest.approx(0.5 / 3)
    assert found["reward_by_source"] == {"easy": 1, "hard": 0.25}
    assert group_metrics([])["groups_all_failed"] is None


@pytest.mark.parametrize(
    ("metrics", "used"),
    [
        (5, None),
        ({"tool_calls": None}, None),
        ({"tool_calls": "3"}, None),
        ({"tool_calls": 2}, True),
        ({"tool_calls": 0}, False),
    ],
)
def test_an_agents_metrics_may_be_anything(metrics: Any, used: bool | None) -> None:
    record = {"rewards": 1.0, "metrics": metrics}
    rollout = CollectedRollout(session_id="s", input_id="i", index=0, outcome=Outcome.OK, reward=1.0, record=record)
    assert group_metrics([Group(input_id="i", rollouts=[rollout], request=GroupRequest(input_id="i", payload={}))])[
        "tool_use"
    ] == (None if used is None else float(used))


async def test_held_out_rows_are_run_before_between_and_after_with_the_weights_of_then(tmp_path: Path) -> None:
    episodes = recorded_episodes()
    good = next(e for e in episodes if e.failure is None and e.record)
    held = [replace(good, input_id=f"{when}/0000") for when in ("before", "step-1", "after")]
    limits = {"max_tokens": 9, "stop": ["!"]}
    how = settings(eval_every=1, sampling_params=limits)
    _, events, replay = await run([*trained_as(episodes), *held], how, tmp_path, held_out=[{}])
    found = of(events, "evaluated")
    assert [(e["when"], e["version"], e["scored"]) for e in found] == [
        ("before", 0, 1),
        ("step-1", 1, 1),
        ("after", 2, 1),
    ]
    begun = [(e["phase"], e["total"]) for e in of(events, "rollouts_started")]
    per_step = sum(e["rollouts"] for e in of(events, "step")) // 2
    training = [("training", 2 * per_step), ("training", per_step)]  # those that are left
    assert begun == [("before", 1), training[0], ("step-1", 1), training[1], ("after", 1)]
    sampled: dict[str, list[Any]] = {"before": [], "step-1": [], "after": [], "train": []}
    for payload in replay.invoked:
        rollout = payload["_rollout"]
        sampled[re.split("/", rollout["input_id"])[0]].append(rollout["sampling_params"])
    whole = {"temperature": 1.0, "top_p": 1.0, **limits}
    assert all(params == whole for params in sampled.pop("train"))
    assert all(params == [limits] for params in sampled.values())  # the agent's own otherwise


async def test_every_third_step_is_saved_and_evaluated_and_the_last(tmp_path: Path) -> None:
    episodes = recorded_episodes()
    good = next(e for e in episodes if e.failure is None and e.record)
    held = [replace(good, input_id=f"{when}/0000") for when in ("before", "step-3", "after")]
    how = settings(steps=4, groups=1, checkpoint_every=3, eval_every=3)
    client, events, _ = await run([*trained_as(episodes), *held], how, tmp_path, held_out=[{}])
    assert client.of("save") == [(3,), (4,)]
    assert [e["version"] for e in of(events, "evaluated")] == [0, 3, 4]
    started = [(e["phase"], e["total"]) for e in of(events, "rollouts_started")]
    assert started == [("before", 1), ("training", 32), ("step-3", 1), ("training", 8), ("after", 1)]


async def test_rollouts_above_the_limit_are_left_out_and_counted(tmp_path: Path) -> None:
    episodes = trained_as(recorded_episodes())
    _, whole, _ = await run(episodes, settings(), tmp_path)
    client, events, _ = await run(episodes, settings(max_tokens=2), tmp_path)
    assert not client.of("forward_backward")
    client, some, _ = await run(episodes, settings(max_tokens=60, steps=1), tmp_path)
    [(data, _, tokens)] = client.of("forward_backward")
    assert of(some, "step")[0]["too_long"] > 0
    assert sum(datum.trained_tokens for datum in data) <= tokens == of(some, "step")[0]["usable_tokens"]
    usable = [r for group in of(some, "collected")[0]["groups"] for r in group.usable]
    lengths = [[len(s.token_ids) for s in r.trajectory.sequences] for r in usable]
    assert any(min(found) <= 60 < max(found) for found in lengths), "an episode with a short and a long sequence"
    assert {len(datum.tokens) + 1 for datum in data} <= {n for found in lengths if max(found) <= 60 for n in found}
    with pytest.raises(RolloutError, match="longer than max_tokens 2"):
        await run(episodes, settings(max_tokens=2, max_empty_steps=2), tmp_path)
    for facts, all_of_them in zip(of(events, "step"), of(whole, "step"), strict=True):
        assert 0 < facts["too_long"] <= all_of_them["sequences"]
        assert facts["gradient_tokens"] == 0 < all_of_them["gradient_tokens"]


@pytest.mark.parametrize(
    ("every", "done", "rollouts"), [(0, 0, 0), (0, 2, 2 + 64), (1, 1, 4 + 32), (1, 2, 6 + 64), (2, 3, 4 + 96)]
)
async def test_a_resumed_run_counts_the_rollouts_of_its_steps_and_evaluations(
    tmp_path: Path, every: int, done: int, rollouts: int
) -> None:
    resumed = State(steps=done, state="s", stream={"next": 4 * done}) if done else None
    how = settings(steps=4, eval_every=every)
    _, events, _ = await run(trained_as(recorded_episodes()), how, tmp_path, held_out=[{}, {}], resumed=resumed)
    assert of(events, "begins") == [{"steps_done": done, "rollouts_done": rollouts}]
    assert {"phase": "training", "total": 32 * (4 - done)} in of(events, "rollouts_started")


async def test_a_run_is_not_continued_to_fewer_steps_than_it_has_done(tmp_path: Path) -> None:
    """Its weights would be evaluated, and returned, under the version of the earlier step."""
    client = ScriptedClient()
    done = State(steps=3, state="state/3", stream={})
    with pytest.raises(ConfigError, match="has done 3 steps, which is more than `steps` 2"):
        await run(trained_as(recorded_episodes()), settings(steps=2), tmp_path, resumed=done, client=client)
    assert client.calls == []


async def test_a_rollout_above_the_limit_does_not_count_in_its_group(tmp_path: Path) -> None:
    """The others are compared with each other, as in TRL, verl and slime."""
    episodes = [e for e in recorded_episodes() if e.kind == "single"][:2]
    turns = [replace(episodes[0].turns[0], prompt_ids=list(range(500)))]
    rewards = [1.0, 0.0, 0.5]
    group = [replace(episodes[0], input_id="train/00000", record={"rewards": r, "status_code": 200}) for r in rewards]
    group.append(replace(group[0], turns=turns, record={"rewards": 9.0, "status_code": 200}))
    longest = len(turns[0].prompt_ids) + len(turns[0].completion_ids)
    how = settings(steps=1, groups=1, rollouts=4, estimator="dr_grpo", max_tokens=longest - 1)
    client, events, _ = await run(group, how, tmp_path)
    [(data, _, tokens)] = client.of("forward_backward")
    assert sorted({A for datum in data for A, m in zip(datum.advantages, datum.mask, strict=True) if m}) == [-0.5, 0.5]
    [facts] = of(events, "step")
    assert (facts["too_long"], facts["sequences"], facts["usable"]) == (1, 4, 3)
    assert sum(facts["staleness"].values()) == 3
    assert tokens == facts["usable_tokens"]
    client, events, _ = await run(group, how.replace(max_tokens=longest), tmp_path)
    [(data, *_)] = client.of("forward_backward")
    assert (of(events, "step")[0]["too_long"], max(len(datum.tokens) + 1 for datum in data)) == (0, longest)


async def test_groups_without_spread_are_replaced_by_further_places_of_the_data(tmp_path: Path) -> None:
    single = next(e for e in recorded_episodes() if e.kind == "single")
    rewards = [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]  # of the places 0, 1 and 2
    episodes = [
        replace(single, input_id=f"train/{k // 2:05d}", record={"rewards": reward, "status_code": 200})
        for k, reward in enumerate(rewards)
    ]
    how = settings(groups=1, rollouts=2, replace_up_to=2.0)
    _, events, replay = await run(episodes, how, tmp_path)
    # Replaced groups count in the reward: without the inputs that are always solved, it would never reach 1.
    names = ("groups_replaced", "rollouts", "usable", "reward", "sampled_tokens", "usable_tokens")
    tokens = len(single.turns[0].completion_ids)
    steps = of(events, "step")
    assert [[facts[name] for name in names] for facts in steps] == [
        [1, 4, 2, 0.75, 4 * tokens, 2 * tokens],
        [0, 2, 2, 0.5, 2 * tokens, 2 * tokens],
    ]
    assert all(facts["gradient_tokens"] == 2 * tokens for facts in steps)
    assert len(replay.invoked) == 6


@pytest.mark.parametrize(
    ("steps", "equal", "trained"),
    [
        (2, 2, [[3, 4]]),  # as in the run that was stopped: 4 is in the place of 2
        (2, None, [[2, 3]]),  # now 2 has spread
        (3, 2, [[3, 4], [5, 6]]),
    ],
)
async def test_a_resumed_run_starts_a_replacement_only_if_a_group_is_replaced_again(
    tmp_path: Path, steps: int, equal: int | None, trained: list[list[int]]
) -> None:
    single = next(e for e in recorded_episodes() if e.kind == "single")
    episodes = [
        replace(single, input_id=f"train/{place:05d}", record={"rewards": reward, "status_code": 200})
        for place in range(2, 8)
        for reward in (0.0, float(place != equal))
    ]
    state = State(steps=1, state="state/1", stream={"next": 5, "in_flight": [2, 3, 4], "replaced": 0})
    how = settings(steps=steps, groups=2, rollouts=2, max_staleness=1, replace_up_to=2.0)
    _, events, replay = await run(episodes, how, tmp_path, resumed=state)
    taken = [[group.input_id for group in facts["groups"]] for facts in of(events, "collected")]
    assert taken == [[f"train/{place:05d}" for place in batch] for batch in trained]
    assert len(replay.invoked) == 2 * (sum(map(len, trained)) + (equal is not None))


async def test_a_run_with_groups_in_flight_is_continued_to_fewer_steps(tmp_path: Path) -> None:
    """They are of steps that the run now does without."""
    state = State(steps=1, state="state/1", stream={"next": 6, "in_flight": [2, 3, 4, 5], "replaced": 0})
    episodes = [e for e in trained_as(recorded_episodes()) if e.input_id >= "train/00002"]
    _, events, _ = await run(episodes, settings(groups=2, max_staleness=1), tmp_path, resumed=state)
    [facts] = of(events, "collected")
    assert [group.input_id for group in facts["groups"]] == ["train/00002", "train/00003"]


@pytest.mark.parametrize("staleness", [0, 1])
async def test_the_rate_of_sampling_counts_the_time_in_which_rollouts_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """The clock goes on by a second when it is read, by ten in a publish, and by a hundred in a checkpoint."""
    client, reads = ScriptedClient(), itertools.count()

    def monotonic() -> float:
        return next(reads) + 10.0 * len(client.of("publish")) + 100.0 * len(client.of("save"))

    monkeypatch.setattr("agentcore_rl_toolkit.backends.training.loop.time", SimpleNamespace(monotonic=monotonic))
    how = settings(steps=3, max_staleness=staleness, checkpoint_every=2)
    _, events, _ = await run(trained_as(recorded_episodes(96)), how, tmp_path, client=client)
    steps = of(events, "step")
    assert [(facts["rollout_s"], facts["train_s"], facts["waiting"]) for facts in steps] == [(1, 11, 1 / 12)] * 3
    ran_s = [facts["sampled_tokens"] / facts["sampled_tokens_per_s"] for facts in steps]
    trained_s = 11 if staleness else 0
    assert ran_s == pytest.approx([1 + trained_s, 1 + trained_s, 101 + trained_s], abs=2), "the last with a checkpoint"


async def test_a_resumed_run_continues_after_its_checkpoint(tmp_path: Path) -> None:
    episodes = trained_as(recorded_episodes())
    client, _, _ = await run(episodes, settings(checkpoint_every=2), tmp_path)
    assert client.of("save") == [(2,)]
    state = State.read(tmp_path)
    assert state is not None
    assert (state.steps, state.state, state.stream["next"]) == (2, "state/2", 8)
    more = [replace(e, input_id=f"train/{8 + k // PER_GROUP:05d}") for k, e in enumerate(recorded_episodes(32))]
    client, events, _ = await run(more, settings(steps=3), tmp_path, resumed=state)
    assert [facts["step"] for facts in of(events, "step")] == [2]
    assert client.of("publish") == [(2,), (3,)]
    (tmp_path / "state.json").write_text(json.dumps({"steps": 1}))
    with pytest.raises(ConfigError, match="is not the state of a run"):
        State.read(tmp_path)


async def test_the_numbers_of_a_step_are_written_before_its_checkpoint(tmp_path: Path) -> None:
    """A kill in between repeats the step. The other way round, its numbers would be missing."""
    saved_at: list[int] = []

    class Client(ScriptedClient):
        async def save(self, steps: int) -> str:
            saved_at.append(len(seen))
            return "state"

    seen: list[dict[str, Any]] = []
    replay = Replay(trained_as(recorded_episodes()))
    services: Any = Services(client=replay.client, gateway=replay.gateway, run_dir=tmp_path)  # type: ignore[arg-type]
    how = settings(checkpoint_every=1)
    await train(services, Client(), how, [{}], [], lambda event, facts: seen.append(facts) if event == "step" else None)
    assert saved_at == [1, 2]


async def test_groups_that_end_during_a_checkpoint_are_repeated_by_a_resumed_run(tmp_path: Path) -> None:
    """They were replaced, because their rewards are equal, and their rollouts will be deleted from the run's folder."""
    single = next(e for e in recorded_episodes() if e.kind == "single")
    rewards = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]  # of the places 0, 1 and 2
    episodes = [
        replace(single, input_id=f"train/{k // 2:05d}", record={"rewards": reward, "status_code": 200})
        for k, reward in enumerate(rewards)
    ]
    streams: list[Any] = []
    rollouts, ended = 0, asyncio.Event()  # place 1 was replaced by place 2, whose rollouts have ended

    class Client(ScriptedClient):
        async def save(self, steps: int) -> str:
            if steps == 1:
                await ended.wait()
            return "state"

    replay = Replay(episodes)
    services: Any = Services(client=replay.client, gateway=replay.gateway, run_dir=tmp_path)  # type: ignore[arg-type]
    how = settings(groups=1, rollouts=2, replace_up_to=2.0, checkpoint_every=1)

    def observe(event: str, facts: dict[str, Any]) -> None:
        nonlocal rollouts
        rollouts += event == "rollout"
        if rollouts == len(episodes):
            ended.set()
        if event == "step" and facts["step"] == 1:
            state = State.read(tmp_path)
            assert state is not None
            streams.append(state.stream)
            assert facts["groups_replaced"] == 1

    async with asyncio.timeout(60):
        await train(services, Client(), how, [{}], [], observe)
    assert streams == [{"next": 2, "in_flight": [1], "replaced": 0}]


async def test_data_without_a_row_is_refused(tmp_path: Path) -> None:
    services: Any = Services(client=None, gateway=None, run_dir=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no rows to train on"):
        await train(services, ScriptedClient(), settings(), [], [], lambda event, facts: None)


async def test_calls_are_held_around_a_publish_and_a_pause_that_an_interrupt_left_is_over(tmp_path: Path) -> None:
    client = ScriptedClient()

    async def pause_async() -> dict[str, Any]:
        client.calls.append(("pause",))
        return {"paused": True, "in_flight": 2 - client.names().count("pause")}  # the first one waits in vain

    async def resume_async() -> None:
        client.calls.append(("resume",))

    gateway = {"pause_async": pause_async, "resume_async": resume_async}
    how = settings(steps=1, hold_calls=True)
    await run(trained_as(recorded_episodes(32)), how, tmp_path, client=client, gateway=gateway)
    names = [name for name in client.names() if name in ("pause", "resume", "publish")]
    assert names == ["resume", "publish", "pause", "pause", "publish", "resume"]

    async def interrupted() -> dict[str, Any]:
        raise asyncio.CancelledError

    gateway["pause_async"], client.calls = interrupted, []
    with pytest.raises(asyncio.CancelledError):
        await run(trained_as(recorded_episodes(32)), how, tmp_path, client=client, gateway=gateway)
    assert client.names().count("resume") == 2, "calls go on, for other commands that use the gateway"


async def test_tokens_of_another_model_end_the_run(tmp_path: Path) -> None:
    fresh = trained_as(recorded_episodes(versions=(0, 0)))
    with pytest.raises(CaptureError, match=r"logprobs of engine and trainer differ by 0\.5"):
        await run(fresh, settings(), tmp_path, client=ScriptedClient(off=0.5))
    _, events, _ = await run(fresh, settings(steps=1), tmp_path, client=ScriptedClient(off=0.5, max_logprob_gap=None))
    assert of(events, "step")[0]["logprob_gap"] == pytest.approx(0.5)


async def test_steps_without_usable_rollouts_end_the_run(tmp_path: Path) -> None:
    lost = [e for e in recorded_episodes(640) if e.kind == "lost"]
    how = settings(steps=3, groups=1, rollouts=2, max_empty_steps=2)
    with pytest.raises(RolloutError, match=r"none of the first 2 rollouts can be used.*died without a record"):
        await run([replace(e, input_id=f"train/{k // 2:05d}") for k, e in enumerate(lost[:6])], how, tmp_path)
    good = [e for e in recorded_episodes() if e.kind == "single"][:2]
    mixed = [replace(e, input_id=f"train/{k // 2:05d}") for k, e in enumerate([*good, *lost[:4]])]
    with pytest.raises(RolloutError, match=r"no rollout of the last 2 steps can be used.*died without a record"):
        await run(mixed, how, tmp_path)
    later = [replace(e, input_id=f"train/{1 + k // 2:05d}") for k, e in enumerate(lost[:4])]
    resumed = State(steps=1, state="state/1", stream={"next": 1})
    with pytest.raises(
        RolloutError, match="no rollout of the last 2 steps can be used"
    ):  # its first step could be used
        await run(later, how, tmp_path, resumed=resumed)


def test_a_probe_is_the_prompt_before_the_first_sampled_token_of_a_usable_rollout() -> None:
    def rollout(*sequences: tuple[list[int], list[int]]) -> Any:
        found = [SimpleNamespace(token_ids=ids, loss_mask=mask) for ids, mask in sequences]
        return SimpleNamespace(trajectory=SimpleNamespace(sequences=found) if sequences else None)

    def groups(*rollouts: Any) -> Any:
        return [SimpleNamespace(usable=[]), SimpleNamespace(usable=list(rollouts))]

    assert probe_of(groups(rollout(), rollout(([1, 2], [0, 0]), ([3, 4, 5, 6], [0, 0, 1, 1])))) == [3, 4]
    assert probe_of(groups(rollout(([1, 2], [0, 0])))) is None


async def test_the_trainers_numbers_are_kept_with_the_updates_since_the_sampling() -> None:
    episodes = trained_as(recorded_episodes(8, versions=(3, 3)))
    replay = Replay(episodes)
    request = GroupRequest(input_id="train/00000", payload={}, n=8)
    group = (await collect_async([request], client=replay.client, gateway=replay.gateway))[0]
    kept: list[dict[str, Any]] = []

    class Client(ScriptedClient):
        def forward_backward(self, data: Sequence[Datum], loss: Loss, tokens: float) -> Awaitable[Passed]:
            self.calls.append(("forward_backward", data, loss, tokens))
            values = [[-1.0] * len(datum.tokens) for datum in data]
            return self._result(Passed(metrics={}, logprobs=values, entropies=values if len(kept) == 0 else None))

    recording: Any = SimpleNamespace(
        trained=lambda *_, **facts: kept.append(facts), masked=lambda _: None, advantages=lambda *_, **__: None
    )
    facts = await update(Client(max_logprob_gap=None), [group], settings(minibatches=2), 5, recording)
    assert sorted({each["updates"] for each in kept}) == [4, 5], "two steps of two minibatches, and those of this step"
    assert all(each["logprobs"][0] is None and -1.0 in each["logprobs"] for each in kept)
    assert [each["entropies"] for each in kept if each["updates"] == 5] == [None] * sum(e["updates"] == 5 for e in kept)
    assert all(each["entropies"] == each["logprobs"] for each in kept if each["updates"] == 4)
    assert facts["sequences"] >= len(kept) > 1


def test_every_place_has_its_row_and_each_epoch_another_order() -> None:
    rows = [{"idx": i} for i in range(7)]
    epochs = [[row_at(7 * epoch + k, rows, seed=0)["idx"] for k in range(7)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_clips_are_options_of_the_loss() -> None:
    assert settings(dual_clip=1.5).update.token_loss.options == {"dual_clip": 1.5}
    clip = settings(clip_low=0.2, clip_high=0.25, loss_options={"dual_clip": 3.0}).update.token_loss
    assert clip.options == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.25, "dual_clip": 3.0}


@pytest.mark.parametrize(
    "bad",
    [
        {"learning_rate": 0.0},
        {"max_empty_steps": 0},
        {"checkpoint_every": -1},
        {"sampling_params": {"temperature": 0.7}},
        {"tps_limit": -1},
        {"gateway_port": 99999},
        {"gateway_context_tokens": 0},
        {"rollouts": 1},
        {"rollout_timeout_s": 0.0},
        {"beta1": -0.5},
        {"beta2": 1.0},
        {"replace_up_to": 0.9},
        {"dual_clip": 1.0},
        {"dual_clip": 3.0, "loss": "cispo"},
        {"dual_clip": 3.0},  # of a service the loss is importance_sampling
        {"clip_low": 0.1},
        {"clip_high": 0.1, "loss": "importance_sampling"},
        {"loss": "cross_entropy"},
    ],
    ids=str,
)
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    here = {"exp_id": "e", "agent_runtime_arn": "a", "s3_bucket": "b", "base_model": "m"}
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ServiceTrainingConfig(**{**here, "model_dir": Path("m"), "data_path": Path("d"), **bad})
