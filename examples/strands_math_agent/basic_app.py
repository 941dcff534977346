"""A math agent as you deploy it to Bedrock AgentCore Runtime. `rl_app.py` is the same agent made trainable."""

from bedrock_agentcore.runtime import BedrockAgentCoreApp
from strands import Agent, tool
from strands.models.bedrock import BedrockModel
from word_problems import MAX_TOKENS, MAX_TURNS, SYSTEM_PROMPT, Problem, calculator

app = BedrockAgentCoreApp()


@app.entrypoint
async def invoke_agent(payload):
    problem = Problem.of(payload)
    model = BedrockModel(model_id="us.anthropic.claude-sonnet-4-20250514-v1:0", max_tokens=MAX_TOKENS)
    agent = Agent(model=model, tools=[tool(calculator)], system_prompt=SYSTEM_PROMPT, callback_handler=None)
    response = await agent.invoke_async(problem.prompt, limits={"turns": MAX_TURNS})
    return {"answer": str(response), "stop_reason": response.stop_reason}


if __name__ == "__main__":
    app.run()
