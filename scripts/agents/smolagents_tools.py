"""smolagents' ToolCallingAgent, which requires a call at each step."""

import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(x: int, y: int) -> int:
    """Add two numbers.

    Args:
        x: A number.
        y: A number.
    """
    return x + y


@tool
def multiply(x: int, y: int) -> int:
    """Multiply two numbers.

    Args:
        x: A number.
        y: A number.
    """
    return x * y


model = OpenAIServerModel("gpt-4.1-mini")
print(ToolCallingAgent(tools=[add, multiply], model=model, verbosity_level=0).run(os.environ["TASK"]))
