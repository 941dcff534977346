"""The agent of `basic_app.py` for production and training: another app class, `app.model`, and a function for rollouts."""

from anthropic import AsyncAnthropic, AsyncAnthropicBedrock
from reward import AnswerReward
from word_problems import MAX_TOKENS, MAX_TURNS, SYSTEM_PROMPT, TOOL, Problem, call_tool

from agentcore_rl_toolkit import AgentCoreRLApp, PolicyFailure

TOOLS = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}]
app = AgentCoreRLApp()
reward = AnswerReward()


def client_of(model):
    if model.base_url is None:
        return AsyncAnthropicBedrock()
    return AsyncAnthropic(base_url=model.base_url.removesuffix("/v1"), api_key=model.api_key)  # the client adds it


@app.entrypoint
async def invoke_agent(payload):
    problem = Problem.of(payload)
    messages = [{"role": "user", "content": problem.prompt}]
    model = app.model(default="us.anthropic.claude-sonnet-4-20250514-v1:0")
    async with client_of(model) as client:
        for _ in range(MAX_TURNS):
            reply = await client.messages.create(
                model=model.model_id,
                system=SYSTEM_PROMPT,
                messages=messages,
                tools=TOOLS,
                max_tokens=MAX_TOKENS,
                extra_body=dict(model.sampling_params),
            )
            messages.append({"role": "assistant", "content": reply.content})
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                break
            results = [(call.id, call_tool(call.name, call.input)) for call in calls]
            blocks = [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in results]
            messages.append({"role": "user", "content": blocks})
    text = "".join(block.text for block in reply.content if block.type == "text")
    return {"answer": text, "stop_reason": reply.stop_reason}


@app.rollout_entrypoint(on_policy_failure=0.0)
async def rollout(payload):
    result = await invoke_agent(payload)
    PolicyFailure.check_stop(result["stop_reason"])  # out of tokens
    if result["stop_reason"] == "tool_use":
        raise PolicyFailure("turns")
    return {"rewards": reward(response_text=result["answer"], answer=payload["answer"])}


if __name__ == "__main__":
    app.run()
