"""The service for tests, asked by the unmodified SDK: if that is content with it, its wire format is Tinker's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway.testing import Fault, logprob_of
from agentcore_rl_toolkit.policy.finetuning import PolicyModel
from agentcore_rl_toolkit.policy.tinker.scripted import loss
from agentcore_rl_toolkit.policy.tinker.service import ScriptedModel, TinkerServer

tinker = pytest.importorskip("tinker")

# The SDK asks for its settings over connections of their own, which it never closes.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
INPUTS = {"target_tokens": [2, 3, 4], "logprobs": [0.0, -1.0, -2.0], "advantages": [0.0, 1.0, -0.5]}


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel()


@pytest.fixture
def server(model: ScriptedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[TinkerServer]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with TinkerServer(model).running() as running:
        yield running


@pytest.fixture
def service(server: TinkerServer) -> Iterator[Any]:
    made = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    yield made
    made.close("success").result(10)


def datum(**inputs: Any) -> Any:
    return tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs or INPUTS)


def training_client(service: Any, base_model: str = "scripted/model") -> Any:
    return service.create_lora_training_client(base_model=base_model, rank=4).result(10)


def test_training_requests_arrive_as_they_were_sent_and_are_done_in_order(server: TinkerServer, service: Any) -> None:
    training = training_client(service)
    forward = training.forward_backward([datum()] * 3, "ppo", {"clip_high_threshold": 1.5})
    step = training.optim_step(tinker.AdamParams(learning_rate=1e-4, beta2=0.9))
    output = forward.result(10)
    step.result(10)
    [update] = server.updates
    assert (update.loss_fn, update.config, update.forward_only) == ("ppo", {"clip_high_threshold": 1.5}, False)
    assert [d.tokens for d in update.data] == [[1, 2, 3]] * 3
    assert dict(update.data[0].inputs) == INPUTS
    assert server.steps[0]["learning_rate"] == 1e-4
    assert server.steps[0]["beta2"] == 0.9
    expected = [logprob_of(t) for t in (2, 3, 4)]
    assert [list(o["logprobs"].data) for o in output.loss_fn_outputs] == [expected] * 3
    assert output.metrics["loss:sum"] == pytest.approx(3 * loss("ppo", expected, INPUTS, {"clip_high_threshold": 1.5}))


def test_samples_come_with_logprobs_and_stop_reasons(server: TinkerServer, model: ScriptedModel, service: Any) -> None:
    model.replies.extend([{"token_ids": [5, 6]}, {"token_ids": [7], "finish_reason": "length"}])
    sampling = service.create_sampling_client(base_model="scripted/model").result(10)
    prompt = tinker.ModelInput.from_ints([1, 2, 3])
    reply = sampling.sample(prompt, 2, tinker.SamplingParams(max_tokens=4, seed=3, stop=[6])).result(10)
    assert [s.tokens for s in reply.sequences] == [[5, 6], [7]]
    assert [s.logprobs for s in reply.sequences] == [[logprob_of(5), logprob_of(6)], [logprob_of(7)]]
    assert [s.stop_reason for s in reply.sequences] == ["stop", "length"]
    assert server.calls[0].prompt_ids == [1, 2, 3]
    scored = sampling.compute_logprobs(prompt).result(10)
    assert scored == [None, logprob_of(2), logprob_of(3)]


def test_weights_saved_for_sampling_and_states_can_be_used(
    server: TinkerServer, model: ScriptedModel, service: Any
) -> None:
    training = training_client(service)
    training.forward_backward([datum()], "importance_sampling")
    training.optim_step(tinker.AdamParams()).result(10)
    path = training.save_weights_for_sampler("one").result(10).path
    service.create_sampling_client(model_path=path).result(10)
    assert path in server.samplers.values()
    state = training.save_state("two").result(10).path
    again = service.create_training_client_from_state_with_optimizer(state).result(10)
    assert model.steps[again.model_id] == 1
    kept = training.save_weights_and_get_sampling_client().result(10)
    assert kept.sample(tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(max_tokens=2)).result(10).sequences
    with pytest.raises(tinker.NotFoundError):
        service.create_sampling_client(model_path="tinker://nobody/sampler_weights/none").result(10)


def test_waiting_backpressure_and_broken_answers_are_what_the_sdk_knows(server: TinkerServer, service: Any) -> None:
    server.hold_s = 0.05  # `retrieve_future` says "try again" several times
    server.faults.append(Fault(delay_s=2))
    server.fail("asample", 429)
    server.fail("retrieve_future", 503, 408)
    sampling = service.create_sampling_client(base_model="scripted/model").result(10)
    reply = sampling.sample(tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(max_tokens=3)).result(20)
    assert len(reply.sequences[0].tokens) == 3
    assert len(server.calls) == 1
    assert server.requests.count(("POST", "retrieve_future")) >= 4


def test_a_loss_nobody_knows_fails_its_request_and_says_why(service: Any) -> None:
    training = training_client(service)
    with pytest.raises(tinker.RequestFailedError, match="loss 'dro' is not known"):
        training.forward_backward([datum()], "dro").result(10)


def test_a_fault_of_the_service_fails_its_request_alone(
    server: TinkerServer, model: ScriptedModel, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise IndexError("index out of range in self")

    training = training_client(service)
    sampling = service.create_sampling_client(base_model="scripted/model").result(10)
    params = tinker.SamplingParams(max_tokens=3)
    with monkeypatch.context() as m:
        m.setattr(model, "forward_backward", broken)
        m.setattr(model, "sample", broken)
        with pytest.raises(tinker.RequestFailedError, match="IndexError: index out of range"):
            training.forward_backward([datum()], "importance_sampling").result(10)
        with pytest.raises(tinker.RequestFailedError, match="IndexError: index out of range"):
            sampling.sample(tinker.ModelInput.from_ints([1]), 1, params).result(10)
    assert training.forward_backward([datum()], "importance_sampling").result(10).metrics  # the run goes on
    assert sampling.sample(tinker.ModelInput.from_ints([1]), 1, params).result(10).sequences


def test_keys_are_exchanged_where_the_service_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with TinkerServer(
        ScriptedModel(), jwt="eyJhbGciOiJub25lIn0.eyJleHAiOjQxMDI0NDQ4MDAsImlhdCI6MH0.x"
    ).running() as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        training_client(service)
        service.close("success").result(10)
        assert ("POST", "auth/token") in server.requests


def test_the_built_in_policy_samples_scores_and_learns_over_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    model = PolicyModel()
    with TinkerServer(model).running() as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        training = training_client(service, "builtin/policy")
        prompt = tinker.ModelInput.from_ints([300, 301, 302])
        before = service.create_sampling_client(base_model="builtin/policy").result(10)
        params = tinker.SamplingParams(max_tokens=8, seed=1)
        [sampled] = before.sample(prompt, 1, params).result(20).sequences
        [again] = before.sample(prompt, 1, params).result(20).sequences
        assert again.tokens == sampled.tokens
        tokens = [300, 301, 302, *sampled.tokens]
        scored = before.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result(20)
        assert scored[3:] == pytest.approx(sampled.logprobs, abs=1e-4)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": [0.0, 0.0, *sampled.logprobs],
            "advantages": [0.0, 0.0, *[1.0] * len(sampled.tokens)],
        }
        example = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        output = training.forward_backward([example], "importance_sampling").result(20)
        assert output.metrics["loss:sum"] == pytest.approx(-len(sampled.tokens), rel=1e-3)  # every ratio is 1
        training.optim_step(tinker.AdamParams(learning_rate=1e-4)).result(20)
        path = training.save_weights_for_sampler("after").result(20).path
        after = service.create_sampling_client(model_path=path).result(10)
        better = after.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result(20)
        assert math.fsum(better[3:]) > math.fsum(scored[3:])
        service.close("success").result(10)
    model.close()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("importance_sampling", -(2.0 * 1.0 + 0.5 * -1.0)),
        ("ppo", -(1.2 * 1.0 + 0.8 * -1.0)),
        ("cispo", -(1.2 * 1.0 * -1.0 + 0.8 * -1.0 * -3.0)),
    ],
)
def test_losses_are_the_formulas(name: str, expected: float) -> None:
    inputs = {"logprobs": [-1.0 - math.log(2), -3.0 + math.log(2)], "advantages": [1.0, -1.0]}
    assert loss(name, [-1.0, -3.0], inputs, {}) == pytest.approx(expected)


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(ConfigError):
        loss("huber", [0.0], {"logprobs": [0.0], "advantages": [0.0]}, {})


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'"\\ud800"',
        b"[1]",
        b"NaN",
        b'{"session_id": {"a": 1}}',
        b'{"session_id": 1e999}',
        b'{"sampling_session_id": "x", "num_samples": 1000000000}',
    ],
)
@pytest.mark.parametrize(
    "name", ["create_session", "create_sampling_session", "asample", "create_model", "optim_step", "retrieve_future"]
)
def test_bodies_that_are_no_requests_are_refused(server: TinkerServer, name: str, body: bytes) -> None:
    reply = httpx.post(f"{server.url}/api/v1/{name}", content=body, headers={"x-api-key": "tml-test"}, timeout=30)
    assert reply.status_code in ((200, 422) if name == "create_session" else (404, 422))
