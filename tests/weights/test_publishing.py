"""Weights into the built-in policy's server over HTTP, and the proof that they have arrived."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentcore_rl_toolkit.backends import open_recording
from agentcore_rl_toolkit.backends.training.loop import train
from agentcore_rl_toolkit.backends.training.settings import LoopSettings, Services, State
from agentcore_rl_toolkit.backends.training.torch_client import TorchClient, TorchSettings
from agentcore_rl_toolkit.client import RolloutClient
from agentcore_rl_toolkit.errors import ConfigError, GatewayError, WeightsError
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.policy import Engine, create_app, load_policy
from agentcore_rl_toolkit.runs import Rollout, RunReader
from agentcore_rl_toolkit.weights import EngineAddress, Publisher, prove, publish, publishing, write_checkpoint
from agentcore_rl_toolkit.weights.engines import Sampled
from agentcore_rl_toolkit.weights.publishing import Gap, check_gap, probe_prompt
from serving import Asked, answering, hosted


@contextlib.contextmanager
def serving(dtype: str) -> Iterator[EngineAddress]:
    """A policy server in this process."""
    torch.set_num_threads(1)
    with Engine.from_directory(max_batch=8, dtype=dtype) as engine, hosted(create_app(engine)) as url:
        yield EngineAddress(url=url)


@pytest.fixture(scope="module")
def address() -> Iterator[EngineAddress]:
    with serving("float32") as found:
        yield found


@pytest.fixture
def model() -> Any:
    """The shipped policy after a step of some size."""
    model, _ = load_policy()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-3 * torch.randn_like(parameter).sign())
    return model


@dataclass
class Told:
    """Answers like the server whose answers it has, by path; remembers what it was asked."""

    asked: list[tuple[str, Any]] = field(default_factory=list)
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)

    def answer(self, request: Asked) -> tuple[int, Any]:
        self.asked.append((request.path, json.loads(request.body) if request.body else None))
        return self.answers.get(request.path, (200, {}))


@pytest.fixture
def stand_in() -> Iterator[tuple[str, Told]]:
    told = Told()
    with answering(told.answer) as url:
        yield url, told


def test_a_version_arrives_and_is_proved(
    address: EngineAddress, model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    announced: list[int] = []
    publisher = Publisher([address], tmp_path, announce=announced.append)
    for version in (3, 4):
        assert publisher.publish(model, version) == version
    assert address.connect().version() == 4
    assert publisher.gap < 1e-4
    assert announced == [3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["000004"], "only the newest is kept"
    assert caplog.messages == []


def test_an_engine_that_was_restarted_after_a_publish_is_reported_at_the_next(
    address: EngineAddress, model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, stand_in: tuple[str, Told]
) -> None:
    publisher = Publisher([address], tmp_path / "published")
    publisher.publish(model, 3)
    address.connect().load(write_checkpoint(load_policy()[0], tmp_path / "first"), 0)  # as it is after a restart
    publisher.publish(model, 4)
    [message] = caplog.messages
    assert "reports version 0 of its weights, although version 3 was published: it was restarted" in message
    assert (address.connect().version(), publisher.gap < 1e-4) == (4, True)
    url, reply = stand_in
    reply.answers = {"/update_weights": (500, {}), "/health": (200, {"weight_version": 4})}
    publisher.engines = [address, EngineAddress(url=url)]
    with pytest.raises(WeightsError, match=url):
        publisher.publish(model, 5)
    publisher.engines = [address]
    publisher.publish(model, 6)  # the engine has version 5 of the publish that failed
    assert len(caplog.messages) == 1


def test_an_engine_whose_checksums_are_not_those_of_the_folder_is_caught(
    address: EngineAddress, model: Any, tmp_path: Path, stand_in: tuple[str, Told]
) -> None:
    found = address.connect().load(write_checkpoint(model, tmp_path / "given"), 5)
    assert found is not None
    assert len(found) == 4
    url, reply = stand_in
    reply.answers = {"/update_weights": (200, {"checksums": found}), "/health": (200, {"weight_version": 5})}
    assert publish(tmp_path / "given", 5, [EngineAddress(url=url)]) == 5
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    with pytest.raises(WeightsError, match=rf"did not arrive: policy at {url} has another model\.norm\.weight"):
        publish(write_checkpoint(model, tmp_path / "next"), 5, [EngineAddress(url=url)])


def test_an_engine_in_bfloat16_is_proved_with_its_rounding_and_other_weights_are_not(tmp_path: Path) -> None:
    model, other = load_policy()[0], load_policy()[0]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    prompt = probe_prompt(model.config.vocab_size)
    with serving("bfloat16") as address:
        assert publishing.MAX_GAP < prove(model, prompt, [address], 1).largest < 0.3
        with pytest.raises(WeightsError, match="did not arrive"):
            prove(other, prompt, [address], 1)


def test_the_proof_compares_at_the_runs_temperature(address: EngineAddress, model: Any, tmp_path: Path) -> None:
    publisher = Publisher([address], tmp_path, temperature=0.7)
    publisher.publish(model, 5)
    assert publisher.gap < 1e-4


@pytest.mark.parametrize(
    ("engine", "setting"),
    [("vllm", "--logprobs-mode processed_logprobs"), ("sglang", "SGLANG_RETURN_ORIGINAL_LOGPROB")],
)
def test_an_engine_that_reports_the_logprobs_of_temperature_1_is_refused(
    address: EngineAddress, tmp_path: Path, engine: Literal["vllm", "sglang"], setting: str
) -> None:
    """What vLLM does without its flag: it samples at any temperature, and reports the logprobs of 1."""
    model, _ = load_policy()
    publish(write_checkpoint(model, tmp_path / "weights"), 6, [address])
    prompt = probe_prompt(model.config.vocab_size)

    def raw(request: Asked) -> tuple[int, Any]:
        body = json.loads(request.body) if request.body else {}
        if request.path not in ("/v1/completions", "/generate"):
            return 200, {"results": ["float32"]}
        how = body.get("sampling_params", body)
        found = address.connect().sample(prompt, n=4, max_tokens=8, seed=3, temperature=how["temperature"])
        answers = [(one.ids, at_1(model, prompt, one.ids)) for one in found]
        if engine == "vllm":
            return 200, {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": lps}} for ids, lps in answers]}
        pairs = [[[lp, i, None] for i, lp in zip(ids, lps, strict=True)] for ids, lps in answers]
        return 200, [{"meta_info": {"output_token_logprobs": tokens}} for tokens in pairs]

    with answering(raw) as url:
        at = EngineAddress(url=url, engine=engine)
        for temperature in (0.7, 0.999):  # the second one's logprobs hardly differ
            with pytest.raises(ConfigError, match=f"reports the logprobs of temperature 1.*{setting}"):
                prove(model, prompt, [at], 6, temperature=temperature)
        assert prove(model, prompt, [at], 6).largest < 1e-4, "at temperature 1 there is no difference"


def at_1(model: Any, prompt: list[int], ids: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
    return list(logits.log_softmax(-1)[range(len(ids)), ids].tolist())


def test_any_one_tensor_that_is_not_replaced_is_caught(address: EngineAddress, model: Any, tmp_path: Path) -> None:
    before, after = load_policy()[0], write_checkpoint(model, tmp_path / "after")
    old = {name: p.detach() for name, p in before.named_parameters()}
    prompt = probe_prompt(model.config.vocab_size)
    for number, name in enumerate(sorted(old)[::4]):
        spoilt = shutil.copytree(after, tmp_path / f"{number:06d}")
        save_file({**load_file(after / "model.safetensors"), name: old[name]}, spoilt / "model.safetensors")
        publish(spoilt, number, [address])
        with pytest.raises(WeightsError, match=r"the weights did not arrive.*docs/engines\.md"):
            prove(model, prompt, [address], number)
    publish(after, 99, [address])
    assert prove(model, probe_prompt(model.config.vocab_size), [address], 99).largest < 1e-4


def test_the_loop_ends_when_one_tensor_did_not_arrive(
    address: EngineAddress, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `quickstart` and `train`: it goes on after one step, and its engine keeps a tensor of before."""
    old = load_policy()[0].state_dict()

    def spoilt(model: Any, folder: Path, **options: Any) -> Path:
        file = write_checkpoint(model, folder, **options) / "model.safetensors"
        name = "model.layers.1.mlp.down_proj.weight"
        save_file({**load_file(file), name: old[name]}, file)
        return folder

    monkeypatch.setattr(publishing, "write_checkpoint", spoilt)
    client_of_model = TorchClient(model, 0, TorchSettings(), run_dir=tmp_path)
    name = asyncio.run(client_of_model.save(1))
    arn = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/shop-0123456789"
    with (
        RolloutClient(arn, f"file://{tmp_path}", "loop", model_id="policy") as client,
        GatewayClient("http://127.0.0.1:9") as gateway,
    ):
        services = Services(client=client, gateway=gateway, run_dir=tmp_path)
        training = TorchClient.open(TorchSettings(threads=1), name, run_dir=tmp_path, engine=address)
        resumed = State(steps=1, state=name, stream={})
        work = train(services, training, how(), [{}], [], lambda event, facts: None, resumed=resumed)
        with pytest.raises(WeightsError, match="the weights did not arrive: after version 1 was published"):
            asyncio.run(work)


