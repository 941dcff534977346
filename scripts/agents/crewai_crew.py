"""A crew of CrewAI with one agent."""

import os

from crewai import Agent, Crew, Task
from crewai.tools import tool


@tool("add")
def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


@tool("multiply")
def multiply(x: int, y: int) -> int:
    """Multiply two numbers."""
    return x * y


agent = Agent(
    role="Calculator",
    goal="Calculate.",
    backstory="You use the tools.",
    tools=[add, multiply],
    llm="openai/gpt-4.1-mini",
)
task = Task(description=os.environ["TASK"], expected_output="The number.", agent=agent)
print(Crew(agents=[agent], tasks=[task]).kickoff())
