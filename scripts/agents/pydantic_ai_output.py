"""Pydantic AI with a typed output: the model must end with a call of an output tool."""

import os

from pydantic import BaseModel
from pydantic_ai import Agent


class Result(BaseModel):
    """The result of the calculation."""

    value: int


agent = Agent("openai-chat:gpt-4.1-mini", instructions="Use the tools.", output_type=Result)


@agent.tool_plain
def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


@agent.tool_plain
def multiply(x: int, y: int) -> int:
    """Multiply two numbers."""
    return x * y


print(agent.run_sync(os.environ["TASK"]).output)
