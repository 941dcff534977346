"""Which calls of a session train by default: the shapes of requests that real frameworks make, over HTTP, in token mode.

Each row of the table is a small agent. It plays the framework's part: whose prompt has whose answer, in which message.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from agentcore_rl_toolkit.gateway import SessionHandle
from agentcore_rl_toolkit.messages.render import Renderer
from agentcore_rl_toolkit.trajectory import build_trajectory
from scripted_engine import Fault, ScriptedEngine

from ..asking import MODEL, Start, captured, opened, until
from ..asking import message_of as ask

RENDERER = Renderer.from_path(MODEL)
TASK = "Find out why the harbor bridge closed in March and write two sentences about it."
FOUND = "The bridge closed on March 3 because inspectors found cracked bolts in its northern tower."
PLAN = "First read the inspection log of the harbor office, then compare its dates with the closure."
SUMMARY = "So far the log of March was read, and the crack in the northern tower is the likely cause."


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(call: dict[str, Any], text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": text}


def offer(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]


def calls(tool: str, **arguments: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": tool, "arguments": arguments}) + "\n</tool_call>"


class Model:
    """Answers each call with the text that the row wants it to have. One conversation may think for long."""

    def __init__(self, engine: ScriptedEngine, session: SessionHandle, thinker: str | None) -> None:
        self.engine, self.session, self.thinker = engine, session, thinker
        self.names: list[str] = []  # of the calls, in the order of their start

    async def says(
        self, name: str, text: str, messages: list[Any], *tools: str, tag: str | None = None, **fields: Any
    ) -> dict[str, Any]:
        thought = "<think>\n" + "well " * 60 + "\n</think>\n\n" if name == self.thinker else ""
        (stop, *_) = sorted(RENDERER.stop_token_ids)
        self.engine.replies.append({"token_ids": [*RENDERER.encode(thought + text), stop]})
        self.names.append(name)
        if tools:
            fields["tools"] = offer(*tools)
        session = self.session if tag is None else replace(self.session, base_url=f"{self.session.base_url}/tag/{tag}")
        return await ask(session, messages, **fields)

    async def at_once(self, *waiting: Callable[[], Awaitable[Any]]) -> None:
        """Make calls of which none ends before all have begun."""
        gate = Fault(gate=asyncio.Event())
        self.engine.faults += [gate] * len(waiting)
        running = []
        for call in waiting:
            begun = len(self.engine.calls)
            running.append(asyncio.ensure_future(call()))
            await until(lambda begun=begun: len(self.engine.calls) > begun)
        assert gate.gate is not None
        await asyncio.sleep(0)  # the engine's last task waits at the gate, too, so that replies go out in this order
        gate.gate.set()
        await asyncio.gather(*running)

    async def works(self, name: str, *tools: str, messages: list[Any] | None = None, final: str = FOUND) -> list[Any]:
        """An agent that calls its first tool, then answers; all that was said."""
        said = messages or [system("You are a careful agent."), user(TASK)]
        said = [*said, await self.says(name, calls(tools[0], path="/srv/log"), said, *tools)]
        said.append(result(said[-1], "March 3: bolts cracked, tower north. March 4: closed."))
        return [*said, await self.says(name, final, said, *tools)]


async def title_first(model: Model) -> None:
    """opencode, with a title in words of the task."""
    await model.says("-title", "Find out why the harbor bridge closed in March", [system("Make a title."), user(TASK)])
    await model.works("main", "read", "edit")


async def title_beside(model: Model) -> None:
    said = [system("You are a careful agent."), user(TASK)]
    await model.at_once(
        lambda: model.says("main", FOUND, said, "read"),
        lambda: model.says("-title", "Bridge", [system("Make a title."), user(TASK)]),
    )


async def title_beside_in_words_of_the_task(model: Model) -> None:
    """A later prompt repeats the task, in which the title's words were before the title."""
    said = [system("You are a careful agent."), user(TASK)]
    task = f"The user wants this: {TASK} Read the log for it."
    await model.at_once(
        lambda: model.says("main", calls("task", description=task), said, "task"),
        lambda: model.says(
            "-title", "Find out why the harbor bridge closed in March", [system("A title."), user(TASK)]
        ),
    )
    await model.works("helper", "read", messages=[system("You help."), user(task)])


