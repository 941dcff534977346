"""Calls cut off at random moments: what is recorded and trained is what the engine sampled, token for token.

Agents talk to a gateway in front of the built-in policy behind SGLang's interface. Meanwhile the engine aborts what it
runs, as slime has it do at the end of a step; agents hang up and ask again; sessions are closed under running calls.
Every call has a name, which the gateway gives the engine, so each record is held against its own generation. Four
agents each have the same problems, as the rollouts of a group do: many calls begin alike and differ in where they end.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import agentcore_rl_toolkit
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import GatewayClient, SessionCapture, SessionHandle
from agentcore_rl_toolkit.policy.problems import problems
from agentcore_rl_toolkit.trajectory import build_trajectory

from .sampled import Line, read_journal, turns_of
from .serving import serving

HERE = Path(__file__).parent
POLICY = Path(agentcore_rl_toolkit.__file__).parent / "policy/weights"
SESSIONS, TURNS, GROUP = 16, 8, 4
HANGS_UP = 0.3
PACE_S = 0.0005  # a token of each running call: answers take long enough to be cut off in the middle
pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]


class Place:
    def __init__(self, folder: Path, engine_url: str, gateway_url: str) -> None:
        self.journal, self.engine_url = folder / "engine.jsonl", engine_url
        self.client = GatewayClient(gateway_url)
        self.seen: dict[str, list[tuple[int, int, str]]] = {}  # what agents got whole, by session
        self.refused: set[str] = set()
        self.hung_up = 0

    def whole(self) -> int:
        """Answers that agents got and that ended by themselves."""
        return sum(finish != "abort" for facts in self.seen.values() for *_, finish in facts)

    async def abort_all(self, http: httpx.AsyncClient) -> None:
        (await http.post(f"{self.engine_url}/abort_request", json={"abort_all": True})).raise_for_status()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    engine_command = [sys.executable, str(HERE / "sglang_server.py"), "--journal", str(tmp_path / "engine.jsonl")]
    engine_command += ["--pace", str(PACE_S)]
    gateway_command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "gateway", "serve", "--engine", "sglang"]
    gateway_command += ["--model", str(POLICY), "--store", str(tmp_path / "turns")]
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(serving("engine", engine_command, tmp_path))
        gateway_command += ["--upstream", engine["url"]]
        gateway = stack.enter_context(serving("gateway", gateway_command, tmp_path))
        yield Place(tmp_path, engine["url"], gateway["url"])


async def ask(llm: openai.AsyncOpenAI, messages: list[Any], *, stream: bool) -> tuple[str, tuple[int, int, str]]:
    """The reply's text, and what names it: length of prompt and completion in tokens, finish reason."""
    if not stream:
        whole = await llm.chat.completions.create(model="policy", messages=messages, max_tokens=64)
        assert whole.usage is not None
        facts = (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.choices[0].finish_reason)
        return whole.choices[0].message.content or "", facts
    text, finish, usage = "", "", None
    async for part in await llm.chat.completions.create(
        model="policy", messages=messages, max_tokens=64, stream=True, stream_options={"include_usage": True}
    ):
        usage = part.usage or usage
        for choice in part.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert usage is not None
    return text, (usage.prompt_tokens, usage.completion_tokens, finish)


async def talk(place: Place, handle: SessionHandle, group: int, chance: random.Random) -> None:
    """One agent: several turns, now and then hanging up in the middle of one and asking the same again."""
    seen = place.seen.setdefault(handle.session_id, [])
    asked = problems("train", TURNS, seed=group)
    messages: list[Any] = [{"role": "system", "content": "Solve the problem."}]
    async with openai.AsyncOpenAI(base_url=handle.base_url, api_key=handle.api_key, max_retries=1) as llm:
        for problem in asked:
            messages.append({"role": "user", "content": problem.prompt})
            while True:
                patience_s = chance.uniform(0.01, 0.4) if chance.random() < HANGS_UP else None
                try:
                    async with asyncio.timeout(patience_s):
                        text, facts = await ask(llm, messages, stream=chance.random() < 0.5)
                except TimeoutError:
                    place.hung_up += 1
                    continue
                except openai.APIError:  # the session was closed
                    place.refused.add(handle.session_id)
                    return
                seen.append(facts)
                messages.append({"role": "assistant", "content": text})
                break


