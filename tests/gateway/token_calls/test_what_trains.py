"""A black-box agent's session in token mode: a title, a compaction in three attempts, and what of it trains by default."""

from __future__ import annotations

from typing import Any

from agentcore_rl_toolkit.gateway.testing import ScriptedEngine
from agentcore_rl_toolkit.messages.render import Renderer
from agentcore_rl_toolkit.trajectory import build_trajectory

from ..asking import MODEL, Start, captured, opened
from ..asking import message_of as ask
from .test_histories import CALL, SYSTEM, TOOLS, user

SUMMARIES = (
    "The user wants a sum. Nothing was found so far and all is left to be done from the start once more.",
    "We talked about numbers at some length, and the calculator could be of use to whoever goes on here.",
    "So far 2 + 3 was computed with the calculator, which gave 5. Left: multiply that by 7 and say the result.",
)


async def test_a_title_and_thrown_away_summaries_are_side_calls_and_the_rest_trains(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine, model_dir=str(MODEL))
    renderer = Renderer.from_path(MODEL)
    (stop, *_) = sorted(renderer.stop_token_ids)

    def will_say(text: str) -> None:
        engine.replies.append({"token_ids": [*renderer.encode(text), stop]})

    session = await opened(gateway)
    will_say("Sums")
    await ask(session, [{"role": "system", "content": "You make titles."}, user("2 + 3, times 7")])
    said: list[Any] = [SYSTEM, user("What is 2 + 3, times 7? " + "Take your time. " * 8)]
    will_say(CALL)
    said.append(await ask(session, said, tools=TOOLS))
    said.append({"role": "tool", "tool_call_id": said[-1]["tool_calls"][0]["id"], "content": "5 " * 60})
    for text in SUMMARIES:
        will_say(text)
        await ask(session, [*said, user("Summarise what was done and what is left, for somebody else.")], tools=TOOLS)
    said = [SYSTEM, user(f"This session goes on from an earlier one.\n{SUMMARIES[-1]}\nGo on.")]
    will_say(CALL)
    said.append(await ask(session, said, tools=TOOLS))
    said.append({"role": "tool", "tool_call_id": said[-1]["tool_calls"][0]["id"], "content": "35"})
    will_say("35")
    await ask(session, said, tools=TOOLS)

    capture = await captured(gateway, session)
    sampled = [len(t.completion_ids) for t in capture.turns]
    found = build_trajectory(session.session_id, capture.turns)
    assert found.report.side_calls == {"no_task_tools": sampled[0], "thrown_away": sampled[2] + sampled[3]}
    assert found.report.trained_tokens == sampled[1] + sum(sampled[4:])
    assert found.report.sequences == 2
    assert found.report.branch_reasons["compaction"] == 1
    (after,) = (s for s in found.sequences if s.branch_reason == "compaction")
    assert after.turn_ids == [t.turn_id for t in capture.turns[-2:]]
