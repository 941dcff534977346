"""Pydantic AI with Amazon Bedrock's Converse API."""

import os

from pydantic_ai import Agent

agent = Agent("bedrock:us.anthropic.claude-sonnet-4-5-20250929-v1:0", instructions="Use the tools.")


@agent.tool_plain
def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


@agent.tool_plain
def multiply(x: int, y: int) -> int:
    """Multiply two numbers."""
    return x * y


print(agent.run_sync(os.environ["TASK"]).output)
