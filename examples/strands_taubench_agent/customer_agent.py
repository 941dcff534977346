"""The agent: Strands, the benchmark's tools, and a ticket or a user. Shared by both apps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmark import Episode, find_task, preload, tool_schemas
from request import Request
from strands import Agent
from strands.tools.executors import SequentialToolExecutor
from strands.tools.tools import PythonAgentTool
from users import ModelUser, ScriptedUser, UserSimulator
from wording import Rendering, reply, system_prompt, tool_spec

preload("telecom")  # at import: sessions are forked from a process that has imported this


@dataclass(frozen=True, kw_only=True)
class Work:
    """A finished task. ``answer`` is the last text of the agent, and ``stop_reason`` is that of Strands."""

    episode: Episode
    answer: str
    stop_reason: str


async def work_on(request: Request, model: Any) -> Work:
    """Solve the task with this Strands model. Raises: what the framework raises."""
    episode = Episode(domain=request.domain, task=find_task(request.domain, request.task_id), repaired=request.repaired)
    agent = Agent(
        model=model,
        tools=tools_for(episode, request.rendering),
        system_prompt=system_prompt(request.rendering, episode.policy, solo=episode.solo),
        callback_handler=None,
        tool_executor=SequentialToolExecutor(),  # the calls change one environment, in the order of the reply
    )
    if episode.solo:
        response = await agent.invoke_async(ticket(request, episode), limits={"turns": request.max_turns})
        return Work(episode=episode, answer=str(response).strip(), stop_reason=response.stop_reason)
    return await _talk(agent, episode, user_for(request, episode), request.max_turns)


def ticket(request: Request, episode: Episode) -> str:
    text = str(episode.task.ticket)
    return text if request.ticket_number is None else f"Ticket number: {request.ticket_number}. {text}"


def user_for(request: Request, episode: Episode) -> UserSimulator:
    """The user of a retail or airline task: the request's lines, or a model that plays the task's scenario."""
    if request.user_lines is not None:
        return ScriptedUser(request.user_lines)
    return ModelUser.from_env(str(episode.task.user_scenario))


async def _talk(agent: Agent, episode: Episode, user: UserSimulator, max_turns: int) -> Work:
    said: str | None = await user.opening()
    answer = ""
    while said is not None:
        left = max_turns - sum(message["role"] == "assistant" for message in agent.messages)
        if left <= 0:
            return Work(episode=episode, answer=answer, stop_reason="limit_turns")
        episode.hear(said)
        response = await agent.invoke_async(said, limits={"turns": left})
        if response.stop_reason != "end_turn":
            return Work(episode=episode, answer=answer, stop_reason=response.stop_reason)
        answer = str(response).strip()
        episode.say(answer)
        said = await user.reply(answer)
    return Work(episode=episode, answer=answer, stop_reason="end_turn")


def tools_for(episode: Episode, rendering: Rendering) -> list[PythonAgentTool]:
    """The benchmark's tools, working on this episode."""
    return [
        _tool(name, tool_spec(rendering, schema), episode, rendering)
        for name, schema in tool_schemas(episode.domain).items()
    ]


def _tool(name: str, spec: Any, episode: Episode, rendering: Rendering) -> PythonAgentTool:
    async def act(tool_use: Any, **_: Any) -> Any:
        arguments = tool_use["input"]
        text = episode.call(name, arguments if isinstance(arguments, dict) else {})
        status = "error" if text.startswith("Error") else "success"
        return {"toolUseId": tool_use["toolUseId"], "status": status, "content": [{"text": reply(rendering, text)}]}

    return PythonAgentTool(name, spec, act)
