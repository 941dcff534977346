"""Training sessions by unmodified boto3 clients over HTTP: botocore writes each request, and checks each response."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.validate import ParamValidator

from agentcore_rl_toolkit.backends.sagemaker.local.service import ACCESS_KEY, SageMakerApp, running
from agentcore_rl_toolkit.backends.training.local import LocalModel
from serving import wait_for

from ..scripted_model import ScriptedModel

ROLE = "arn:aws:iam::123456789012:role/trainer"
BASE = "arn:aws:sagemaker:us-west-2:aws:hub-content/SageMakerPublicHub/Model/openai-reasoning-gpt-oss-20b/1.2.3"
GROUP = "arn:aws:sagemaker:us-west-2:123456789012:model-package-group/mine"
NOWHERE = "arn:aws:sagemaker:us-west-2:123456789012:model-package/mine/99"
PROMPT = [300, 301, 302]
STEP = {"optimizerStep": {"adamParamsConfig": {"learningRate": 0.001}}}
WITHIN_S = 60


def check_response(http_response: Any, model: Any, **_: Any) -> None:
    """What was sent has the shape that botocore's model gives: it reads past fields that it does not know."""
    shape = model.output_shape
    if http_response.status_code == 200 and shape is not None and "payload" not in shape.serialization:
        sent = json.loads(http_response.content)
        if (logprobs := sent.get("operationResult", {}).get("computeLogprobs", {}).get("logprobs")) is not None:
            assert logprobs.pop(0) is None  # AWS sends null for the first token, which its own model has not
        report = ParamValidator().validate(sent, model.output_shape)
        assert not report.has_errors(), report.generate_report()


class Clients:
    """Both clients of a service, and one session's numbers."""

    def __init__(self, url: str, secret: str, session: str = "run-1") -> None:
        def client(name: str, **config: Any) -> Any:
            made = boto3.client(
                name,
                endpoint_url=url,
                region_name="us-west-2",
                aws_access_key_id=ACCESS_KEY,
                aws_secret_access_key=secret,
                config=Config(retries={"total_max_attempts": 1}, **config),
            )
            made.meta.events.register("after-call", check_response)
            return made

        self.control = client("sagemaker")
        self.runtime = client("sagemakertrainingsessionruntime")
        self.unchecked = client("sagemakertrainingsessionruntime", parameter_validation=False)
        self.url, self.secret = url, secret
        self.session = session
        self.number = 0

    def create(self, **more: Any) -> None:
        self.control.create_training_session(
            TrainingSessionName=self.session,
            LoraConfig={"Rank": 32, "Alpha": 64},
            RoleArn=ROLE,
            ModelConfig={"BaseModelArn": BASE},
            OutputConfig={"S3Location": {"Path": "s3://bucket/run"}},
            ModelPackageGroupArn=GROUP,
            **more,
        )
        self.until("Running")

    def described(self) -> dict[str, Any]:
        return dict(self.control.describe_training_session(TrainingSessionName=self.session)["TrainingSessionDetail"])

    @property
    def status(self) -> str:
        return str(self.described()["TrainingSessionStatus"])

    def until(self, status: str) -> None:
        wait_for(lambda: self.status == status)

    def submit(self, config: dict[str, Any], number: int | None = None, token: str | None = None) -> str:
        self.number += number is None
        asked = {
            "trainingSessionName": self.session,
            "operationConfig": config,
            "sequenceNumber": number or self.number,
        }
        given = {} if token is None else {"clientToken": token}
        return str(self.runtime.execute_training_operation(**asked, **given)["operationId"])

    def poll(self, operation: str) -> dict[str, Any]:
        kind = "sampling" if operation.startswith("sample") else "training"
        get = getattr(self.runtime, f"get_{kind}_operation_result")
        return dict(get(trainingSessionName=self.session, operationId=operation))

    def ended(self, operation: str) -> dict[str, Any]:
        """The response once the operation has ended."""
        response: dict[str, Any] = {}

        def done() -> bool:
            response.update(self.poll(operation))
            return response["status"] not in ("Pending", "InProgress")

        wait_for(done)
        return response

    def train(self, config: dict[str, Any]) -> Any:
        """The result of the next training operation."""
        response = self.ended(self.submit(config))
        assert response["status"] == "Completed", response
        [result] = response["operationResult"].values()
        return result

    def sample(self, config: dict[str, Any]) -> Any:
        asked = {"trainingSessionName": self.session, "operationConfig": config}
        response = self.ended(self.runtime.execute_sampling_operation(**asked)["operationId"])
        assert response["status"] == "Completed", response
        [result] = response["operationResult"].values()
        return result


