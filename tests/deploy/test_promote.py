"""`agentcore-rl promote`: S3 and IAM of moto, the local control plane, and hosting, imports and bundles on loopback.

No agent and no engine runs: `test_promoted_agent.py` has them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import boto3
import pytest
from click.testing import CliRunner, Result
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentcore_rl_toolkit.cli.main import cli
from agentcore_rl_toolkit.cli.production import compare
from agentcore_rl_toolkit.cli.production import promote as promoting
from agentcore_rl_toolkit.deploy import agent as deployed_agent
from agentcore_rl_toolkit.deploy import resources
from agentcore_rl_toolkit.deploy.calls import Calls, RefusedError
from agentcore_rl_toolkit.deploy.models import bedrock, sagemaker
from agentcore_rl_toolkit.deploy.models.facts import ModelFacts, instance_for, read_model, refusals_of_import
from agentcore_rl_toolkit.deploy.models.sagemaker import SageMakerEndpoint
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway.testing import ScriptedModel
from agentcore_rl_toolkit.messages.render import Renderer
from agentcore_rl_toolkit.policy import WEIGHTS_DIR
from agentcore_rl_toolkit.runs import Rollout, RunWriter, TokenSequence, write_config
from serving import hosted

from .conftest import without_processes
from .loopback_aws import ACCOUNT, LoopbackAWS
from .test_iam import ASKS_FOR_NONE, RIGHTS

ROOT = Path(__file__).parents[2]
BUCKET = "models-of-a-test"
IDS = list(range(20, 60))
LOGPROB = -0.5
CLIENTS: dict[tuple[str, str | None, str], Any] = {}
ARN = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/shop-5RAgoLKvAy"


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with without_processes(tmp_path_factory.mktemp("aws")) as found:
        yield found


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """A server that gives each token the same logprob."""
    with hosted(completions(f"{LOGPROB}")) as url:
        yield url


def completions(logprob: str) -> Starlette:
    async def complete(request: Request) -> Response:
        each = ", ".join(f'{{"{token}": {{"logprob": {logprob}}}}}' for token in (await request.json())["prompt"][1:])
        return Response(f'{{"choices": [{{"prompt_logprobs": [null, {each}]}}]}}', media_type="application/json")

    return Starlette(routes=[Route("/v1/completions", complete, methods=["POST"])])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the built-in policy, and the logprobs of one rollout."""
    return trained(tmp_path_factory.mktemp("runs") / "refund", [LOGPROB] * len(IDS))


def trained(folder: Path, logprobs: list[float]) -> Path:
    shutil.copytree(WEIGHTS_DIR, folder / "policy")
    write_config(folder, {"kind": "train"})
    sequence = TokenSequence(ids=IDS, mask=[0] * 20 + [1] * 20, logprobs=[None, *logprobs[1:]], prompt_length=20)
    with RunWriter(folder) as writer:
        writer.rollout(
            lambda: Rollout(session_id="s", phase="train", step=3, group="g", outcome="ok", sequences=[sequence])
        )
    return folder


def kept(service: str, region: str | None, make: Callable[[str], Any]) -> Any:
    """A client, which is made once."""
    endpoint = os.environ.get(f"AWS_ENDPOINT_URL_{service.upper().replace('-', '_')}")
    which = (service, region, endpoint or os.environ["AWS_ENDPOINT_URL"])
    if which not in CLIENTS:
        CLIENTS[which] = make(service)
    return CLIENTS[which]


def client(service: str) -> Any:
    return kept(service, None, boto3.client)


def rights_of_the_page() -> set[str]:
    """The actions that the page lists for the user of the command."""
    text = (ROOT / "docs" / "production.md").read_text().partition("The user of `promote` needs these rights:")[2]
    lists = re.findall(r"^([a-z0-9-]+): ([^:]+)$", text.split("```")[1], re.MULTILINE)
    return {f"{service}:{name}" for service, names in lists for name in names.split() if name[0].isupper()}


def right_of(service: str, operation: str) -> str:
    action = f"{service.removesuffix('-control').removesuffix('-runtime')}:{operation}"
    return RIGHTS.get(action, action)


@pytest.fixture(scope="module")
def chat() -> Iterator[str]:
    with ScriptedModel(lambda messages, _: "It is 7.") as answering:
        yield answering.url


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, list[LoopbackAWS]]]:
    """The address of the last account in the list."""
    accounts: list[LoopbackAWS] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await accounts[-1].app(scope, receive, send)

    with hosted(app) as url:
        yield url, accounts


@pytest.fixture
def aws_of_models(
    account: dict[str, str], engine: str, chat: str, hosts: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LoopbackAWS]:
    for module in (sagemaker, bedrock, deployed_agent):
        monkeypatch.setattr(module, "PAUSE_S", 0.01)
    # A command makes each of its clients anew, and reads the same model again: a tenth of a second for each.
    monkeypatch.setattr(Renderer, "from_path", functools.cache(Renderer.from_path))
    make = Calls._client

    def client_of(calls: Calls, service: str) -> Any:
        return kept(service, calls.region, functools.partial(make, calls))

    rights, call = rights_of_the_page(), Calls.__call__

    def with_these_rights(calls: Calls, service: str, operation: str, **parameters: Any) -> Any:
        assert right_of(service, operation) in {*rights, ASKS_FOR_NONE}
        return call(calls, service, operation, **parameters)

    monkeypatch.setattr(Calls, "__call__", with_these_rights)
    monkeypatch.setattr(Calls, "_client", client_of)
    monkeypatch.setattr(resources, "ROLE_PAUSE_S", 0.01)
    url, accounts = hosts
    for name in [
        "SAGEMAKER",
        "SAGEMAKER_RUNTIME",
        "PRICING",
        "BEDROCK",
        "BEDROCK_RUNTIME",
        "BEDROCK_AGENTCORE_CONTROL",
    ]:
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{name}", url)
    service = LoopbackAWS(chat, engine, account["AWS_ENDPOINT_URL_BEDROCK_AGENTCORE"])
    accounts.append(service)
    yield service
    assert service.wrong == []


def promote(*words: str) -> Result:
    return CliRunner().invoke(cli, ["promote", *words], catch_exceptions=True)


def keys() -> list[str]:
    s3 = client("s3")
    if BUCKET not in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]:
        return []
    return [item["Key"] for item in s3.list_objects_v2(Bucket=BUCKET).get("Contents", [])]


