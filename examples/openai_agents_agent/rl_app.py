"""The agent of `basic_app.py` for production and training: another app class, `app.model`, and a function for rollouts."""

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from reward import AnswerReward
from word_problems import MAX_TOKENS, MAX_TURNS, SYSTEM_PROMPT, Problem, calculator

from agentcore_rl_toolkit import AgentCoreRLApp

set_tracing_disabled(True)  # its traces would go to OpenAI
app = AgentCoreRLApp()
reward = AnswerReward()


@app.entrypoint
async def invoke_agent(payload):
    problem = Problem.of(payload)
    given = app.model(default="openai.gpt-oss-120b-1:0")
    async with AsyncOpenAI(**given.openai_kwargs()) as client:
        agent = Agent(
            name="math",
            instructions=SYSTEM_PROMPT,
            tools=[function_tool(calculator)],
            model=OpenAIChatCompletionsModel(model=given.model_id, openai_client=client),
            model_settings=ModelSettings(max_tokens=MAX_TOKENS, extra_body=dict(given.sampling_params)),
        )
        result = await Runner.run(agent, problem.prompt, max_turns=MAX_TURNS)
    return {"answer": str(result.final_output)}


@app.rollout_entrypoint(on_policy_failure=0.0)
async def rollout(payload):
    result = await invoke_agent(payload)
    return {"rewards": reward(response_text=result["answer"], answer=payload["answer"])}


if __name__ == "__main__":
    app.run()