Serve = Callable[..., Clients]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a service and give its clients; the session is there already."""
    with contextlib.ExitStack() as stack:

        def start_service(model: Any = None, **options: Any) -> Clients:
            service: SageMakerApp = stack.enter_context(running(model or ScriptedModel(), **options))
            clients = Clients(service.url, service.secret)
            clients.create()
            return clients

        yield start_service


def model_input(ids: list[int]) -> dict[str, Any]:
    return {"chunks": [{"tokens": ids, "type": "encoded_text"}]}


def tensor(data: list[Any], dtype: str = "float32") -> dict[str, Any]:
    return {"data": data, "dtype": dtype, "shape": [len(data)]}


def datum(**inputs: Any) -> dict[str, Any]:
    given = {
        "target_tokens": tensor([301, 302, 310], "int64"),
        "weights": tensor([0.0, 0.0, 1.0]),
        "logprobs": tensor([0.0, 0.0, -2.0]),
        "advantages": tensor([0.0, 0.0, 1.0]),
    }
    return {"modelInput": model_input(PROMPT), "lossFnInputs": {**given, **inputs}}


def backward(*data: dict[str, Any], loss: str = "importance_sampling", **config: float) -> dict[str, Any]:
    return {"forwardBackward": {"lossFnName": loss, "datumList": list(data or (datum(),)), "lossFnConfig": config}}


@contextlib.contextmanager
def refused(code: str, match: str | None = None) -> Iterator[None]:
    with pytest.raises(ClientError, match=match) as raised:
        yield
    assert raised.value.response["Error"]["Code"] == code


def test_a_session_trains_saves_samples_and_goes_on_from_a_saved_state(serve: Serve) -> None:
    with contextlib.closing(LocalModel()) as model:
        clients = serve(model)
        before = clients.train({"forward": backward()["forwardBackward"]})
        passed = clients.train(backward(datum(), datum()))
        assert passed["metrics"]["actor/pg_loss"] == pytest.approx(
            before["metrics"]["actor/pg_loss"], rel=1e-3
        )  # a mean
        assert passed["tokenUsage"] == {"trainingTokens": 6}
        assert clients.train(STEP)["metrics"]["actor/grad_norm"] > 0
        state = clients.train({"saveState": {"description": "one step"}})["modelPackageArn"]
        after = clients.train({"forward": backward()["forwardBackward"]})
        assert after["metrics"]["actor/pg_loss"] < before["metrics"]["actor/pg_loss"]
        for _ in range(2):
            clients.train(backward())
            clients.train(STEP)
        assert clients.train({"loadState": {"modelPackageArn": state, "loadOptimizer": True}}) == {}
        assert clients.train({"forward": backward()["forwardBackward"]})["metrics"] == after["metrics"]

        weights = clients.train({"saveWeights": {}})["modelPackageArn"]
        assert weights == "arn:aws:sagemaker:us-west-2:123456789012:model-package/mine/2"
        assert clients.sample({"loadWeightsForSampling": {"modelPackageArn": weights}}) == {}
        asked = {"prompt": model_input(PROMPT), "numSamples": 2, "modelPackageArn": weights}
        params = {
            "maxTokens": 512,
            "temperature": 1.0,
            "topP": 1.0,
            "topK": -1,
            "seed": 3,
            "stop": ["\n", " ", "e", "a"],
        }
        reply = clients.sample({"sample": {**asked, "samplingParams": params}})
        for sequence in reply["sequences"]:
            whole = {"prompt": model_input([*PROMPT, *sequence["tokens"]]), "modelPackageArn": weights}
            logprobs = clients.sample({"computeLogprobs": whole})["logprobs"]
            assert logprobs[0] is None
            assert all(logprob < 0 for logprob in logprobs[1:])
            assert logprobs[len(PROMPT) :] == pytest.approx(sequence["logprobs"], abs=1e-3)
            assert sequence["tokenUsage"] == {"prefill": len(PROMPT), "decode": len(sequence["tokens"])}

    detail = clients.described()
    assert detail["LastReceivedSequenceNumber"] == clients.number
    assert detail["BillableTokenUsage"]["TrainingTokenCount"] == 3 + 6 + 3 + 2 * 3 + 3
    assert detail["BillableTokenUsage"]["SampleTokenCount"] == sum(len(s["tokens"]) for s in reply["sequences"])


def test_a_number_that_leaves_a_gap_is_refused(serve: Serve) -> None:
    clients = serve()
    with refused("ValidationException", "sequence number 2 comes after 0"):
        clients.submit(STEP, 2)


def test_a_resend_with_the_same_token_is_the_same_operation(serve: Serve) -> None:
    model = ScriptedModel()
    clients = serve(model)
    first = clients.submit(STEP, 1, "one")
    assert clients.submit(STEP, 1, "one") == first
    clients.ended(first)
    assert clients.submit(STEP, 1, "one") == first
    assert list(model.steps.values()) == [1]
    for token in ("other", None):
        with refused("ValidationException", "sequence number 1"):
            clients.submit(STEP, 1, token)


class _WaitingModel(ScriptedModel):
    def __init__(self) -> None:
        super().__init__()
        self.may_step = threading.Event()

    def step(self, run: str, adam: Any) -> Mapping[str, float]:
        self.may_step.wait(WITHIN_S)
        return super().step(run, adam)


@pytest.mark.parametrize(
    ("config", "details"),
    [
        (backward(datum(advantages=tensor([1.0]))), "advantages must have a value for each of 3 tokens"),
        (backward({"modelInput": model_input(PROMPT)}), "target_tokens"),
        ({"loadState": {"modelPackageArn": NOWHERE, "loadOptimizer": False}}, "there are no weights"),
    ],
)
def test_after_a_failed_operation_the_others_fail(serve: Serve, config: dict[str, Any], details: str) -> None:
    model = _WaitingModel()
    clients = serve(model)
    _, first, skipped, last = (clients.submit(each) for each in (STEP, config, STEP, STEP))
    model.may_step.set()
    failed = clients.ended(first)
    assert failed["status"] == "Failed"
    assert details in failed["errorDetails"]
    assert {clients.ended(operation)["status"] for operation in (skipped, last)} == {"Failed"}
    assert clients.status == "Failed"
    with refused("ConflictException", "Failed"):
        clients.submit(STEP)


def test_a_session_is_stopped_once(serve: Serve) -> None:
    model = _WaitingModel()
    clients = serve(model)
    name = {"TrainingSessionName": clients.session}
    with refused("ResourceInUse", "already exists"):
        clients.create()
    computing, waiting = clients.submit(STEP), clients.submit(STEP)
    wait_for(lambda: clients.poll(computing)["status"] == "InProgress")
    assert clients.poll(waiting)["status"] == "Pending"
    clients.control.stop_training_session(**name)
    assert clients.status == "Stopping"
    model.may_step.set()
    assert clients.ended(computing)["status"] == "Completed"
    assert clients.status == "Stopped"
    with refused("ValidationException", "invalid session state transition from Stopped to Stopping"):
        clients.control.stop_training_session(**name)
    with refused("ConflictException", "Stopped"):
        clients.submit(STEP)


SAMPLE = {"prompt": model_input(PROMPT), "numSamples": 1, "samplingParams": {"maxTokens": 512}}


BEYOND: list[tuple[dict[str, Any], str]] = [
    ({"optimizerStep": {"adamParamsConfig": {"learningRate": -0.1}}}, "learningRate"),
    ({**STEP, "saveState": {}}, "tagged union"),
    ({"sample": {**SAMPLE, "samplingParams": {"maxTokens": 511}}}, "maxTokens"),
    ({"computeLogprobs": {"prompt": {"chunks": [{"tokens": ["1"], "type": "encoded_text"}]}}}, "tokens"),
]


def test_requests_beyond_the_limits_are_refused_and_use_no_number(serve: Serve) -> None:
    clients = serve()
    name = {"trainingSessionName": clients.session}
    for config, match in BEYOND:
        with refused("ValidationException", match):
            if config.keys() & {"sample", "computeLogprobs"}:
                clients.unchecked.execute_sampling_operation(**name, operationConfig=config)
            else:
                clients.unchecked.execute_training_operation(**name, sequenceNumber=1, operationConfig=config)
    clients.train(STEP)


def test_what_is_not_served_says_so(serve: Serve) -> None:
    clients = serve()
    with refused("ResourceNotFoundException", "POST /training-sessions"):
        clients.runtime.sample_training_session(trainingSessionName=clients.session, body=b"{}")
    with refused("UnknownOperationException", "ListTrainingJobs"):
        clients.control.list_training_jobs()
    for operation in ("train-9", "sample-9"):
        with refused("ResourceNotFoundException", operation):
            clients.poll(operation)
    asked = {"sample": {**SAMPLE, "modelPackageArn": NOWHERE}}
    name = {"trainingSessionName": clients.session}
    missing = clients.ended(clients.runtime.execute_sampling_operation(**name, operationConfig=asked)["operationId"])
    assert missing["status"] == "Failed"
    assert clients.status == "Running"  # sampling fails alone


def test_a_request_needs_the_services_own_name_and_key() -> None:
    with running(ScriptedModel()) as service:
        with pytest.raises(HTTPError) as raised:
            urllib.request.urlopen(
                urllib.request.Request(service.url, headers={"Host": "evil.example"}), timeout=WITHIN_S
            )
        with raised.value as response:
            assert response.code == 421
        with refused("AccessDeniedException", "signature"):
            Clients(service.url, "another secret").described()
        session = boto3.Session(ACCESS_KEY, service.secret, region_name="us-west-2")
        other = session.client(
            "bedrock-agentcore", endpoint_url=service.url, config=Config(retries={"total_max_attempts": 1})
        )
        with refused("AccessDeniedException", "correct service"):
            other.stop_runtime_session(agentRuntimeArn="arn:aws:x", runtimeSessionId="s" * 33)


def test_saved_packages_outlive_their_service(tmp_path: Path, serve: Serve) -> None:
    kept = tmp_path / "kept"
    with contextlib.closing(LocalModel(checkpoint_dir=kept)) as model:
        state = serve(model).train({"saveState": {"description": "kept"}})["modelPackageArn"]
    with contextlib.closing(LocalModel(checkpoint_dir=kept)) as model, running(model) as service:
        clients = Clients(service.url, service.secret)
        with refused("ResourceNotFound"):
            clients.described()  # sessions end with their service
        clients.create()
        clients.train({"loadState": {"modelPackageArn": state, "loadOptimizer": True}})
        assert clients.train({"saveWeights": {}})["modelPackageArn"] == state.replace("mine/1", "mine/2")