def roles() -> list[str]:
    return [role["RoleName"] for role in client("iam").list_roles()["Roles"]]


def commands_of(done: Result) -> dict[str, list[str]]:
    """The commands that a promotion printed with --json: "Roll back" and "Remove it"."""
    lines = [line for line in json.loads(done.stdout)["steps"] if " with:" in line]
    return {line.partition(" with:  ")[0]: line.partition(" promote ")[2].split() for line in lines}


def nothing_is_left(service: LoopbackAWS) -> bool:
    return service.has_nothing() and keys() == [] and "agentcore-rl-model-refund" not in roles()


def read_prices(folder: Path, config: dict[str, Any]) -> dict[str, float | None]:
    """The prices of an evaluation with these settings, in which ten rollouts took 18 s each, one after the other."""
    folder.mkdir()
    (folder / "summary.json").write_text('{"elapsed_s": 180}')
    write_config(folder, {"kind": "eval", **config})
    with RunWriter(folder) as writer:
        for n in range(10):
            times: dict[str, Any] = {"elapsed_s": 18.0, "ended_s": 1000.0 + 18.0 * n}
            rollout = Rollout(session_id=f"s{n}", phase="eval", group=f"g{n}", outcome="ok", **times)
            rollout.reward = rollout.score = 1.0
            writer.rollout(lambda rollout=rollout: rollout)
    side = compare.Side(name="", folder=folder, options={})
    found = compare._facts(side, *compare.read_results(folder), ["g0"])
    return {name: found[name] and round(found[name], 2) for name in ("agent_dollars", "model_dollars")}


def test_a_model_is_put_on_an_endpoint_updated_and_removed(
    run: Path, aws_of_models: LoopbackAWS, tmp_path: Path
) -> None:
    words = (str(run), "--bucket", BUCKET)
    first = promote(*words)
    assert first.exit_code == 0, first.output
    assert 'the model answered: "It is 7."' in first.output
    assert "on ml.g6.xlarge: $1.13 per hour" in first.output
    assert "logprobs of 20 tokens in 1 sequences differ by" in first.output
    assert first.output.count("endpoint agentcore-rl-refund: Creating") == 1
    (created,) = aws_of_models.models.values()
    container = created["PrimaryContainer"]
    assert container["Environment"]["SM_VLLM_TOOL_CALL_PARSER"] == "hermes"
    prefix = container["ModelDataSource"]["S3DataSource"]["S3Uri"].removeprefix(f"s3://{BUCKET}/")
    assert {key.removeprefix(prefix) for key in keys()} >= {"config.json", "model.safetensors", "chat_template.jinja"}
    assert aws_of_models.endpoints["agentcore-rl-refund"]["EndpointStatus"] == "InService"

    changes = aws_of_models.changes
    again = promote(*words, "--name", "Refund")  # names in another case are one model
    assert "endpoint agentcore-rl-refund: is up to date" in again.output
    assert aws_of_models.changes == changes

    prices = [
        read_prices(
            tmp_path / name,
            {
                "agent": agent,
                "base_url": f"{os.environ['AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME']}/endpoints/{name}/openai/v1",
            },
        )
        for name, agent in (("agentcore-rl-refund", "arn:of:an:agent"), ("elsewhere", "agent.py"))
    ]
    assert prices[0]["model_dollars"] == 5.63  # 1.1267 an hour, 180 s, 10 rollouts
    assert prices[0]["agent_dollars"] is not None
    assert prices[1] == {"agent_dollars": None, "model_dollars": None}

    (config,) = aws_of_models.configs.values()
    config["ProductionVariants"][0]["InitialInstanceCount"] = 3
    url = f"{os.environ['AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME']}/endpoints/agentcore-rl-refund/openai/v1"
    assert sagemaker.dollars_per_hour_at(url) == pytest.approx(3 * 1.1267)

    larger = promote(*words, "--instance", "ml.g6e.2xlarge")
    assert "endpoint agentcore-rl-refund: is updated" in larger.output
    assert "price per hour unknown" in larger.output
    assert len(aws_of_models.configs) == 2
    assert promote(*words).exit_code == 0  # back to the earlier configuration
    assert aws_of_models.endpoints["agentcore-rl-refund"]["EndpointConfigName"] == next(iter(aws_of_models.configs))
    assert len(aws_of_models.configs) == 2

    part = client("s3").create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}model.safetensors")
    assert part["UploadId"]
    removed = promote(*words, "--name", "REFUND", "--remove")
    assert removed.exit_code == 0, removed.output
    assert nothing_is_left(aws_of_models)
    assert "Uploads" not in client("s3").list_multipart_uploads(Bucket=BUCKET)


