"""Strands, whose default model is Amazon Bedrock's."""

import os

from strands import Agent, tool


@tool
def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


@tool
def multiply(x: int, y: int) -> int:
    """Multiply two numbers."""
    return x * y


agent = Agent(tools=[add, multiply], system_prompt="Use the tools.", callback_handler=None)
print(agent(os.environ["TASK"]))
