"""A deployed agent without code for training: Strands on Amazon Bedrock, with its model at module level."""

from bedrock_agentcore import BedrockAgentCoreApp
from strands import Agent, tool
from strands.models.bedrock import BedrockModel

app = BedrockAgentCoreApp()
model = BedrockModel(model_id="us.anthropic.claude-sonnet-4-20250514-v1:0", max_tokens=64)


@tool
def calculator(expression: str) -> str:
    """Evaluate one arithmetic expression.

    Args:
        expression: Like 2 + 3
    """
    left, operator, right = expression.split()
    a, b = int(left), int(right)
    return str({"+": a + b, "-": a - b, "*": a * b}[operator])


@app.entrypoint
async def invoke(payload):
    agent = Agent(
        model=model,
        tools=[calculator],
        system_prompt="Solve the problem. Use the calculator.",
        callback_handler=None,
    )
    async for event in agent.stream_async(payload["prompt"]):
        if "data" in event:
            yield event["data"]


if __name__ == "__main__":
    app.run()
