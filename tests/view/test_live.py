"""`agentcore-rl view` of a running gateway: its sessions in the browser while they grow."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from agentcore_rl_toolkit._portal import Portal
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, UpstreamConfig
from agentcore_rl_toolkit.gateway.testing import ScriptedModel
from agentcore_rl_toolkit.view import live

pytestmark = pytest.mark.timeout(600)


@dataclass
class Running:
    url: str
    client: GatewayClient
    answer_now: threading.Event  # the model waits for it when it is asked to be slow


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    answer_now = threading.Event()

    def decide(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        if "slow" in messages[-1]["content"]:
            assert answer_now.wait(120)
        return f"You said: {messages[-1]['content']}"

    portal = Portal("gateway-of-the-test")
    with ScriptedModel(decide) as model:
        made = Gateway(GatewayConfig(upstreams=(UpstreamConfig(url=model.url, engine="vllm"),)))
        portal.call(made.start())
        yield Running(made.url, GatewayClient(made.url), answer_now)
        answer_now.set()
        portal.call(made.stop(grace_s=0.2))
    portal.close()


def say(session: Any, text: str) -> None:
    with openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])


def test_sessions_are_listed_with_their_running_calls(gateway: Running) -> None:
    quick, slow = gateway.client.create_sessions(["listed-1", "listed-2"], metadata={"input_id": "sum"})
    say(quick, "hello")
    calling = threading.Thread(target=say, args=(slow, "slow"))
    gateway.answer_now.clear()
    calling.start()
    deadline = time.monotonic() + 60
    while not (running := gateway.client.sessions(running=True)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert [s["session_id"] for s in running] == ["listed-2"]
    [call] = running[0]["calls"]
    assert call["state"] in ("routed", "sent")
    assert call["seconds"] >= 0
    found = {s["session_id"]: s for s in gateway.client.sessions()}
    assert (found["listed-1"]["turns"], found["listed-1"]["calls"], found["listed-1"]["closed_s"]) == (1, [], None)
    assert found["listed-1"]["last_call_s"] > found["listed-1"]["created_s"]
    gateway.answer_now.set()
    calling.join(60)
    assert gateway.client.sessions(running=True) == []


@pytest.mark.system
def test_a_session_is_seen_in_the_browser_as_it_grows(
    gateway: Running, browser: Any, tmp_path: Path, serve_view: Callable[..., AbstractContextManager[str]]
) -> None:
    [session] = gateway.client.create_sessions(["seen"], metadata={"input_id": "lamps"})
    say(session, "first <b>question</b>")
    entries: list[str] = []
    with serve_view(tmp_path, gateway.url) as url:
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        page.set_default_timeout(60_000)
        page.on("console", lambda m: entries.append(m.text) if m.type in ("error", "warning") else None)
        page.goto(url)
        page.click("#page table a:text-is('session')")
        page.click(".rows .row:has-text('lamps')")
        page.wait_for_selector("#dialogue:has-text('You said: first <b>question</b>')")
        assert page.locator(".tokens .trained").count() > 0
        page.wait_for_selector(".live:text-is('live')")
        # Every look of the server may be its first at this gateway: go on until one is seen.
        for n in range(60):
            say(session, f"question {n}")
            if "question 0" in page.inner_text("#dialogue"):
                break
            page.wait_for_timeout(500)
        page.wait_for_selector("#dialogue:has-text('You said: question 0')")
        gateway.client.fetch(["seen"])
        page.wait_for_selector(".fact b:text-is('closed')")
        assert re.search(r"/rollout/\d+$", page.url)
        page.close()
    assert entries == []


def test_a_look_that_fails_ends_no_mirror(
    gateway: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "LOOK_S", 0.01)
    mirror = live.GatewayMirror(gateway.url, tmp_path / "run")
    copy, failures = mirror._copy, [KeyError("of a kind that nobody foresaw")]
    mirror.start()
    try:

        def fails_once(sessions: Any) -> None:
            if failures:
                raise failures.pop()
            copy(sessions)

        monkeypatch.setattr(mirror, "_copy", fails_once)
        gateway.client.create_sessions(["late"])
        deadline_s = time.monotonic() + 60
        while "late" not in mirror._known:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    finally:
        mirror.stop()
    assert not failures
    assert "of a kind that nobody foresaw" in caplog.text
