"""Agno with OpenAI's chat."""

import os

from agno.agent import Agent
from agno.models.openai import OpenAIChat


def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


def multiply(x: int, y: int) -> int:
    """Multiply two numbers."""
    return x * y


agent = Agent(model=OpenAIChat("gpt-4.1-mini"), tools=[add, multiply], instructions="Use the tools.", telemetry=False)
print(agent.run(os.environ["TASK"]).content)
