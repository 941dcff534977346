"""Which requests are model calls of the policy, and where they go."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agentcore_rl_toolkit.app.deployed.routes import Route, current_route, routed, unroute

BASE = "http://127.0.0.1:9/sessions/s1/v1"
CHAT = {"model": "m", "messages": []}


def route(**more: Any) -> Route:
    return Route(base_url=BASE, api_key="session-key", **more)


def sent_to(url: str, body: Any = CHAT, method: str = "POST", **more: Any) -> str | None:
    found = route(**more).redirect(method, url, {}, lambda: json.dumps(body).encode())
    return None if found is None else found.removeprefix(f"{BASE}/")


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("https://api.openai.com/v1/chat/completions", "chat/completions"),
        ("https://API.OpenAI.com:443/v1/responses", "responses"),
        ("https://bedrock-mantle.us-east-1.api.aws/openai/v1/responses", "responses"),
        ("https://bedrock-mantle.us-east-1.api.aws/v1/chat/completions", "chat/completions"),
        ("https://bedrock-runtime.us-west-2.amazonaws.com/openai/v1/chat/completions", "chat/completions"),
        ("https://x.openai.azure.com/openai/deployments/d/chat/completions?api-version=1", "chat/completions"),
        ("https://api.anthropic.com/v1/messages?beta=true", "messages?beta=true"),
        (
            "https://generativelanguage.googleapis.com/v1beta/models/g:streamGenerateContent?alt=sse&key=secret",
            "models/g:streamGenerateContent?alt=sse",
        ),
        (
            "https://bedrock-runtime.us-west-2.amazonaws.com/model/m/converse?X-Amz-Security-Token=s&X-Amz-Signature=s",
            "bedrock/model/m/converse",
        ),
        ("https://x.openai.azure.com/openai/deployments/d/chat/completions?subscription-key=s", "chat/completions"),
        (
            "https://us-central1-aiplatform.googleapis.com/v1/projects/p/locations/l/publishers/google/models/g:generateContent",
            "models/g:generateContent",
        ),
        (
            "https://bedrock-runtime.us-west-2.amazonaws.com/model/us.anthropic.claude%3A0/converse-stream",
            "bedrock/model/us.anthropic.claude%3A0/converse-stream",
        ),
        (
            "https://bedrock-runtime.eu-west-1.amazonaws.com/model/arn%3Aaws%3Abedrock%2Fx/invoke",
            "bedrock/model/arn%3Aaws%3Abedrock%2Fx/invoke",
        ),
        ("https://vpce-1.bedrock-runtime.us-east-1.vpce.amazonaws.com/model/m/converse", "bedrock/model/m/converse"),
        ("https://bedrock-runtime-fips.us-east-1.amazonaws.com/model/m/converse", "bedrock/model/m/converse"),
        ("https://bedrock-runtime.cn-north-1.amazonaws.com.cn/model/m/converse", "bedrock/model/m/converse"),
        ("https://eu.api.openai.com/v1/responses", "responses"),
        ("https://x.services.ai.azure.com/openai/v1/responses", "responses"),
        ("https://x.cognitiveservices.azure.com/openai/deployments/d/chat/completions", "chat/completions"),
        ("https://aiplatform.eu.rep.googleapis.com/v1/projects/p/models/g:generateContent", "models/g:generateContent"),
    ],
)
def test_chats_at_known_hosts_go_to_the_session(url: str, path: str) -> None:
    assert sent_to(url) == path


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("https://api.openai.com/v1/embeddings", {"input": "x"}),
        ("https://bedrock-runtime.us-west-2.amazonaws.com/guardrail/g/version/1/apply", {}),
        ("https://bedrock-runtime.us-west-2.amazonaws.com/model/m/count-tokens", {}),
        ("https://bedrock-runtime.us-west-2.amazonaws.com/model/amazon.titan-embed-text-v2/invoke", {"inputText": "x"}),
        ("https://api.anthropic.com/v1/messages/count_tokens", CHAT),
        ("https://api.openai.com/v1/threads/t/messages", {}),
        ("https://llm.corp.example/v1/chat/completions", CHAT),
        ("https://api.openai.com.evil.example/v1/chat/completions", CHAT),
        ("https://api.openai.com@evil.example/v1/chat/completions", CHAT),
        ("https://evil-api.openai.com/v1/chat/completions", CHAT),
        ("https://bedrock-runtime-logs.s3.us-west-2.amazonaws.com/eval/responses?uploads=", {}),  # a bucket of S3
    ],
)
def test_other_requests_keep_their_address_and_are_counted(url: str, body: Any) -> None:
    found = route()
    headers = {"Authorization": "the agent's own"}
    assert found.redirect("POST", url, headers, lambda: json.dumps(body).encode()) is None
    assert headers == {"Authorization": "the agent's own"}
    assert found.calls["_calls"]["gateway"] == 0 or "evil" in url
    assert sum(found.elsewhere.values()) == 1


def test_requests_that_are_no_model_calls_are_not_counted() -> None:
    found = route()
    for method, url in (("GET", "https://api.openai.com/v1/models"), ("PUT", "https://b.s3.amazonaws.com/key")):
        assert found.redirect(method, url, {}, lambda: b"") is None
    assert not found.elsewhere


def test_a_named_host_is_a_model_host_with_and_without_its_port() -> None:
    url = "http://llm.corp.example:4000/anything/v1/chat/completions"
    assert sent_to(url, hosts=["llm.corp.example"]) == "chat/completions"
    assert sent_to(url, hosts=["LLM.corp.example:4000"]) == "chat/completions"
    assert sent_to(url, hosts=["llm.corp.example:80"]) is None
    assert sent_to(url, hosts=["http://llm.corp.example:4000/v1"]) == "chat/completions"
    assert sent_to(url, hosts=["http://llm.corp.example/v1/"]) == "chat/completions"
    for named in ("[::1]:8000", "[::1]", "::1", "http://[::1]:8000/v1"):
        assert sent_to("http://[::1]:8000/v1/chat/completions", hosts=[named]) == "chat/completions"


@pytest.mark.parametrize("body", [CHAT, {**CHAT, "model": "judge"}])
def test_only_the_policys_models_are_redirected(body: dict[str, Any]) -> None:
    chat = sent_to("https://api.openai.com/v1/chat/completions", body, models=["m*"])
    assert (chat is not None) == (body["model"] == "m")
    azure = "https://x.openai.azure.com/openai/deployments/{}/chat/completions?api-version=1"
    assert sent_to(azure.format("m-1"), {"messages": []}, models=["m*"]) is not None
    assert sent_to(azure.format("m-1"), {"messages": [], "model": "judge"}, models=["m*"]) is None
    bedrock = "https://bedrock-runtime.us-west-2.amazonaws.com/model/{}/converse"
    assert sent_to(bedrock.format("us.anthropic.claude%3A0"), models=["us.anthropic.*:0"]) is not None
    assert sent_to(bedrock.format("amazon.nova-pro"), models=["us.anthropic.*"]) is None


def test_rollouts_of_one_process_take_turns_and_threads_belong_to_the_one_that_runs() -> None:
    found: list[str | None] = []
    begun, second, go = threading.Event(), threading.Event(), threading.Event()

    def ask() -> None:
        route = current_route()
        url = "https://api.openai.com/v1/chat/completions"
        found.append(None if route is None else route.redirect("POST", url, {}, lambda: b"{}"))

    def run_second() -> None:
        begun.set()
        with routed(Route(base_url=BASE.replace("s1", "s2"), api_key="other")):
            second.set()
            go.wait(60)

    unroute()
    ask()
    with ThreadPoolExecutor(2) as threads:
        with routed(route()):
            after = threads.submit(run_second)
            begun.wait(60)
            threads.submit(ask).result()
            assert not second.is_set()
        second.wait(60)
        threads.submit(ask).result()
        go.set()
        after.result()
        threads.submit(ask).result()  # what an agent left running: the gateway refuses it
    unroute()
    ask()
    one, two = f"{BASE}/chat/completions", f"{BASE.replace('s1', 's2')}/chat/completions"
    assert found == [None, one, two, two, None]


def test_a_long_path_takes_linear_time() -> None:
    def cpu_s(length: int) -> float:
        began_s = time.process_time()
        sent_to(f"https://bucket.s3.amazonaws.com/{'model/' * length}x")
        return time.process_time() - began_s

    assert cpu_s(20_000) < 0.5


def test_only_calls_that_ask_the_model_are_counted_at_its_own_address() -> None:
    found = route()
    for method, path in (("GET", "/models"), ("POST", "/chat/completions")):
        assert found.redirect(method, BASE + path, {}, lambda: b"{}") is None
    assert found.calls["_calls"]["gateway"] == 1


@pytest.mark.parametrize("body", [b"[" * 100_000, b"{"])
def test_a_body_that_cannot_be_read_goes_to_its_own_address(body: Any) -> None:
    url = "https://bedrock-runtime.us-west-2.amazonaws.com/model/m/invoke"
    assert route().redirect("POST", url, {}, lambda: body) is None


def test_calls_of_a_forked_child_are_counted() -> None:
    found = route()
    url = "https://api.openai.com/v1/chat/completions"
    child = multiprocessing.get_context("fork").Process(target=found.redirect, args=("POST", url, {}, lambda: b"{}"))
    child.start()
    child.join()
    assert found.calls["_calls"]["gateway"] == 1
