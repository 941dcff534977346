"""Agents that work on a task in its sandbox: mini-swe-agent, and an agent without a framework. Add yours as another function.

An agent gets the instruction, the sandbox and a connection to the model, and returns the reason of its end. The tests of the
task score the files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sandboxes import Sandbox

COMMAND_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Connection:
    """The model. If ``base_url`` is None, ``model_id`` is a model on Bedrock. ``params`` are sampling parameters."""

    model_id: str
    base_url: str | None = None
    api_key: str = "none"
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """``steps`` model calls at most; ``limit_s`` seconds for all of them."""

    steps: int
    limit_s: float


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The reason of the end (`Submitted`, `LimitsExceeded`, ...) and the last text of the agent."""

    status: str
    steps: int
    said: str = ""


class TaskAgent(Protocol):
    def __call__(self, instruction: str, sandbox: Sandbox, connection: Connection, limits: Limits) -> Ended: ...


BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash command line.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def plain(instruction: str, sandbox: Sandbox, connection: Connection, limits: Limits) -> Ended:
    """The OpenAI client and one tool. It ends when the model calls no tool."""
    from openai import OpenAI

    client = OpenAI(base_url=connection.base_url, api_key=connection.api_key, timeout=limits.limit_s)
    messages: list[Any] = [
        {
            "role": "system",
            "content": "You solve tasks in a Linux shell. Say DONE, without a tool call, when you are finished.",
        },
        {"role": "user", "content": instruction},
    ]
    deadline_s = time.monotonic() + limits.limit_s
    for step in range(1, limits.steps + 1):
        if time.monotonic() > deadline_s:
            return Ended(status="TimeExceeded", steps=step - 1)
        reply = client.chat.completions.create(
            model=connection.model_id, messages=messages, tools=[BASH], **dict(connection.params)
        )
        said = reply.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return Ended(status="Submitted", steps=step, said=said.content or "")
        for call in said.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": _result(call, sandbox)})
    return Ended(status="LimitsExceeded", steps=limits.steps)


def _result(call: Any, sandbox: Sandbox) -> str:
    try:
        command = json.loads(call.function.arguments)["command"]
    except (ValueError, KeyError, TypeError):
        return 'error: call bash with {"command": "..."}'
    ran = sandbox.run(["bash", "-c", str(command)], limit_s=COMMAND_LIMIT_S)
    return f"{ran.output[-12_000:]}\n[{'ended: took too long' if ran.code is None else f'exit code {ran.code}'}]"


def mini_swe_agent(instruction: str, sandbox: Sandbox, connection: Connection, limits: Limits) -> Ended:
    """mini-swe-agent with its own prompts and its LiteLLM model (`mini_swe.py`)."""
    from mini_swe import (
        run,
    )  # takes seconds and half a gigabyte of packages; the apps load it before any session begins

    return run(instruction, sandbox, connection, limits)


AGENTS: dict[str, TaskAgent] = {"mini-swe-agent": mini_swe_agent, "plain": plain}