def how() -> LoopSettings:
    return LoopSettings(steps=2, learning_rate=1e-3, beta2=0.9)


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(address: EngineAddress, tmp_path: Path) -> None:
    begun: list[Any] = []
    arn = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/shop-0123456789"
    with (
        RolloutClient(arn, f"file://{tmp_path}", "loop", model_id="policy") as client,
        GatewayClient("http://127.0.0.1:9") as gateway,
        open_recording(tmp_path, {}) as recording,
    ):
        for phase in ("before", "train"):
            recording.run.rollout(Rollout(session_id=phase, phase=phase, step=0, group="g", outcome="ok"))
        services = Services(client=client, gateway=gateway, run_dir=tmp_path, recording=recording)
        training = TorchClient.open(TorchSettings(threads=1), None, run_dir=tmp_path, engine=address)
        with pytest.raises(GatewayError):  # there is none to announce the weights to
            asyncio.run(train(services, training, how(), [{}], [{}], lambda event, facts: begun.append(facts)))
    assert begun == [{"steps_done": 0, "rollouts_done": 0}]
    with RunReader(tmp_path) as run:
        assert run.count() == 0


@pytest.mark.parametrize(
    ("answers", "gap"),
    [
        ([([7, 8], [-1.0, -2.5])], (0.5, 0.25)),
        ([([7, 8], [-1.0, -2.5]), ([], [])], (0.5, 0.25)),
        ([([7, 8], [-1.0, -1.0]), ([7], [-1.0])], (1.0, 1 / 3)),
        ([([], [])], None),
        ([], None),
        ([([7, 8], [-1.0])], None),
        ([([7, 8], [-1.0, -2.5]), ([7], [])], None),
    ],
)
def test_answers_are_compared_from_their_first_token_on(
    answers: list[tuple[list[int], list[float]]], gap: tuple[float, float] | None
) -> None:
    sampled = [Sampled(*answer) for answer in answers]
    own = [[-9.0, -9.0, -1.0, -2.0][: 2 + len(answer.ids)] for answer in sampled]
    if gap is None:
        with pytest.raises(WeightsError, match="nothing can be compared"):
            Gap.of(sampled, own, 3)
    else:
        assert Gap.of(sampled, own, 3) == pytest.approx(gap)


