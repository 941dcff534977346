"""The agent of `basic_app.py` for production and training: another app class, `app.model`, and a function for rollouts."""

from openai import AsyncOpenAI
from reward import AnswerReward
from word_problems import MAX_TOKENS, MAX_TURNS, SYSTEM_PROMPT, TOOL, Problem, call_tool, parsed

from agentcore_rl_toolkit import AgentCoreRLApp, PolicyFailure

app = AgentCoreRLApp()
reward = AnswerReward()


@app.entrypoint
async def invoke_agent(payload):
    problem = Problem.of(payload)
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": problem.prompt}]
    model = app.model(default="openai.gpt-oss-120b-1:0")
    async with AsyncOpenAI(**model.openai_kwargs()) as client:
        for _ in range(MAX_TURNS):
            reply = await client.chat.completions.create(
                model=model.model_id,
                messages=messages,
                tools=[{"type": "function", "function": TOOL}],
                max_tokens=MAX_TOKENS,
                extra_body=dict(model.sampling_params),
            )
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                result = call_tool(call.function.name, parsed(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                break
    return {"answer": message.content or "", "stop_reason": reply.choices[0].finish_reason}


@app.rollout_entrypoint(on_policy_failure=0.0)
async def rollout(payload):
    result = await invoke_agent(payload)
    PolicyFailure.check_stop(result["stop_reason"])  # out of tokens
    if result["stop_reason"] == "tool_calls":
        raise PolicyFailure("turns")
    return {"rewards": reward(response_text=result["answer"], answer=payload["answer"])}


if __name__ == "__main__":
    app.run()
