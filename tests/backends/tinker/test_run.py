"""A whole run against Tinker's wire format: the unmodified SDK, our gateway as its own process, real agents on the local
runtime, and behind the service the built-in policy, which really samples and really trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collection.collect import CollectConfig, Group
from agentcore_rl_toolkit.backends.collection.samples import to_samples
from agentcore_rl_toolkit.backends.tinker.config import TinkerRunConfig
from agentcore_rl_toolkit.backends.tinker.loop import StepResult, sdk
from agentcore_rl_toolkit.backends.tinker.proof import gap, proved
from agentcore_rl_toolkit.backends.tinker.run import STATE_FILE, batches, run_async
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.errors import ConfigError, WeightsError
from agentcore_rl_toolkit.gateway.capture.record import pack_logprobs
from agentcore_rl_toolkit.policy import WEIGHTS_DIR, load_policy
from agentcore_rl_toolkit.policy.finetuning import PolicyModel
from agentcore_rl_toolkit.policy.problems import problems
from agentcore_rl_toolkit.policy.tinker.service import TinkerServer
from agentcore_rl_toolkit.runs import Query, RunReader, TokenSequence, read_metrics

from ..test_end_to_end import serving

pytest.importorskip("tinker")

# The SDK asks for its settings over connections of their own, which it never closes.
sdk_sockets = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@dataclass(frozen=True)
class Place:
    server: TinkerServer
    config: TinkerRunConfig


class KeepingModel(PolicyModel):
    """`keeps` is a tensor that what is published for sampling has as it was in the first publish."""

    keeps: str | None = None
    first: str | None = None

    def publish(self, run: str, path: str) -> None:
        super().publish(run, path)
        self.first = self.first or path
        if self.keeps is not None:
            state = self._of(run).model.state_dict()
            tied = [name for name, tensor in state.items() if tensor.data_ptr() == state[self.keeps].data_ptr()]
            self._saved[path]["weights"] |= {name: self._saved[self.first]["weights"][name] for name in tied}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "local")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "local")
    records = tmp_path / "records"
    records.mkdir()
    rows = [
        {"idx": i, "prompt": p.prompt, "answer": p.answer, "fail_marker": str(records / f"{i}.failed")}
        for i, p in enumerate(problems("train", 8, seed=5))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows[1:]:
        Path(str(row["fail_marker"])).touch()  # only the first problem's first rollout fails
    agent = Path(__file__).parents[1] / "fails_once.py"
    model = KeepingModel()
    with contextlib.ExitStack() as stack:
        stack.callback(model.close)
        server = stack.enter_context(TinkerServer(model).running())
        served = ["runtime", "serve", "--agent", f"math={agent}", "--store", str(records)]
        runtime = stack.enter_context(serving("runtime", served, tmp_path))
        config = TinkerRunConfig(
            exp_id="run",
            agent_runtime_arn=runtime["agents"]["math"],
            s3_bucket=f"file://{records}",
            base_model=model.base_model,
            model_dir=WEIGHTS_DIR,
            data_path=tmp_path / "rows.jsonl",
            output_dir=tmp_path / "out",
            service_url=server.url,
            endpoint_url=runtime["url"],
            gateway_host="127.0.0.1",
            tps_limit=200,
            learning_rate=3e-4,
            estimator="dr_grpo",
            steps=1,
            groups_per_step=8,  # in so many some rewards differ: without that nothing is trained
            group_size=4,
            checkpoint_every=1,
            collect=CollectConfig(rollout_timeout_s=90, sampling_params={"temperature": 1.0, "max_tokens": 64}),
        )
        yield Place(server, config)


@pytest.mark.slow
@pytest.mark.timeout(600)
@sdk_sockets
def test_the_service_trains_exactly_what_it_sampled_and_a_second_run_goes_on(
    place: Place, is_what_the_docs_say: Callable[[Path, str], None]
) -> None:
    server, config = place.server, place.config
    steps: list[tuple[StepResult, list[Group]]] = []

    def keep(result: StepResult, groups: list[Group]) -> None:
        steps.append((result, groups))

    assert asyncio.run(run_async(config, on_step=keep)) == 1
    [(first, groups)] = steps
    outcomes = Counter(r.outcome for g in groups for r in g.rollouts)
    assert outcomes == {Outcome.OK: 31, Outcome.AGENT_ERROR: 1}
    assert first.trained
    check_tokens(server, groups)
    state = json.loads((config.output_dir / STATE_FILE).read_text())
    assert (state["steps"], state["weight_version"]) == (1, 1)
    assert state["state"] in server.model.paths

    sampled, trained = len(server.calls), len(server.updates)
    assert asyncio.run(run_async(dataclasses.replace(config, steps=2), on_step=keep)) >= 1
    second, groups = steps[1]
    assert second.step == 1
    # Its first rollouts come from the restored weights, under the version they had.
    versions = {
        t.weight_version_first for g in groups for r in g.usable if r.capture is not None for t in r.capture.turns
    }
    assert versions == {1}
    by_rollouts = [
        call for call in server.calls[sampled:] if "run-000002" not in call.path
    ]  # of those only the proof asks
    assert {call.path for call in by_rollouts} == {
        p for p in server.model.paths if "sampler_weights/run-000001" in p and p != first.sampler
    }
    check_tokens(server, groups, calls_from=sampled, updates_from=trained)
    assert [entry["step"] for entry in read_metrics(config.output_dir)] == [0, 1]
    is_what_the_docs_say(config.output_dir, "Tinker")
    with RunReader(config.output_dir) as run:
        steps_of = run.steps()
        assert [(s["phase"], s["step"]) for s in steps_of] == [("train", 0), ("train", 1)]
        assert 0 < steps_of[0]["gap_max"] < 1e-3  # the service's own logprobs beside the sampler's
        for row in run.rollouts(Query(phase="train", step=0)):
            if row["advantage"]:
                [sequence] = [TokenSequence.decoded(s) for s in (run.rollout(row["id"]) or {})["sequences"]]
                assert sequence.trainer_logprobs is not None
                known = [lp is not None for lp in sequence.trainer_logprobs]
                assert known == [bool(mask) for mask in sequence.mask]
    assert len(server.finished) == 4  # the trainer's session and the gateway's, of both runs


def check_tokens(server: TinkerServer, groups: list[Group], *, calls_from: int = 0, updates_from: int = 0) -> None:
    """What the service sampled is what was recorded; what was recorded is what it trained, shifted by one."""
    sampled = Counter(tuple(ids) for call in server.calls[calls_from:] for ids in call.completion_ids)
    turns = [t for g in groups for r in g.usable if r.capture is not None for t in r.capture.turns]
    assert turns
    recorded = Counter(tuple(t.completion_ids) for t in turns)
    assert recorded <= sampled
    expected = []
    for sample in to_samples(groups, estimator="dr_grpo"):
        if sample.advantage == 0.0:
            continue
        tokens = sample.token_ids
        old, advantages = [0.0] * (len(tokens) - 1), [0.0] * (len(tokens) - 1)
        for place, (mask, logprob) in enumerate(
            zip(sample.response_mask, sample.response_logprobs, strict=True), len(sample.prompt_ids)
        ):
            if mask:
                assert logprob is not None
                old[place - 1], advantages[place - 1] = logprob, sample.advantage
        expected.append((tokens[:-1], tokens[1:], pack_logprobs(old), pack_logprobs(advantages)))
    received = [
        (
            d.tokens,
            d.inputs["target_tokens"],
            pack_logprobs(d.inputs["logprobs"]),
            pack_logprobs(d.inputs["advantages"]),
        )
        for update in server.updates[updates_from:]
        for d in update.data
    ]
    assert received == expected  # logprobs and advantages bit for bit, as the 32-bit numbers of the wire
    assert {update.loss_fn for update in server.updates} <= {"importance_sampling"}


def test_every_step_has_its_inputs_wherever_a_run_begins(tmp_path: Path) -> None:
    rows = [{"idx": i, "prompt": str(i)} for i in range(7)]
    config = TinkerRunConfig(
        exp_id="e",
        agent_runtime_arn="a",
        s3_bucket="bucket",
        base_model="m",
        model_dir=tmp_path,
        data_path=tmp_path / "d.jsonl",
        steps=6,
        groups_per_step=3,
    )
    whole = list(batches(config, rows))
    assert [len(step) for step in whole] == [3] * 6
    assert list(batches(config, rows, first_step=4)) == whole[4:]
    first_epoch = [request.payload["idx"] for step in whole[:2] for request in step]
    assert len(set(first_epoch)) == 6
    with pytest.raises(ConfigError, match="groups_per_step"):
        list(batches(config, rows[:2]))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"agent_runtime_arn": "garbage"}, "agent_runtime_arn"),
        ({"exp_id": "../x"}, "exp_id"),
        ({"tps_limit": -1}, "tps_limit"),
        ({"gateway_port": 99999}, "gateway_port"),
        ({"context_tokens": 0}, "context_tokens"),
        ({"collect": CollectConfig(require_reward=False)}, "require_reward"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_a_run(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1"}\n')
    good: dict[str, Any] = {
        "exp_id": "e",
        "agent_runtime_arn": "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math",
        "s3_bucket": "bucket",
        "base_model": "m",
        "model_dir": tmp_path,
        "data_path": tmp_path / "rows.jsonl",
        "gateway_admin_key": "hush",
    }
    config = TinkerRunConfig(**good)
    assert "hush" not in repr(config) + config.plan().render()
    with pytest.raises(ConfigError, match=match):
        TinkerRunConfig(**{**good, **change}).plan()


def test_a_damaged_state_is_not_taken_for_a_fresh_start(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / STATE_FILE).write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1"}\n')
    config = TinkerRunConfig(
        exp_id="e",
        agent_runtime_arn="a",
        s3_bucket="bucket",
        base_model="m",
        model_dir=tmp_path,
        data_path=tmp_path / "rows.jsonl",
        output_dir=tmp_path / "out",
    )
    with pytest.raises(ConfigError, match="not a run's state"):
        asyncio.run(run_async(config))


@contextlib.asynccontextmanager
async def one_step(place: Place) -> AsyncIterator[tuple[Any, str]]:
    """A training client after a step, and the path of its weights before it."""
    tinker = sdk()
    service = await asyncio.to_thread(tinker.ServiceClient, base_url=place.config.url)
    try:
        made = service.create_lora_training_client(base_model=place.config.base_model, rank=8, seed=0)
        training = await asyncio.to_thread(made.result)
        path = (await training.save_weights_for_sampler("before")).path
        assert await gap(training, path) < 1e-4
        ids = list(range(1, 60))
        data = [
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(ids[:-1]),
                loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
            )
        ]
        forward = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(tinker.AdamParams(learning_rate=1e-2))
        await forward, await step
        yield training, path
    finally:
        await asyncio.to_thread(lambda: service.close("success").result())


@sdk_sockets
async def test_sampling_weights_of_another_step_are_noticed(place: Place) -> None:
    async with one_step(place) as (training, before):
        sent: list[tuple[str, int]] = []

        async def send(path: str, version: int) -> None:
            sent.append((path, version))

        publish = proved(training, send)
        with pytest.raises(WeightsError, match="the weights did not arrive: after version 1 was published to Tinker"):
            await publish(before, 1)  # what is sampled is the step before
        await publish((await training.save_weights_for_sampler("after")).path, 1)
        assert [version for _, version in sent] == [1, 1]


@sdk_sockets
async def test_any_one_tensor_that_is_not_replaced_is_noticed_where_both_sides_compute_in_float32(place: Place) -> None:
    """The default limit is for a service that computes in bfloat16, and finds fewer (docs/engines.md)."""

    async def send(path: str, version: int) -> None:
        assert path.startswith("tinker://")

    model = place.server.model
    assert isinstance(model, KeepingModel)
    async with one_step(place) as (training, _):
        publish = proved(training, send, max_gap=1e-3)
        for number, (name, _) in enumerate(load_policy()[0].named_parameters()):
            model.keeps = name
            path = (await training.save_weights_for_sampler(f"without-{number}")).path
            with pytest.raises(
                WeightsError, match="the weights did not arrive: after version 1 was published to Tinker"
            ):
                await publish(path, 1)
        model.keeps = None
        await publish((await training.save_weights_for_sampler("whole")).path, 1)
