"""Pydantic AI with OpenAI's chat."""

import os

from pydantic_ai import Agent

agent = Agent("openai-chat:gpt-4.1-mini", instructions="Use the tools.")


@agent.tool_plain
def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


@agent.tool_plain
def multiply(x: int, y: int) -> int:
    """Multiply two numbers."""
    return x * y


print(agent.run_sync(os.environ["TASK"]).output)
