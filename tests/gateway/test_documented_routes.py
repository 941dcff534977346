"""The routes that `docs/gateway.md` lists for agents are the routes that a gateway serves."""

from __future__ import annotations

import re
from pathlib import Path

import httpx

from agentcore_rl_toolkit.gateway import Gateway, SessionHandle

PAGE = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text("utf-8")
LISTED = re.findall(r"`(GET|POST) (/[^`]*)`", "".join(re.findall(r"^\| `(?:GET|POST) .*$", PAGE, re.MULTILINE)))


async def test_every_documented_route_is_served_and_every_served_route_is_documented(
    gateway: Gateway, session: SessionHandle
) -> None:
    assert len(LISTED) == 13
    key = {"authorization": f"Bearer {session.api_key}"}
    async with httpx.AsyncClient(headers=key) as agent:
        for method, path in LISTED:
            url = session.base_url + path.replace("{id}", "scripted").replace("{model}", "scripted")
            reply = await agent.request(method, url, content=b"[]" if method == "POST" else None)
            assert reply.status_code == (400 if method == "POST" else 200), f"{method} {path}: {reply.text}"
        missing = await agent.post(session.base_url + "/completions", json={})
        assert missing.status_code == 404
        served = re.split(", | and ", missing.json()["error"]["message"].partition("there are ")[2].strip())
        assert sorted(served) == sorted({re.sub("/(count_tokens|{id}|model/.*)$", "", path)[1:] for _, path in LISTED})
        for path in re.findall(r"`GET (/[a-z]+)`", PAGE):
            if path not in {listed for _, listed in LISTED}:
                assert (await agent.get(gateway.url + path)).status_code in (200, 401), path
