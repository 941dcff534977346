"""An agent in LangGraph. What makes it trainable: the app, its model, and the second function, which returns a reward."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from reward import AnswerReward
from tools import SYSTEM_PROMPT, calculator

from agentcore_rl_toolkit import AgentCoreRLApp

HOSTED = "openai.gpt-oss-120b-1:0"  # a model on Bedrock, which serves production until a trained model does
app = AgentCoreRLApp()
reward = AnswerReward()


@app.entrypoint
async def invoke_agent(payload):
    given = app.model(default=HOSTED)
    model = ChatOpenAI(**given.openai_kwargs(), model=given.model_id, max_tokens=64, temperature=1.0)
    agent = create_agent(model, tools=[calculator], system_prompt=SYSTEM_PROMPT)
    result = await agent.ainvoke({"messages": [{"role": "user", "content": payload["prompt"]}]})
    return {"answer": str(result["messages"][-1].content)}


@app.rollout_entrypoint(on_policy_failure=0.0)  # out of tokens, turns or context: a reward like any other
async def rollout(payload):
    result = await invoke_agent(payload)
    return {"rewards": reward(response_text=result["answer"], answer=payload["answer"])}


if __name__ == "__main__":
    app.run()
