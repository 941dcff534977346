"""deepagents, with its own tools for plans and files beside these two."""

import os

from deepagents import create_deep_agent


def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


def multiply(x: int, y: int) -> int:
    """Multiply two numbers."""
    return x * y


agent = create_deep_agent(model="openai:gpt-4.1-mini", tools=[add, multiply], system_prompt="Use the tools.")
print(agent.invoke({"messages": [("user", os.environ["TASK"])]})["messages"][-1].text)