async def evaluator_after_a_task(model: Model) -> None:
    """CrewAI: between two tasks a call rates the first one and repeats its answer. Only the answer goes on."""
    said = await model.works("research", "search")
    await model.says("-rating", f"{FOUND} Rated 7 of 10.", [system("You rate."), *said[1:], user("Rate this.")])
    await model.works("check", "verify", messages=[system("You check."), user(f"Check.\n\nContext:\n{FOUND}")])


async def notes_in_the_system_text(model: Model) -> None:
    """A memory: what another call noted is in the system text from then on, and the history is as long as before."""
    said = [system("You are a careful agent. Notes: none."), user(TASK)]
    said.append(await model.says("main", calls("read", path="/a"), said, "read"))
    said.append(result(said[-1], "March 3: bolts cracked, tower north."))
    await model.says("notes", SUMMARY, [system("Take notes."), user(json.dumps(said))])
    said[0] = system(f"You are a careful agent. Notes: {SUMMARY}")
    await model.says("main", FOUND, said, "read")


async def a_result_nested_deeply(model: Model) -> None:
    """A tool gives brackets that no JSON decoder follows to their end."""
    said = [system("You are a careful agent."), user(TASK)]
    said.append(await model.says("main", calls("read", path="/a"), said, "read"))
    said.append(result(said[-1], "[" * 20_000 + "]" * 20_000))
    await model.says("main", FOUND, said, "read")


async def text_without_spaces(model: Model) -> None:
    """Chinese: the answer is quoted inside sentences."""
    found, task = "检查员在北塔发现了开裂的螺栓因此港口大桥于三月三日关闭", "查明港口大桥在三月关闭的原因并写出两句话"
    said = [system("You manage."), user(task)]
    said.append(await model.says("main", calls("delegate_work", task=task[:12]), said, "delegate_work"))
    await model.works("worker", "search", messages=[system("专家"), user(f"请立即{task[:12]}谢谢")], final=found)
    said.append(result(said[-1], f"同事的结果是{found}结束"))
    await model.says("main", "螺栓", said, "delegate_work")


async def form_first(model: Model) -> None:
    """A router that must fill in a form, then the agent."""
    choice = {"type": "function", "function": {"name": "route"}}
    await model.says("-router", calls("route", to="bridges"), [user(TASK)], "route", tool_choice=choice)
    await model.works("main", "read", "edit")


async def after_the_end(model: Model) -> None:
    """qwen-code: topic, suggestion and memory extraction, at once after the answer."""
    said = await model.works("main", "read", "edit", "write")
    dialog = "\n".join(f"{m['role']}: {m['content']}" for m in said if m.get("content"))
    await model.at_once(
        lambda: model.says("-topic", "Bridges", [system("Name the topic."), user(dialog)]),
        lambda: model.says("-suggestion", "commit this", [*said, user("[SUGGESTION MODE: what is next?]")]),
        lambda: model.works(
            "-memory", "write", "read", messages=[system("You extract memories."), *said[1:], user("Extract.")]
        ),
    )


async def question_on_the_way(model: Model) -> None:
    """A check of the history between two calls, and a summary of a tool's result: the agent goes on without either."""
    said = [system("You are a careful agent."), user(TASK)]
    said.append(await model.says("main", "I will read the log. " + calls("read", path="/srv/log"), said, "read"))
    said.append(result(said[-1], "March 3: bolts cracked."))
    await model.says("-check", "no", [system("Is it stuck?"), *said[1:], user("Say yes or no.")])
    await model.says("-label", "Read the log", [user("Label this: I will read the log. March 3: bolts cracked.")])
    await model.says("main", FOUND, said, "read")


