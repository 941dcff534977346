"""Every metric that the Grafana dashboard shows is one that the running servers and the client expose after a rollout."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import openai
import prometheus_client
import pytest

from agentcore_rl_toolkit._servers.keys import find
from agentcore_rl_toolkit.client import RolloutClient, export_prometheus
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.gateway.testing import ScriptedModel
from agentcore_rl_toolkit.runtime import LocalRuntime
from serving import gateway_before

pytestmark = pytest.mark.timeout(600)
DASHBOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "agentcore-rl.json"
AGENT = """
from agentcore_rl_toolkit import AgentCoreRLApp
app = AgentCoreRLApp()

@app.rollout_entrypoint
def invoke_agent(payload):
    if payload.get("fail"):
        raise ValueError("no lamp")
    return {"rewards": 1.0}

app.run()
"""


def shown() -> dict[str, set[str]]:
    """Metric -> labels that the dashboard uses of it."""
    found: dict[str, set[str]] = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            by = re.search(r"by \(([^)]*)\)", target["expr"])
            labels = {name.strip() for name in by[1].split(",")} if by else set()
            labels |= set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            for name in re.findall(r"agentcore_(?:rl|runtime)_\w+", target["expr"]):
                found.setdefault(name, set()).update(labels)
    return found


def exposed(text: str) -> dict[str, set[str]]:
    """Sample -> its labels, by Prometheus' own parser."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_each_metric_is_exposed_with_its_labels_after_a_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "local")
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "store").mkdir()
    registry, texts = prometheus_client.CollectorRegistry(), []

    def read(url: str, key: str | None = None) -> str:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as reply:
            return str(reply.read().decode())

    with (
        ScriptedModel(lambda messages, tools: "None.") as model,
        LocalRuntime({"a": tmp_path / "agent.py"}, ["--store", str(tmp_path / "store")]) as runtime,
    ):
        with gateway_before(model.url) as gateway:
            [session] = GatewayClient(gateway.url).create_sessions(["one"])
            with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as agent:
                question: Any = [{"role": "user", "content": "How many lamps?"}]
                agent.chat.completions.create(model="m", messages=question)
            texts.append(read(f"{gateway.url}/metrics", find("gateway", gateway.url)))
        arn, store = runtime.arns["a"], f"file://{tmp_path / 'store'}"
        with RolloutClient(arn, store, "exp", endpoint_url=runtime.url) as client:
            export_prometheus(client, registry=registry)
            client.map([{}, {"fail": True}], 1)
        texts.append(runtime.view.call("GET", "/_local/metrics").decode())
        texts.append(prometheus_client.generate_latest(registry).decode())
    found: dict[str, set[str]] = {}
    for text in texts:
        found |= exposed(text)
    wanted = shown()
    assert len(wanted) > 25
    assert set(wanted) - set(found) == set()
    missing = {name: labels - found[name] - {"le"} for name, labels in wanted.items() if labels - found[name] - {"le"}}
    assert missing == {}