def test_a_gap_at_its_limit_is_accepted() -> None:
    check_gap(0.5, 1, "here", 0.5)
    with pytest.raises(WeightsError, match=r"after version 1 was published to here.*differ by 0.51"):
        check_gap(0.51, 1, "here", 0.5)


def test_a_mean_gap_may_grow_to_three_times_that_of_the_first_publish(
    tmp_path: Path, stand_in: tuple[str, Told]
) -> None:
    url, reply = stand_in
    reply.answers["/collective_rpc"] = (200, {"results": ["float32"]})
    publisher = Publisher([EngineAddress(url=url, engine="vllm")], tmp_path)
    for mean in (1.0, 3.0):
        publisher._check_mean(mean, 1)
    with pytest.raises(WeightsError, match=r"differ by 3.1 on average, and by 1 after the first \(at most 3\)"):
        publisher._check_mean(3.1, 2)
    assert (publisher.proved, Publisher([], tmp_path).proved) == (None, None)


def test_vllm_is_paused_loaded_and_resumed_in_this_order(stand_in: tuple[str, Told], tmp_path: Path) -> None:
    url, reply = stand_in
    reply.answers["/weight_info"] = (200, {"weight_version": "7"})
    assert publish(tmp_path, 7, [EngineAddress(url=url, engine="vllm")], in_flight="keep") == 7
    assert reply.asked == [
        ("/pause?mode=keep", {}),
        ("/collective_rpc", {"method": "agentcore_load_weights", "args": [str(tmp_path)]}),
        ("/reset_prefix_cache", {}),
        ("/update_weight_version", {"new_version": "7"}),
        ("/resume", {}),
        ("/weight_info", None),
    ]


