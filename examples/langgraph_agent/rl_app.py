"""The agent of `basic_app.py` for production and training: another app class, `app.model`, and a function for rollouts."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from reward import AnswerReward
from word_problems import MAX_TOKENS, MAX_TURNS, SYSTEM_PROMPT, Problem, calculator

from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()
reward = AnswerReward()


@app.entrypoint
async def invoke_agent(payload):
    problem = Problem.of(payload)
    given = app.model(default="openai.gpt-oss-120b-1:0")
    model = ChatOpenAI(
        **given.openai_kwargs(),
        model=given.model_id,
        max_tokens=MAX_TOKENS,
        extra_body=dict(given.sampling_params),
    )
    agent = create_agent(model, tools=[calculator], system_prompt=SYSTEM_PROMPT)
    asked = {"messages": [{"role": "user", "content": problem.prompt}]}
    result = await agent.ainvoke(asked, {"recursion_limit": 2 * MAX_TURNS})
    return {"answer": result["messages"][-1].text}


@app.rollout_entrypoint(on_policy_failure=0.0)
async def rollout(payload):
    result = await invoke_agent(payload)
    return {"rewards": reward(response_text=result["answer"], answer=payload["answer"])}


if __name__ == "__main__":
    app.run()