def own_line(journal: list[Line], turn_id: str) -> Line:
    """The generation that the engine ran for a call: its last attempt."""
    found = [line for line in journal if line["rid"].rpartition("-")[0] == turn_id]
    assert found, f"the engine never ran call {turn_id}"
    return found[-1]


def check(capture: SessionCapture, seen: list[tuple[int, int, str]], journal: list[Line]) -> Counter[str]:
    """Every record is its generation; what is trained ended by itself; what the agent got is recorded."""
    found: Counter[str] = Counter()
    lines = {turn.turn_id: own_line(journal, turn.turn_id) for turn in capture.turns}
    recorded: Counter[tuple[int, int, str]] = Counter()
    for turn in capture.turns:
        line = lines[turn.turn_id]
        assert list(turn.prompt_ids) == line["prompt"]
        assert list(turn.completion_ids) == line["ids"]
        assert list(turn.logprobs) == line["logprobs"]
        assert turn.finish_reason == line["finish"]
        recorded[len(turn.prompt_ids), len(turn.completion_ids), turn.finish_reason or ""] += 1
        found["cut in the middle" if turn.finish_reason == "abort" and turn.completion_ids else line["finish"]] += 1
    assert not Counter(seen) - recorded
    trained = []
    trajectory = build_trajectory(capture.session_id, capture.turns)
    for sequence in trajectory.sequences:
        start = sequence.prompt_length
        sample = {
            "tokens": sequence.token_ids,
            "response_length": len(sequence.token_ids) - start,
            "loss_mask": sequence.loss_mask[start:],
            "logprobs": sequence.logprobs[start:],
        }
        own = [lines[name] for name in sequence.turn_ids]
        assert turns_of(sample, own) == own
        assert [turn["ids"] for turn in turns_of(sample, journal)] == [turn["ids"] for turn in own]
        trained += sequence.turn_ids
    whole = [turn.turn_id for turn in capture.turns if turn.why_untrainable() is None]
    assert all(lines[name]["finish"] != "abort" for name in whole)
    # Each finished call exactly once, but for answers that found their agent gone and were asked for anew.
    lost = trajectory.report.superseded_turns + trajectory.report.untrainable_reasons.get("not_delivered", 0)
    assert len(set(trained)) == len(trained) == len(whole) - lost
    assert set(trained) <= set(whole)
    found["trained"] = len(trained)
    return found


async def test_calls_cut_off_at_random_moments_are_recorded_as_they_were_sampled(place: Place) -> None:
    chance = random.Random(1)
    handles = await place.client.create_sessions_async([new_session_id() for _ in range(SESSIONS)])
    agents = [
        asyncio.create_task(talk(place, handle, i // GROUP, random.Random(chance.random())))
        for i, handle in enumerate(handles)
    ]
    closed: dict[str, SessionCapture] = {}
    async with httpx.AsyncClient(timeout=30) as http:
        give_up_s, enough = time.monotonic() + 120, 0
        while not all(agent.done() for agent in agents):
            assert time.monotonic() < give_up_s
            await asyncio.sleep(chance.uniform(0.01, 0.05))
            if place.whole() < enough:
                continue
            # By answers and not by time, so that a slow machine does not see nearly all of its calls cut.
            enough = place.whole() + chance.randrange(4, 12)
            await place.abort_all(http)
            running = [h.session_id for h, agent in zip(handles, agents, strict=True) if not agent.done()]
            if running and len(closed) < SESSIONS // 4 and chance.random() < 0.5:
                closed |= await place.client.fetch_async([chance.choice(running)], close=True)
    await asyncio.gather(*agents)
    assert place.refused <= closed.keys()
    captures = await place.client.fetch_async([h.session_id for h in handles])
    for name, capture in closed.items():
        assert [t.turn_id for t in captures[name].turns] == [t.turn_id for t in capture.turns]  # no late turn

    journal = read_journal(place.journal)
    found: Counter[str] = Counter()
    for handle in handles:
        found += check(captures[handle.session_id], place.seen[handle.session_id], journal)
    assert len({line["rid"] for line in journal}) == len(journal)
    assert found["cut in the middle"] >= 5, found
    assert found["trained"] >= SESSIONS, found
    assert place.hung_up >= 5
    # A call that an agent hung up on is no turn, though the engine sampled for it.
    named = {turn.turn_id for capture in captures.values() for turn in capture.turns}
    assert any(line["ids"] and line["rid"].rpartition("-")[0] not in named for line in journal)
