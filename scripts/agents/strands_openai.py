"""Strands with OpenAI's chat."""

import os

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


@tool
def multiply(x: int, y: int) -> int:
    """Multiply two numbers."""
    return x * y


agent = Agent(
    model=OpenAIModel(model_id="gpt-5-mini"),
    tools=[add, multiply],
    system_prompt="Use the tools.",
    callback_handler=None,
)
print(agent(os.environ["TASK"]))
