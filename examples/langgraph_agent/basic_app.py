"""A math agent in LangGraph as you deploy it to Bedrock AgentCore Runtime. `rl_app.py` is the same agent made trainable.

Bedrock serves OpenAI's open-weight models behind OpenAI's own API; AWS_BEARER_TOKEN_BEDROCK is a Bedrock API key.
"""

import os

from bedrock_agentcore.runtime import BedrockAgentCoreApp
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from word_problems import MAX_TOKENS, MAX_TURNS, SYSTEM_PROMPT, Problem, calculator

BEDROCK = "https://bedrock-runtime.us-west-2.amazonaws.com/openai/v1"
app = BedrockAgentCoreApp()


@app.entrypoint
async def invoke_agent(payload):
    problem = Problem.of(payload)
    key = os.environ["AWS_BEARER_TOKEN_BEDROCK"]
    model = ChatOpenAI(base_url=BEDROCK, api_key=key, model="openai.gpt-oss-120b-1:0", max_tokens=MAX_TOKENS)
    agent = create_agent(model, tools=[calculator], system_prompt=SYSTEM_PROMPT)
    asked = {"messages": [{"role": "user", "content": problem.prompt}]}
    result = await agent.ainvoke(asked, {"recursion_limit": 2 * MAX_TURNS})
    return {"answer": result["messages"][-1].text}


if __name__ == "__main__":
    app.run()
