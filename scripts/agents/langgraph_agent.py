"""LangChain's agent, which is a graph of LangGraph."""

import os

from langchain.agents import create_agent
from langchain_core.tools import tool


@tool
def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


@tool
def multiply(x: int, y: int) -> int:
    """Multiply two numbers."""
    return x * y


agent = create_agent("openai:gpt-4.1-mini", tools=[add, multiply], system_prompt="Use the tools.")
print(agent.invoke({"messages": [("user", os.environ["TASK"])]})["messages"][-1].text)
