"""OpenAI Agents SDK, which speaks the Responses API."""

import os

from agents import Agent, Runner, function_tool


@function_tool
def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


@function_tool
def multiply(x: int, y: int) -> int:
    """Multiply two numbers."""
    return x * y


agent = Agent(name="calculator", instructions="Use the tools.", tools=[add, multiply], model="gpt-4.1-mini")
print(Runner.run_sync(agent, os.environ["TASK"]).final_output)