@pytest.mark.parametrize(
    ("status", "hint"), [(404, "VLLM_SERVER_DEV_MODE=1"), (500, "--worker-extension-cls"), (503, r"503 \{\}$")]
)
def test_a_refusal_of_vllm_names_what_it_was_started_without(
    stand_in: tuple[str, Told], tmp_path: Path, status: int, hint: str
) -> None:
    url, reply = stand_in
    reply.answers["/pause?mode=wait"] = (status, {})
    with pytest.raises(WeightsError, match=hint):
        publish(tmp_path, 7, [EngineAddress(url=url, engine="vllm")])


def test_calls_that_run_continue_with_the_loops_new_weights(stand_in: tuple[str, Told], tmp_path: Path) -> None:
    """With `hold_calls`, the gateway holds them and none runs."""
    url, reply = stand_in
    engine = EngineAddress(url=url, engine="vllm")
    training = TorchClient.open(TorchSettings(threads=1), None, run_dir=tmp_path, engine=engine)

    async def published() -> None:
        with GatewayClient("http://127.0.0.1:9") as gateway, pytest.raises(WeightsError, match="engines report"):
            await training.publish(7, gateway, None)
        await training.close("success")

    asyncio.run(published())
    assert reply.asked[0] == ("/pause?mode=keep", {})


def test_sglang_updates_from_disk(stand_in: tuple[str, Told], tmp_path: Path) -> None:
    url, reply = stand_in
    reply.answers["/model_info"] = (200, {"weight_version": "7"})
    publish(tmp_path, 7, [EngineAddress(url=url, engine="sglang")], in_flight="keep")
    assert reply.asked == [
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "7", "flush_cache": True}),
        ("/continue_generation", {}),
        ("/model_info", None),
    ]
    reply.answers["/update_weights_from_disk"] = (200, {"success": False, "message": "no such folder"})
    with pytest.raises(WeightsError, match="no such folder"):
        publish(tmp_path, 8, [EngineAddress(url=url, engine="sglang")])
    assert reply.asked[-1][0] == "/continue_generation", "it goes on with what it has"


def test_sglang_computes_the_logprobs_of_a_prompt_but_its_first_token(stand_in: tuple[str, Told]) -> None:
    url, reply = stand_in
    entries = [[None, 5, None], [-0.5, 6, None], [-0.25, 7, None]]
    reply.answers["/generate"] = (200, {"meta_info": {"input_token_logprobs": entries}})
    assert EngineAddress(url=url, engine="sglang").connect().logprobs([5, 6, 7]) == [-0.5, -0.25]
    sampling = {"max_new_tokens": 1, "temperature": 0.0}
    asked = {"input_ids": [5, 6, 7], "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    assert reply.asked[-1] == ("/generate", asked)


def test_an_engine_that_says_another_version_is_caught(stand_in: tuple[str, Told], tmp_path: Path) -> None:
    url, reply = stand_in
    reply.answers["/weight_info"] = (200, {"weight_version": "default"})
    with pytest.raises(WeightsError, match="version 7 was published, but the engines report"):
        publish(tmp_path, 7, [EngineAddress(url=url, engine="vllm")])