async def agents_as_tools(model: Model) -> None:
    """OpenAI Agents, Strands: the expert's answer is a tool's result. Short ones, too."""
    said = [system("You supervise."), user(TASK)]
    for expert, answer in (("history", FOUND), ("sums", "42")):
        said.append(
            await model.says("main", calls(f"ask_{expert}", input=f"Look at {expert}"), said, "ask_history", "ask_sums")
        )
        await model.works(
            expert,
            f"search_{expert}",
            messages=[system(f"You know {expert}."), user(f"Look at {expert}")],
            final=answer,
        )
        said.append(result(said[-1], answer if expert == "history" else json.dumps({"output": answer})))
    await model.says("main", "Cracked bolts, and 42.", said, "ask_history", "ask_sums")


async def crew_in_sequence(model: Model) -> None:
    """CrewAI: the next task has the answer as its context; the last one has no tools."""
    await model.works("research", "search")
    await model.works(
        "check", "verify", messages=[system("You check."), user(f"Check.\n\nContext:\n{FOUND}")], final=PLAN
    )
    await model.says("write", "A bridge closed.", [system("You write."), user(f"Write.\n\nContext:\n{PLAN}")])


async def crew_with_a_manager(model: Model) -> None:
    """CrewAI: the task is in the arguments, and the coworker's answer is wrapped."""
    task = "Establish the reason for the closure of the bridge"
    said = [system("You manage."), user(TASK)]
    said.append(await model.says("main", calls("delegate_work", task=task, coworker="expert"), said, "delegate_work"))
    await model.works(
        "worker", "search", messages=[system("You are an expert."), user(f"Current Task: {task}\nBegin!")]
    )
    said.append(result(said[-1], f"Result of the coworker:\n{FOUND}\nEnd."))
    await model.says("main", "Bolts.", said, "delegate_work")


async def handoff(model: Model) -> None:
    """OpenAI Agents: the other agent gets the history, which ends with the call that hands over."""
    said = [system("You are triage."), user(TASK)]
    said.append(await model.says("triage", calls("transfer_to_history"), said, "transfer_to_history"))
    said.append(result(said[-1], '{"assistant": "history"}'))
    await model.works("history", "search", messages=[system("You know history."), *said[1:]])


async def supervisor_with_experts(model: Model) -> None:
    """LangGraph: experts get the history, and the supervisor gets their answers as messages of the assistant."""
    said = [user(TASK)]
    tools = ("to_a", "to_b", "to_c")
    for expert in "abc":
        said.append(await model.says("main", calls(f"to_{expert}"), [system("You supervise."), *said], *tools))
        said.append(result(said[-1], "Transferred."))
        worked = await model.works(
            expert, f"search_{expert}", messages=[system(f"You are {expert}."), *said], final=f"{expert}!"
        )
        said.append({**worked[-1], "name": expert})
    await model.says("main", FOUND, [system("You supervise."), *said], *tools)


async def planner_and_executor(model: Model) -> None:
    await model.says("planner", PLAN, [system("You plan."), user(TASK)])
    await model.works("executor", "read", messages=[system("You execute."), user(f"Task: {TASK}\nPlan: {PLAN}")])
    await model.says("replanner", "Bolts.", [system("You conclude."), user(f"Task: {TASK}\nDone: {FOUND}")])


async def sub_agents(model: Model) -> None:
    """deepagents, opencode: a task in the arguments. Of one, the parent only learns that it is done."""
    said = [system("You lead."), user(TASK)]
    for name in ("first", "second"):
        task = f"Read the {name} part of the log and correct every date in it"
        said.append(await model.says("main", calls("task", description=task), said, "task", "read"))
        await model.works(name, "read", "edit", messages=[system("You help."), user(task)], final=FOUND)
        said.append(result(said[-1], FOUND if name == "first" else "done"))
    await model.says("main", "Bolts.", said, "task", "read")


