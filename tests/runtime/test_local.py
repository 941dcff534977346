"""The runtime as an object."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from typing import Any

import boto3
import pytest

from agentcore_rl_toolkit.errors import LocalRuntimeError
from agentcore_rl_toolkit.runtime import LocalRuntime
from agentcore_rl_toolkit.runtime.config import IsolationConfig, RuntimeConfig
from agentcore_rl_toolkit.runtime.launcher.handle import TemplateProcess
from agentcore_rl_toolkit.runtime.remote import RuntimeView
from agentcore_rl_toolkit.runtime.runtime import Runtime
from serving import answering

from .conftest import AGENTS, Server, alive, wait_for


def test_it_serves_within_its_block_and_is_gone_after_it() -> None:
    with LocalRuntime({"probe": AGENTS / "bare.py"}, ["--quotas", "aws-2026"]) as runtime:
        client = boto3.client(
            "bedrock-agentcore",
            endpoint_url=runtime.url,
            region_name="us-west-2",
            **runtime.credentials,
        )
        reply = client.invoke_agent_runtime(agentRuntimeArn=runtime.arns["probe"], payload=b"{}")
        assert reply["response"].read()
        assert runtime.view.get("/_local/status")["quotas"] == "aws-2026"
    assert not alive(runtime.pid)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(runtime.url, timeout=2)
    runtime.stop()


def test_an_agent_that_does_not_load_is_an_error_with_its_traceback() -> None:
    with pytest.raises(LocalRuntimeError, match="No module named 'nothing_of_this_name'") as error:
        LocalRuntime({"broken": AGENTS / "broken.py"}).start()
    assert f'File "{AGENTS / "broken.py"}", line 3' in str(error.value)
    assert "agentcore_rl_toolkit/runtime" not in str(error.value)


def test_old_versions_do_not_keep_their_processes(server: Server) -> None:
    for _ in range(3):
        server.view.deploy(AGENTS / "bare.py", "often", {})

    def versions() -> list[int]:
        templates = server.view.get("/_local/status")["templates"]
        return [t["version"] for t in templates if t["runtime_id"].startswith("often-")]

    wait_for(lambda: versions() == [3])


@pytest.mark.parametrize(
    ("facts", "warning"),
    [
        ({"no_view": "unshare: refused"}, "its project is read-only in sessions, because .*unshare: refused"),
        ({"no_overlay": ["/tmp", "/project/mounted"]}, "sessions share /tmp, /project/mounted"),
    ],
)
async def test_a_view_that_the_kernel_refuses_in_part_or_in_all_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, facts: dict[str, Any], warning: str
) -> None:
    async def start(template: TemplateProcess) -> None:
        vars(template).update(facts)

    monkeypatch.setattr(TemplateProcess, "start", start)
    runtime = Runtime(RuntimeConfig(isolation=IsolationConfig(tier="none")))
    await runtime.start([("probe", AGENTS / "bare.py")])
    await runtime.close()
    assert len(re.findall(warning, caplog.text)) == 1


@pytest.mark.parametrize("headers", [{"content-length": "50"}, {"transfer-encoding": "chunked"}])
def test_a_reply_of_the_runtime_that_breaks_off_is_an_error_of_the_runtime(headers: dict[str, str]) -> None:
    cut = {**headers, "connection": "close"}
    with answering(lambda _: (200, b'{"sessions"', cut)) as url:
        view = RuntimeView(url, ("key", "secret"), timeout_s=5)
        with pytest.raises(LocalRuntimeError, match="cannot reach the runtime"):
            view.sessions()