@pytest.mark.parametrize(
    ("host", "price", "region"),
    [
        ("https://runtime.sagemaker.eu-west-1.amazonaws.com", 1.26, "eu-west-1"),
        ("http://127.0.0.1:9", 1.26, None),
        ("http://127.0.0.1:8000", None, None),
        ("https://gpu.example.com", None, None),
    ],
)
def test_only_an_endpoint_of_sagemaker_has_a_price(
    host: str, price: float | None, region: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions: list[str | None] = []

    def described(service: str, operation: str, **parameters: Any) -> Any:
        variant = {"VariantName": "v", "InstanceType": "ml.g6.xlarge", "CurrentInstanceCount": 1}
        return {"EndpointConfigName": "c", "ProductionVariants": [variant]}

    def calls(**options: Any) -> Any:
        regions.append(options["region"])
        described.region = options["region"]  # type: ignore[attr-defined]
        described.price_list = lambda: None  # type: ignore[attr-defined]
        return described

    monkeypatch.setattr(sagemaker, "Calls", calls)
    monkeypatch.setattr(sagemaker.cost, "dollars_per_hour", lambda *_: 1.26)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", "http://127.0.0.1:9/")
    assert sagemaker.dollars_per_hour_at(f"{host}/endpoints/refund/openai/v1") == price
    assert regions == ([] if price is None else [region])


def test_two_long_names_are_no_common_model() -> None:
    runs = [Path(f"support-agent-with-tools-20261130-10450{n}") for n in range(2)]
    names = {promoting._name(model, None) for run in runs for model in (run, run / "policy")}
    assert {name[:-8] for name in names} == {"support-agent-with-tools-20-"}
    assert [len(name) for name in names] == [36, 36]
    with pytest.raises(ConfigError, match="give a --name of at most 36"):
        promoting._name(runs[0], "a" * 37)


def test_a_rejected_model_never_serves_again(
    run: Path, aws_of_models: LoopbackAWS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (str(run), "--bucket", BUCKET)
    (earlier,) = aws_of_models.configs if promote(*words).exit_code == 0 else ()
    others = [trained(tmp_path / f"{logprob}" / "refund", [logprob] * len(IDS)) for logprob in (-9.0, LOGPROB)]
    with hosted(completions("NaN")) as url, monkeypatch.context() as patched:
        for other in others:
            rejected = promote(str(other), "--bucket", BUCKET, "--name", "refund", "--instance", "ml.g6e.2xlarge")
            assert "does not serve the weights of the run" in str(rejected.exception)
            assert aws_of_models.endpoints["agentcore-rl-refund"]["EndpointConfigName"] == earlier
            assert len(aws_of_models.configs) == 2
            patched.setattr(aws_of_models, "engine_url", url)
    chat, aws_of_models.chat_url = aws_of_models.chat_url, "http://127.0.0.1:1"
    failed = promote(*words)
    assert failed.exit_code != 0
    assert "its endpoint stays" in failed.output
    assert aws_of_models.endpoints["agentcore-rl-refund"]["EndpointConfigName"] == earlier
    aws_of_models.chat_url, aws_of_models.engine_url = chat, "http://127.0.0.1:1"
    unknown = promote(str(others[0] / "policy"), "--bucket", BUCKET, "--name", "refund")
    assert (unknown.exit_code, "logprobs: the model returned none" in unknown.output) == (0, True), unknown.output
    assert promote(*words, "--remove").exit_code == 0


def test_a_model_that_did_not_start_leaves_no_earlier_one(
    run: Path, aws_of_models: LoopbackAWS, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (str(run), "--bucket", BUCKET)
    assert promote(*words).exit_code == 0
    endpoint = aws_of_models.endpoints["agentcore-rl-refund"]
    stays = {"EndpointArn": "arn:aws:sagemaker:us-west-2:123456789012:endpoint/agentcore-rl-refund"}
    with monkeypatch.context() as patched:
        patched.setattr(aws_of_models, "_UpdateEndpoint", lambda body: stays)
        assert "does not serve the model" in str(promote(*words, "--instance", "ml.g6e.2xlarge").exception)
    endpoint["EndpointConfigName"] = "of-another-tool"
    with monkeypatch.context() as patched:
        patched.setattr(aws_of_models, "chat_url", "http://127.0.0.1:1")
        assert promote(*words).exit_code != 0
    assert endpoint["EndpointConfigName"] == "of-another-tool"
    assert promote(*words).exit_code == 0
    endpoint |= {"EndpointStatus": "OutOfService", "FailureReason": "CapacityError"}
    assert "does not serve the model: CapacityError" in str(promote(*words).exception)
    assert promote(*words, "--remove").exit_code == 0


class KilledError(BaseException):
    pass


class Mortal(Calls):
    """Ends the process, as far as the command can tell, when this many calls that change something were answered.

    Of all files only config.json counts, which is in the middle.
    """

    left = 0

    def __call__(self, service: str, operation: str, **parameters: Any) -> Any:
        reply = super().__call__(service, operation, **parameters)
        harmless = operation.startswith(("Get", "List", "Describe", "Head", "Invoke"))
        if not harmless and not ("Key" in parameters and not parameters["Key"].endswith("/config.json")):
            self.count(operation)
        return reply

    def upload(self, file: Path, bucket: str, key: str) -> None:
        super().upload(file, bucket, key)
        if file.name == "config.json":
            self.count(file.name)

    def count(self, operation: str) -> None:
        Mortal.left -= 1
        if Mortal.left == 0:
            raise KilledError(operation)


def killed(after: int, *words: str) -> str | None:
    """The change at which the command was killed. None: it had fewer changes to make, and came to its end."""
    Mortal.left = after
    try:
        done = promote(*words)
    except KilledError as e:
        return str(e)
    assert done.exit_code == 0, (done.output, done.exception)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "changes"),
    [
        ("sagemaker", ["CreateModel", "CreateEndpointConfig", "CreateEndpoint", "AddTags"]),
        pytest.param("bedrock", ["CreateModelImportJob"], marks=pytest.mark.nightly),
    ],
)
def test_a_promotion_is_continued_and_removed_wherever_it_was_killed(
    run: Path,
    aws_of_models: LoopbackAWS,
    account: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    to: str,
    changes: list[str],
) -> None:
    monkeypatch.setattr("agentcore_rl_toolkit.deploy.calls.Calls", Mortal)
    arn, _, role = agent_of(account)
    words = (str(run), "--bucket", BUCKET, "--to", to, "--tool-parser", "none", "--agent", arn, "--bundle", "ours")
    steps = []
    while (step := killed(1, *words)) is not None:
        steps.append(step)
    last = ["PutRolePolicy", "CreateConfigurationBundle", "PutRolePolicy"]
    assert steps[-len(changes) - 5 :] == ["CreateRole", "PutRolePolicy", *changes, *last]
    assert len(steps) == len(set(steps)) + 2  # no step but that of policies is repeated
    while killed(1, *words, "--remove") is not None:
        pass
    assert nothing_is_left(aws_of_models)
    assert client("iam").list_role_policies(RoleName=role)["PolicyNames"] == []
    model_only = words[: words.index("--agent")]
    for after in range(1, 4 + len(changes)):  # then it is given up
        assert killed(after, *model_only) is not None
        assert killed(0, *model_only, "--remove") is None
        assert nothing_is_left(aws_of_models)


def test_after_a_kill_a_failed_check_leads_back_to_the_model_that_passed_its_checks(
    run: Path, aws_of_models: LoopbackAWS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentcore_rl_toolkit.deploy.calls.Calls", Mortal)
    words = (str(run), "--bucket", BUCKET)
    other = str(trained(tmp_path / "refund", [-9.0] * len(IDS)))
    worse = (other, "--bucket", BUCKET, "--name", "refund", "--instance", "ml.g6e.2xlarge")
    third = (*worse[:-1], "ml.g6e.12xlarge")
    assert killed(0, *words) is None
    ((name, endpoint),) = aws_of_models.endpoints.items()
    earlier = endpoint["EndpointConfigName"]

    def fails_and_serves_the_earlier_one(words: tuple[str, ...]) -> bool:
        Mortal.left = 0
        refused = "does not serve the weights of the run" in str(promote(*words).exception)
        return refused and endpoint["EndpointConfigName"] == earlier

    for step in ("CreateModel", "CreateEndpointConfig", "AddTags"):
        assert killed(1, *worse) == step
    assert killed(2, *worse) == "UpdateEndpoint"
    assert endpoint["EndpointConfigName"] != earlier
    assert fails_and_serves_the_earlier_one(worse)
    assert killed(2, *worse) == "UpdateEndpoint"
    assert fails_and_serves_the_earlier_one(third)
    assert killed(2, *worse) == "UpdateEndpoint"
    assert killed(1, *worse) == "UpdateEndpoint"  # back
    assert fails_and_serves_the_earlier_one(worse)
    assert killed(2, *worse) == "UpdateEndpoint"
    assert killed(0, *words) is None
    assert killed(0, *words, "--remove") is None

    assert killed(6, *words) == "CreateEndpoint"  # and no check
    Mortal.left = 0
    assert "its endpoint stays" in promote(*worse).output
    assert aws_of_models.endpoints[name]["EndpointConfigName"] != earlier
    assert killed(0, *words, "--remove") is None
    assert nothing_is_left(aws_of_models)


def test_a_model_is_imported_into_bedrock_warmed_up_and_removed(
    run: Path, aws_of_models: LoopbackAWS, account: dict[str, str]
) -> None:
    arn, _, role = agent_of(account)
    words = (str(run), "--to", "bedrock", "--bucket", BUCKET, "--agent", arn)
    refused = promote(*words)
    assert "tool calls of imported models for gpt-oss only" in str(refused.exception)
    assert (aws_of_models.changes, keys()) == (0, [])
    aws_of_models.failure = "the tokenizer is not known"
    assert "the tokenizer is not known" in str(promote(*words, "--tool-parser", "none").exception)
    (failed,) = (job["jobName"] for job in aws_of_models.jobs.values())
    aws_of_models.not_ready = 6
    first = promote(*words, "--tool-parser", "none")
    assert first.exit_code == 0, first.output
    assert "the model is being loaded: waiting" in first.output
    assert 'the model answered: "It is 7."' in first.output
    assert "price per hour unknown" in first.output
    _, job = aws_of_models.jobs.values()
    assert job["jobName"] != failed
    trust = client("iam").get_role(RoleName="agentcore-rl-model-refund")["Role"]["AssumeRolePolicyDocument"]
    assert len(job["jobName"]) <= 63
    assert job["roleArn"].endswith(":role/agentcore-rl-model-refund")
    assert trust["Statement"][0]["Condition"]["ArnEquals"]["aws:SourceArn"].endswith(":123456789012:model-import-job/*")
    assert {key.rpartition("/")[2] for key in keys()} >= {"config.json", "model.safetensors", "tokenizer_config.json"}

    again = promote(*words, "--tool-parser", "none")
    assert "is up to date" in again.output
    other = promote(*words, "--tool-parser", "none", "--dtype", "float16")
    assert other.exit_code == 0, other.output
    assert len(aws_of_models.imported) == 2  # the earlier one stays for roll-backs, and the agent may call it
    name = {"RoleName": role, "PolicyName": "agentcore-rl-model-bedrock-refund"}
    (statement,) = client("iam").get_role_policy(**name)["PolicyDocument"]["Statement"]
    assert statement["Resource"] == sorted(aws_of_models.imported)
    names = {bedrock_arn(7): "agentcore-rl-refund-of-theirs", bedrock_arn(8): "agentcore-rl-refund-0123456789ab"}
    theirs = {arn: {"modelArn": arn, "modelName": name, "creationTime": 0} for arn, name in names.items()}
    aws_of_models.imported |= theirs
    (latest,) = (model for model in aws_of_models.imported.values() if model["modelName"] == job["importedModelName"])
    tags = aws_of_models.tags.pop(latest["modelArn"])
    untagged = str(promote(*words, "--tool-parser", "none").exception)
    assert "exists without the tag agentcore-rl-deployment=model-bedrock-us-west-2-refund" in untagged
    assert f"add the tag to {latest['modelArn']}" in untagged
    aws_of_models.tags[latest["modelArn"]] = tags
    removed = promote(*words, "--remove")
    assert removed.exit_code == 0, removed.output
    assert "imported model agentcore-rl-refund-0123456789ab: stays, because it does not have the tag" in removed.output
    assert aws_of_models.imported == theirs
    assert client("iam").list_role_policies(RoleName=role)["PolicyNames"] == []
    aws_of_models.imported.clear()
    assert nothing_is_left(aws_of_models)


def bedrock_arn(number: int) -> str:
    return f"arn:aws:bedrock:us-west-2:123456789012:imported-model/{number:012d}"


def test_resources_of_others_are_left_alone(run: Path, aws_of_models: LoopbackAWS) -> None:
    theirs, same = {"EndpointStatus": "InService", "EndpointConfigName": "theirs"}, "agentcore-rl-refund-0123456789ab"
    aws_of_models.endpoints["refund"] = theirs.copy()
    aws_of_models.models = {name: {"ModelName": name} for name in ("agentcore-rl-refund-theirs", same)}
    aws_of_models.configs[same] = {"EndpointConfigName": same, "ProductionVariants": [{"ModelName": same}]}
    words = (str(run), "--bucket", BUCKET)
    for more in ((), ("--remove",)):
        removed = promote(*words, *more)
        assert removed.exit_code == 0
        key = "agentcore-rl-models/sagemaker/us-west-2/refund/theirs/notes.txt"
        client("s3").put_object(Bucket=BUCKET, Key=key, Body=b"")
    for kind in ("EndpointConfig", "Model"):
        assert f"{kind} {same}: stays, because it does not have the tag agentcore-rl-deployment=" in removed.output
    assert keys() == [key]
    assert (list(aws_of_models.endpoints), list(aws_of_models.configs)) == (["refund"], [same])
    assert list(aws_of_models.models) == ["agentcore-rl-refund-theirs", same]
    client("s3").delete_object(Bucket=BUCKET, Key=key)


def test_an_endpoint_without_the_tag_keeps_its_weights_until_the_user_adds_the_tag(
    run: Path, aws_of_models: LoopbackAWS
) -> None:
    words = (str(run), "--bucket", BUCKET)
    assert promote(*words).exit_code == 0
    arn = f"arn:aws:sagemaker:us-west-2:{ACCOUNT}:endpoint/agentcore-rl-refund"
    tags = aws_of_models.tags.pop(arn)
    changes, weights = aws_of_models.changes, keys()
    for more in ((), ("--remove",), ("--dry-run",)):
        refused = str(promote(*words, *more).exception)
        assert "exists without the tag agentcore-rl-deployment=model-sagemaker-us-west-2-refund" in refused
        assert f"add the tag to {arn} and repeat the command" in refused
    assert (aws_of_models.changes, keys()) == (changes, weights)
    assert "agentcore-rl-model-refund" in roles()
    aws_of_models.tags[arn] = tags
    assert promote(*words, "--remove").exit_code == 0
    assert nothing_is_left(aws_of_models)


def test_a_missing_right_of_the_user_ends_the_promotion_at_once(
    run: Path, aws_of_models: LoopbackAWS, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, caller = Calls.__call__, f"arn:aws:sts::{ACCOUNT}:assumed-role/developer/me"

    def without_tags(calls: Calls, service: str, operation: str, **parameters: Any) -> Any:
        if operation == "GetCallerIdentity":
            return {"Account": ACCOUNT, "Arn": caller}
        if operation == "CreateModel":
            text = f"User: {caller} is not authorized to perform: sagemaker:AddTags"
            raise RefusedError(text, code="AccessDeniedException")
        return call(calls, service, operation, **parameters)

    monkeypatch.setattr(Calls, "__call__", without_tags)
    words = (str(run), "--bucket", BUCKET)
    refused = promote(*words)
    assert "sagemaker:AddTags" in str(refused.exception)
    assert "waiting" not in refused.output
    assert promote(*words, "--remove").exit_code == 0


def test_a_model_that_was_promoted_during_an_upload_is_the_one_to_go_back_to(
    run: Path, aws_of_models: LoopbackAWS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (str(run), "--bucket", BUCKET)
    assert promote(*words).exit_code == 0
    worse = str(trained(tmp_path / "refund", [-9.0] * len(IDS)))
    upload = SageMakerEndpoint._upload

    def slow_upload(endpoint: SageMakerEndpoint, facts: ModelFacts) -> str:
        monkeypatch.setattr(SageMakerEndpoint, "_upload", upload)
        assert promote(*words, "--instance", "ml.g6e.12xlarge").exit_code == 0
        return upload(endpoint, facts)

    monkeypatch.setattr(SageMakerEndpoint, "_upload", slow_upload)
    done = promote(worse, "--bucket", BUCKET, "--name", "refund", "--instance", "ml.g6e.2xlarge")
    assert "does not serve the weights of the run" in str(done.exception)
    config = aws_of_models.configs[aws_of_models.endpoints["agentcore-rl-refund"]["EndpointConfigName"]]
    assert config["ProductionVariants"][0]["InstanceType"] == "ml.g6e.12xlarge"
    assert promote(*words, "--remove").exit_code == 0


@pytest.mark.parametrize(
    ("to", "others"),
    [
        ("sagemaker", (("--region", "us-east-1"), ("--to", "bedrock"), ("--name", "refunds"))),
        ("bedrock", (("--region", "us-east-1"), ("--to", "sagemaker"))),
    ],
)
def test_a_removal_of_what_is_not_there_changes_nothing(
    run: Path, aws_of_models: LoopbackAWS, account: dict[str, str], to: str, others: tuple[tuple[str, str], ...]
) -> None:
    arn, _, role = agent_of(account)
    done = promote(str(run), "--bucket", BUCKET, "--to", to, "--tool-parser", "none", "--agent", arn, "--json")
    assert done.exit_code == 0, done.output
    undo = commands_of(done)
    weights, changes = keys(), aws_of_models.changes
    policies = [f"agentcore-rl-model-{to}-refund"]
    for other in others:
        wrong = promote(*undo["Remove it"], *other)
        why = "the agent is in the region" if other[0] == "--region" else "there is no model agentcore-rl-refund"
        assert why in f"{wrong.exception} {wrong.output}"
        assert (keys(), aws_of_models.changes) == (weights, changes)
        assert client("iam").list_role_policies(RoleName=role)["PolicyNames"] == policies
    for command in undo.values():
        rehearsed = promote(*command, "--dry-run")
        assert (rehearsed.exit_code, ": is " in rehearsed.output) == (0, False), (rehearsed.output, rehearsed.exception)
    assert promote(*undo["Remove it"]).exit_code == 0
    assert nothing_is_left(aws_of_models)


@pytest.mark.parametrize("to", ["sagemaker", "bedrock"])
def test_a_dry_run_changes_nothing(run: Path, aws_of_models: LoopbackAWS, to: str, account: dict[str, str]) -> None:
    arn, _, role = agent_of(account)
    words = ("--bucket", BUCKET, "--dry-run", "--name", "dry", "--to", to, "--tool-parser", "none", "--agent", arn)
    done = promote(str(run), *words)
    assert done.exit_code == 0, done.output
    calls = {
        "sagemaker": ("sagemaker:CreateModel", "sagemaker:CreateEndpoint"),
        "bedrock": ("bedrock:CreateModelImportJob",),
    }
    for call in ("s3://", "iam:CreateRole", *calls[to], "bedrock-agentcore-control:UpdateAgentRuntime"):
        assert call in done.output
    assert "role agentcore-rl-model-dry: would be created" in done.output
    assert ": is " not in done.output
    assert promote(str(run), *words, "--bundle", "ours").exit_code == 0
    assert (aws_of_models.changes, "agentcore-rl-model-dry" in roles()) == (0, False)
    assert client("iam").list_role_policies(RoleName=role)["PolicyNames"] == []


def test_without_an_account_a_dry_run_shows_what_would_be_done_in_a_new_one(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    words = (str(run), "--bucket", BUCKET, "--dry-run", "--tool-parser", "none", "--agent", ARN)
    for to, endpoint in (("sagemaker", "DEFAULT"), ("bedrock", "prod")):
        done = promote(*words, "--to", to, "--endpoint", endpoint)
        assert done.exit_code == 0, (done.output, done.exception)
        assert "UpdateAgentRuntime" in done.output


def agent_of(account: dict[str, str]) -> tuple[str, str, str]:
    """ARN, id and role of the deployed agent."""
    control = client("bedrock-agentcore-control")
    (agent,) = [a for a in control.list_agent_runtimes()["agentRuntimes"] if a["agentRuntimeName"] == "other"]
    arn, runtime = agent["agentRuntimeArn"], agent["agentRuntimeId"]
    role = control.get_agent_runtime(agentRuntimeId=runtime)["roleArn"].rsplit("/", 1)[1]
    if role not in roles():
        client("iam").create_role(RoleName=role, AssumeRolePolicyDocument="{}")
    return arn, runtime, role


def test_an_agent_gets_the_model_of_its_deployment_back_and_may_be_gone(
    run: Path, aws_of_models: LoopbackAWS, account: dict[str, str], tmp_path: Path
) -> None:
    arn, runtime, _ = agent_of(account)
    control = client("bedrock-agentcore-control")
    now = control.get_agent_runtime(agentRuntimeId=runtime)
    fields = {name: now[name] for name in ("agentRuntimeArtifact", "roleArn", "networkConfiguration")}
    own = {"AGENTCORE_RL_MODEL_ID": "hosted"}
    control.update_agent_runtime(agentRuntimeId=runtime, environmentVariables=own, **fields)
    for name in ("refund", "second"):  # the second takes over from the first
        assert promote(str(run), "--bucket", BUCKET, "--agent", arn, "--name", name).exit_code == 0
    for name in ("refund", "second"):
        assert promote(str(run), "--bucket", BUCKET, "--agent", arn, "--name", name, "--remove").exit_code == 0
    assert control.get_agent_runtime(agentRuntimeId=runtime)["environmentVariables"] == own
    control.update_agent_runtime(agentRuntimeId=runtime, environmentVariables={}, **fields)

    gone = control.create_agent_runtime(agentRuntimeName="gone", **fields)
    words = (str(run), "--bucket", BUCKET, "--agent", gone["agentRuntimeArn"])
    assert promote(*words).exit_code == 0
    control.delete_agent_runtime(agentRuntimeId=gone["agentRuntimeId"])
    assert promote(*words, "--remove").exit_code == 0
    assert nothing_is_left(aws_of_models)


def test_agents_get_rows_without_the_reference(
    run: Path, aws_of_models: LoopbackAWS, account: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "hello", "_reference": "the answer"}\n')
    sent: list[Any] = []

    async def answer(request: Request) -> Response:
        sent.append(await request.json())
        return Response("{}", media_type="application/json")

    words = (str(run), "--bucket", BUCKET, "--agent", agent_of(account)[0])
    with hosted(Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_BEDROCK_AGENTCORE", url)
        assert promote(*words, "--rows", str(rows)).exit_code == 0
    assert sent == [{"prompt": "hello"}]
    assert promote(*words, "--remove").exit_code == 0


@pytest.mark.parametrize("to", ["sagemaker", "bedrock"])
def test_a_deployed_agent_is_led_to_the_model_and_back(
    run: Path, aws_of_models: LoopbackAWS, account: dict[str, str], to: str, tmp_path: Path
) -> None:
    moved = shutil.copytree(run, tmp_path / "refund")
    arn, runtime, role = agent_of(account)
    iam, control = client("iam"), client("bedrock-agentcore-control")

    def variables() -> dict[str, str]:
        found = control.get_agent_runtime(agentRuntimeId=runtime).get("environmentVariables", {})
        return {name: value for name, value in found.items() if "MODEL" in name}

    before = int(control.get_agent_runtime(agentRuntimeId=runtime)["agentRuntimeVersion"])
    words = ("--to", to, "--bucket", BUCKET, "--agent", arn, "--tool-parser", "none")
    done = promote(str(moved), *words, "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["version_before"], int(facts["version"])) == (str(before), before + 1)
    policy = iam.get_role_policy(RoleName=role, PolicyName=f"agentcore-rl-model-{to}-refund")["PolicyDocument"]
    resource = policy["Statement"][0]["Resource"]
    if to == "sagemaker":
        assert variables() == {"AGENTCORE_RL_MODEL_URL": facts["base_url"]}
        assert facts["base_url"].endswith("/endpoints/agentcore-rl-refund/openai/v1")
        assert resource.endswith(":endpoint/agentcore-rl-refund")
    else:
        assert variables() == {"AGENTCORE_RL_MODEL_ID": facts["model_id"]}
        assert resource == [facts["model_id"]] == list(aws_of_models.imported)
    again = json.loads(promote(str(moved), *words, "--json").stdout)  # an interrupted run may have changed the agent
    assert (again["version"], again["version_before"]) == (facts["version"], facts["version_before"])

    shutil.rmtree(moved)  # the endpoint is billed, also if the run is gone from this machine
    assert promote(*commands_of(done)["Roll back"]).exit_code == 0
    assert variables() == {}
    assert "there is no model folder" in str(promote(str(moved), *words).exception)
    assert promote(str(run), *words).exit_code == 0
    assert variables() != {}
    removed = promote(*commands_of(done)["Remove it"])
    assert removed.exit_code == 0, removed.output
    assert (variables(), iam.list_role_policies(RoleName=role)["PolicyNames"]) == ({}, [])
    assert nothing_is_left(aws_of_models)


def test_an_endpoint_gets_the_model_and_keeps_its_code(
    run: Path, aws_of_models: LoopbackAWS, account: dict[str, str]
) -> None:
    arn, runtime, _ = agent_of(account)
    control = client("bedrock-agentcore-control")

    def deploy(**variables: str) -> None:
        now = control.get_agent_runtime(agentRuntimeId=runtime)
        fields = {name: now[name] for name in ("agentRuntimeArtifact", "roleArn", "networkConfiguration")}
        control.update_agent_runtime(agentRuntimeId=runtime, environmentVariables=variables, **fields)

    def released(endpoint: str) -> dict[str, str]:
        version = control.get_agent_runtime_endpoint(agentRuntimeId=runtime, endpointName=endpoint)["liveVersion"]
        found = control.get_agent_runtime(agentRuntimeId=runtime, agentRuntimeVersion=version)
        return dict(found["environmentVariables"])

    deploy(CODE="released")
    control.create_agent_runtime_endpoint(agentRuntimeId=runtime, name="prod")
    deploy(CODE="unreleased")
    words = (str(run), "--bucket", BUCKET, "--agent", arn, "--json")
    done = promote(*words, "--endpoint", "prod")
    assert done.exit_code == 0, (done.output, done.exception)
    used = {"AGENTCORE_RL_MODEL_URL": json.loads(done.stdout)["base_url"]}
    assert released("prod") == {"CODE": "released", **used}

    deploy(CODE="unreleased", **used)
    weights = keys()
    refused = promote(*words, "--remove")
    assert "the endpoint prod of the agent" in str(refused.exception)
    assert (released("DEFAULT"), keys()) == ({"CODE": "unreleased"}, weights)
    assert "agentcore-rl-refund" in aws_of_models.endpoints
    assert promote(*words, "--endpoint", "prod", "--remove").exit_code == 0
    assert released("prod") == {"CODE": "released"}
    assert nothing_is_left(aws_of_models)
    control.delete_agent_runtime_endpoint(agentRuntimeId=runtime, endpointName="prod")
    deploy()


def test_a_repeated_promotion_leads_back_to_the_same_code(
    run: Path, aws_of_models: LoopbackAWS, account: dict[str, str]
) -> None:
    """The version before the promoted one may be code that this endpoint never had, and have another role."""
    arn, runtime, role = agent_of(account)
    control, iam = client("bedrock-agentcore-control"), client("iam")
    now = control.get_agent_runtime(agentRuntimeId=runtime)
    fields = {name: now[name] for name in ("agentRuntimeArtifact", "networkConfiguration")}
    update = functools.partial(control.update_agent_runtime, agentRuntimeId=runtime, **fields)
    released = update(roleArn=now["roleArn"], environmentVariables={"CODE": "released"})["agentRuntimeVersion"]
    control.create_agent_runtime_endpoint(agentRuntimeId=runtime, name="prod")
    iam.create_role(RoleName="of-the-next", AssumeRolePolicyDocument="{}")
    update(roleArn=f"{now['roleArn'].rpartition('/')[0]}/of-the-next", environmentVariables={"CODE": "unreleased"})

    words = (str(run), "--bucket", BUCKET, "--agent", arn, "--endpoint", "prod")
    for _ in range(2):
        done = promote(*words, "--json")
        assert (done.exit_code, json.loads(done.stdout)["version_before"]) == (0, released), done.output
    assert iam.list_role_policies(RoleName=role)["PolicyNames"] == ["agentcore-rl-model-sagemaker-refund"]
    assert iam.list_role_policies(RoleName="of-the-next")["PolicyNames"] == []
    assert promote(*words, "--remove").exit_code == 0
    assert iam.list_role_policies(RoleName=role)["PolicyNames"] == []
    assert nothing_is_left(aws_of_models)
    control.delete_agent_runtime_endpoint(agentRuntimeId=runtime, endpointName="prod")
    update(roleArn=now["roleArn"], environmentVariables={})


def test_a_removed_model_leaves_the_other_models_of_its_bundle(
    run: Path, aws_of_models: LoopbackAWS, account: dict[str, str]
) -> None:
    arn, _, role = agent_of(account)
    words = (str(run), "--bucket", BUCKET, "--agent", arn, "--bundle", "ours")
    assert promote(*words).exit_code == 0
    control = client("bedrock-agentcore-control")
    (bundle,) = control.list_configuration_bundles()["bundles"]
    another = {f"{arn}2": {"configuration": {"base_url": "https://another"}}}
    now = control.get_configuration_bundle(bundleId=bundle["bundleId"])
    components = {**now["components"], **another}
    which = {"bundleId": bundle["bundleId"], "parentVersionIds": [now["versionId"]]}
    control.update_configuration_bundle(**which, components=components, commitMessage="Another agent")
    assert promote(*words, "--name", "another").exit_code == 0  # takes the entry over

    assert promote(*words, "--remove").exit_code == 0
    kept = control.get_configuration_bundle(bundleId=bundle["bundleId"])["components"]
    assert kept[arn]["configuration"]["base_url"].endswith("/endpoints/agentcore-rl-another/openai/v1")
    policies = {"agentcore-rl-model-sagemaker-another", "agentcore-rl-model-bundle-ours"}
    assert set(client("iam").list_role_policies(RoleName=role)["PolicyNames"]) == policies
    assert promote(*words, "--name", "another", "--remove").exit_code == 0
    now = control.get_configuration_bundle(bundleId=bundle["bundleId"])
    assert now["components"] == {**another, arn: {"configuration": {}}}
    assert client("iam").list_role_policies(RoleName=role)["PolicyNames"] == []
    which["parentVersionIds"] = [now["versionId"]]
    control.update_configuration_bundle(
        **which, components={arn: {"configuration": {}}}, commitMessage="No other agent"
    )
    assert promote(*words, "--remove").exit_code == 0  # the bundle that `promote` created is empty now
    assert nothing_is_left(aws_of_models)


def test_a_bundle_gets_a_version_with_the_models_address(
    run: Path, aws_of_models: LoopbackAWS, account: dict[str, str]
) -> None:
    arn, runtime, role = agent_of(account)
    control = client("bedrock-agentcore-control")
    theirs = {arn: {"configuration": {"system_prompt": "Be kind.", "model_id": "hosted"}}}
    made = control.create_configuration_bundle(bundleName="ours", components=theirs, tags={})
    words = (str(run), "--bucket", BUCKET, "--agent", arn, "--bundle", "ours", "--name", "bundle-ours")
    before = control.get_agent_runtime(agentRuntimeId=runtime)["agentRuntimeVersion"]
    policies = client("iam").list_role_policies(RoleName=role)["PolicyNames"]
    done = promote(*words, "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["bundle"], facts["version_before"]) == (made["bundleArn"], made["versionId"])
    (baggage,) = [line.rpartition(" ")[2] for line in facts["steps"] if "baggage" in line]
    values = dict(each.split("=") for each in unquote(baggage).split(","))
    assert values["aws.agentcore.configbundle_version"] == facts["version"]
    found = control.get_configuration_bundle_version(bundleId=made["bundleId"], versionId=facts["version"])
    wanted = {"system_prompt": "Be kind.", "base_url": facts["base_url"]}
    assert found["components"][arn]["configuration"] == wanted
    assert control.get_agent_runtime(agentRuntimeId=runtime)["agentRuntimeVersion"] == before
    names = {"agentcore-rl-model-sagemaker-bundle-ours", "agentcore-rl-model-bundle-ours"}
    assert {*client("iam").list_role_policies(RoleName=role)["PolicyNames"]} == {*policies, *names}
    assert json.loads(promote(*words, "--json").stdout)["version"] == facts["version"]

    assert promote(*words, "--remove").exit_code == 0
    left = control.get_configuration_bundle(bundleId=made["bundleId"])["components"]
    assert left == {arn: {"configuration": {"system_prompt": "Be kind."}}}
    assert client("iam").list_role_policies(RoleName=role)["PolicyNames"] == policies


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--bundle", "x"), "need --agent"),
        (("--roll-back", "1"), "need --agent"),
        (("--roll-back", "1", "--agent", ARN, "--bundle", "x"), "neither --bundle"),
        (("--roll-back", "1", "--agent", ARN, "--remove"), "nor --remove"),
        (("--out", "folder"), "--to sagemaker takes no --out"),
        (("--to", "bedrock", "--instance", "ml.g6.xlarge"), "--to bedrock takes no --instance"),
        (("--to", "folder", "--remove"), "--to folder takes no --remove"),
        (("--to", "folder", "--agent", ARN), "--to folder takes no --agent"),
        (("--endpoint", "prod"), "need --agent"),
        (("--agent", "arn:aws:bedrock-agentcore:us-west-2:1:runtime/a/runtime-endpoint/b"), "not the ARN of an agent"),
        (("--agent", "arn:aws:bedrock-agentcore:us-east-1:1:runtime/a"), "the agent is in the region us-east-1"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    run: Path, words: tuple[str, ...], why: str, aws_of_models: LoopbackAWS
) -> None:
    assert why in str(promote(str(run), "--bucket", BUCKET, *words).exception)
    assert aws_of_models.changes == 0


def test_a_folder_comes_with_the_command_that_serves_it(run: Path, tmp_path: Path) -> None:
    done = promote(str(run), "--to", "folder", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert "Qwen3ForCausalLM, 0.6 MB in bfloat16" in done.output
    assert f"vllm serve {tmp_path / 'out'} --enable-auto-tool-choice --tool-call-parser hermes" in done.output
    assert read_model(tmp_path / "out").dtype == "bfloat16"


def test_neither_a_trainers_state_nor_a_key_is_uploaded(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run / "policy", tmp_path / "model"))
    files = read_model(folder).files
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "up.env", ".env", "id.pem"):
        (folder / name).touch()
    assert read_model(folder).files == files
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in files}


def test_models_beside_each_other_and_edited_ones_get_their_own_folders(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(WEIGHTS_DIR, tmp_path / name)
        template = tmp_path / name / "chat_template.jinja"
        for edit in range(2):
            template.write_text(f"{template.read_text()}{{# {name} {edit} #}}")
            done = promote(str(tmp_path / name), "--to", "folder", "--json")
            folder = Path(json.loads(done.stdout)["folder"])
            assert (folder / "chat_template.jinja").read_text() == template.read_text()


def facts(**changes: Any) -> ModelFacts:
    values: dict[str, Any] = {
        "folder": WEIGHTS_DIR,
        "architecture": "Qwen3ForCausalLM",
        "bytes": 8 * 10**9,
        "dtype": "bfloat16",
        "context": 40960,
        "takes_tools": False,
        "heads": 32,
    }
    return ModelFacts(**(values | changes))


def test_the_smallest_instance_that_fits_is_taken() -> None:
    assert instance_for(facts(), None) == ("ml.g6.xlarge", 1)
    assert instance_for(facts(bytes=61 * 10**9), None)[1] == 4
    with pytest.raises(ConfigError, match="--instance"):
        instance_for(facts(bytes=10**12), None)
    assert instance_for(facts(bytes=10**12), "ml.of.tomorrow") == ("ml.of.tomorrow", 1)


@pytest.mark.parametrize(
    ("size", "gpus", "memory_gb"),
    [
        *(("g6.xlarge", 1, 24), ("g6.2xlarge", 1, 24), ("g5.2xlarge", 1, 24), ("g6e.2xlarge", 1, 48)),
        *(("g6.12xlarge", 4, 96), ("g5.12xlarge", 4, 96), ("g6e.12xlarge", 4, 192)),
        *(("p4d.24xlarge", 8, 320), ("p5.48xlarge", 8, 640)),
    ],
)
def test_a_model_may_fill_an_instance(size: str, gpus: int, memory_gb: int) -> None:
    most = int(memory_gb * 10**9 / 1.15)
    assert instance_for(facts(bytes=most - 1, heads=64, cache_bytes=0), f"ml.{size}") == (f"ml.{size}", gpus)
    with pytest.raises(ConfigError, match=rf"about {memory_gb} GB .* has less. Choose a larger --instance"):
        instance_for(facts(bytes=most + 1, heads=64, cache_bytes=0), f"ml.{size}")


def test_an_instance_has_room_for_a_context_and_shares_heads_evenly(tmp_path: Path) -> None:
    shutil.copytree(WEIGHTS_DIR, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    shape = {"num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28, "head_dim": 128}
    config |= {**shape, "max_position_embeddings": 32768, "layer_types": ["full_attention"] * 28}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    found = read_model(tmp_path / "model")
    assert found.cache_bytes == 2 * 28 * 4 * 128 * 2 * 32768
    model = dataclasses.replace(found, bytes=int(15.2e9))
    assert instance_for(model, None) == ("ml.g6.xlarge", 1)
    assert instance_for(model, "ml.p5.48xlarge") == ("ml.p5.48xlarge", 4)  # 28 heads cannot be shared by 8 GPUs
    longer = dataclasses.replace(model, cache_bytes=int(12e9))
    assert instance_for(longer, None) == ("ml.g6e.2xlarge", 1)
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        instance_for(longer, "ml.g6.xlarge")


@pytest.mark.parametrize(
    ("changes", "region", "why"),
    [
        ({"architecture": "Gemma3ForCausalLM"}, "us-west-2", "does not import the architecture"),
        ({}, "eu-west-1", "in us-east-1, us-east-2"),
        ({"architecture": "GptOssForCausalLM"}, "us-west-2", "us-east-1 only"),
        ({"bytes": 200 * 10**9}, "us-west-2", "less than 200 GB"),
        ({"context": 131072}, "us-west-2", "max_position_embeddings"),
        ({"takes_tools": True}, "us-west-2", "--to sagemaker"),
    ],
)
def test_an_import_into_bedrock_is_refused_by_its_cause(changes: dict[str, Any], region: str, why: str) -> None:
    (reason,) = refusals_of_import(facts(**changes), region)
    assert why in reason
    assert refusals_of_import(facts(), "us-west-2") == []
