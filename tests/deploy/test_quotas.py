"""Quotas: read in Service Quotas' wire shape with unmodified boto3, AWS's defaults where that has none, shown before a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest

from agentcore_rl_toolkit.deploy import quotas
from agentcore_rl_toolkit.deploy.quotas import Quotas
from agentcore_rl_toolkit.errors import ConfigError
from serving import Asked, answering

from ..conftest import CommandLine

ARN = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/shop-5RAgoLKvAy"
LISTED: list[dict[str, Any]] = [
    {"QuotaName": "Active Session Workloads per Account", "Value": 1000.0},
    {
        "QuotaName": "Rate of new Runtime session creation",
        "Value": 100.0,
        "Period": {"PeriodValue": 1, "PeriodUnit": "SECOND"},
    },
    {"QuotaName": "Rate of Runtime data plane APIs", "Value": 50.0},
    {"QuotaName": "Total Agents", "Value": 100.0},
]


@dataclass
class Service:
    """Gives what Service Quotas lists in pages of two; refuses where ``listed`` is None."""

    listed: list[dict[str, Any]] | None = field(default_factory=lambda: LISTED)
    regions: set[str] = field(default_factory=set)

    def answer(self, request: Asked) -> tuple[Any, ...]:
        asked = json.loads(request.body)
        self.regions.add(request.headers["authorization"].split("/")[2])
        assert asked["ServiceCode"] == "bedrock-agentcore"
        at = int(asked.get("NextToken", 0))
        if self.listed is None:
            return 400, {"__type": "AccessDeniedException", "Message": "not allowed"}
        more = {"NextToken": str(at + 2)} if at + 2 < len(self.listed) else {}
        return 200, {"Quotas": self.listed[at : at + 2], **more}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    service = Service()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    with answering(service.answer) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SERVICE_QUOTAS", url)
        yield service


def test_a_quota_that_is_not_listed_or_not_readable_is_awss_default(service: Service) -> None:
    client = boto3.client("service-quotas", region_name="us-west-2")
    assert quotas.read(client) == Quotas(sessions=1000, new_sessions_per_s=100, requests_per_s=50)
    service.listed = [{"QuotaName": "Active Session Workloads per Account", "Value": 25.0}]
    assert quotas.read(client) == Quotas(sessions=25)
    service.listed = [{"QuotaName": "Rate of new Runtime session creation", "Value": 25.0}]
    assert quotas.read(client) == Quotas()  # 25 per second is the default of agents deployed as code
    service.listed = None
    found = quotas.read(client)
    assert found == Quotas(why=found.why)
    assert "AccessDeniedException; servicequotas:ListServiceQuotas" in found.why
    assert "5,000 sessions alive, 400 new ones per minute, 200 requests per second" in quotas.line(found)


def test_a_local_runtime_has_no_quotas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_SERVICE_QUOTAS", raising=False)
    assert quotas.before_a_run(ARN, endpoint_url="http://127.0.0.1:1", rollouts=1) is None


def test_a_run_shows_the_quotas_of_the_agents_region_and_its_cost(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE"):
        monkeypatch.delenv(name, raising=False)
    line = (
        "quotas (Service Quotas): 1,000 sessions alive, 6,000 new ones per minute, 50 requests per second; to start 128,000 "
        "rollouts takes about 43 min; 128,000 rollouts of 5 min, 12 s of CPU and 0.5 GB cost about $111.48 on AgentCore Runtime "
        "(prices of November 2026; without the model)"
    )
    for endpoint_url in (None, "http://127.0.0.1:1"):  # a test of AWS's API has its own Service Quotas
        assert quotas.before_a_run(ARN, endpoint_url=endpoint_url, rollouts=128_000) == line
    assert service.regions == {"us-west-2"}
    assert quotas.before_a_run("arn:aws:local") is None
    assert quotas.nothing_runs(Quotas(sessions=1)) is None
    service.listed = [{"QuotaName": "Active Session Workloads per Account", "Value": 0.0}]
    with pytest.raises(
        ConfigError, match="quota of sessions alive at once on AgentCore Runtime is 0, so that nothing can run"
    ):
        quotas.before_a_run(ARN)


def test_eval_and_train_refuse_before_anything_starts(
    service: Service, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, command_line: CommandLine
) -> None:
    service.listed = [{"QuotaName": "Active Session Workloads per Account", "Value": 0.0}]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "store").mkdir()
    model = Path(quotas.__file__).parents[1] / "policy" / "weights"  # its tokenizer and chat template
    (tmp_path / "tinker.toml").write_text(
        f'exp_id = "e"\nagent_runtime_arn = "{ARN}"\ns3_bucket = "file://{tmp_path}/store"\nbase_model = "m"\n'
        f'model_dir = "{model}"\ndata_path = "rows.jsonl"\noutput_dir = "out"\n'
    )
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    for words in (
        ["eval", "--agent", ARN, "--bucket", f"file://{tmp_path}/store", "--data", "rows.jsonl"],
        ["train", "--backend", "tinker", "--config", "tinker.toml"],
    ):
        done = command_line(*words)
        assert done.returncode != 0
        assert "quota of sessions alive at once" in done.stderr, words