async def summaries_of_their_own_prompt(model: Model) -> None:
    """LangChain, OpenHands: a summarizer without tools. The agent goes on from the second of two, and never from the last."""
    said = await model.works(
        "main",
        "read",
        messages=[system("You are a careful agent."), user(TASK + " Hurry." * 30)],
        final=calls("read", path="/b"),
    )
    asked = [system("Summarize."), user(json.dumps(said))]
    await model.says(
        "-thrown", "The user wants a text on a bridge, and nothing of it has been found up to this point.", asked
    )
    await model.says("summary", SUMMARY, asked)
    said = [*said[:1], user(f"Summary:\n{SUMMARY}")]
    said.append(await model.says("main", calls("read", path="/c"), said, "read"))
    said.append(result(said[-1], "Nothing."))
    await model.says(
        "-unused",
        "A crack was likely, and the file named c has nothing on it.",
        [system("Summarize."), user(json.dumps(said))],
    )
    await model.says("main", FOUND, said, "read")


async def final_answer_without_tools(model: Model) -> None:
    """The AI SDK's `activeTools: []`, smolagents: the last call has the results of tools, and offers none."""
    said = [system("You are a careful agent."), user(TASK)]
    said.append(await model.says("main", calls("read", path="/a"), said, "read"))
    said.append(result(said[-1], "March 3: bolts cracked."))
    await model.says("final", FOUND, [system("Give the final answer."), *said[1:], user("Now answer.")])


async def final_answer_of_another(model: Model) -> None:
    """LangGraph: a writer, or the form of the answer, gets the messages as they are."""
    said = await model.works("main", "read")
    await model.says("writer", "Bolts.", [system("You write."), *said[1:]])


async def users_next_message(model: Model) -> None:
    """The same agent, with a clock in its system text, gets the user's next message."""
    said = await model.works("main", "read")
    await model.works("next", "read", messages=[system("It is noon."), *said[1:], user("And in May?")], final="No.")


async def judge_with_a_tag(model: Model) -> None:
    await model.works("main", "read")
    await model.says("-judge", "0.5", [user(f"Task: {TASK}\nAnswer: {FOUND}")], tag="judge")


async def no_tools_at_all(model: Model) -> None:
    await model.says("a", FOUND, [user(TASK)])
    await model.says("b", "Bolts.", [user("Something else.")])


ROWS = [
    *(title_beside_in_words_of_the_task, evaluator_after_a_task, notes_in_the_system_text, a_result_nested_deeply),
    text_without_spaces,
    *(title_first, title_beside, form_first, after_the_end, question_on_the_way, agents_as_tools, crew_in_sequence),
    *(crew_with_a_manager, handoff, supervisor_with_experts, planner_and_executor, sub_agents),
    *(summaries_of_their_own_prompt, final_answer_without_tools, final_answer_of_another, users_next_message),
    *(judge_with_a_tag, no_tools_at_all),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
async def test_the_calls_of_a_framework_train_as_the_table_says_however_long_one_of_them_thinks(
    row: Callable[[Model], Awaitable[None]], engine: ScriptedEngine, start_gateway: Start
) -> None:
    """A call whose name begins with a dash is a side call."""
    gateway = await start_gateway(engine, model_dir=str(MODEL))
    thinker: str | None = None
    for _ in range(3):  # nobody, then who spoke first, then who spoke last
        session = await opened(gateway)
        model = Model(engine, session, thinker)
        await row(model)
        thinker = model.names[0] if thinker is None else model.names[-1]
        capture = await captured(gateway, session)
        assert (capture.errors, len(capture.turns)) == ([], len(model.names))
        found = build_trajectory(session.session_id, capture.turns)
        trained = {turn for s in found.sequences if s.side_call is None for turn in s.turn_ids}
        turns = zip(capture.turns, model.names, strict=True)
        assert [(name, turn.turn_id in trained) for turn, name in turns] == [
            (name, not name.startswith("-")) for name in model.names
        ]
