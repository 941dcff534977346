"""An agent on Anthropic's Messages API, with its own loop. The gateway offers that API for any engine."""

from anthropic import AsyncAnthropic, AsyncAnthropicBedrock
from reward import AnswerReward
from tools import SYSTEM_PROMPT, call_tool

from agentcore_rl_toolkit import AgentCoreRLApp, PolicyFailure

HOSTED = "us.anthropic.claude-sonnet-4-20250514-v1:0"  # answers in production until a trained model does
TURNS = 6
TOOLS = [
    {
        "name": "calculator",
        "description": "Work out a sum.",
        "input_schema": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Such as 2 + 15"}},
            "required": ["expression"],
        },
    }
]
app = AgentCoreRLApp()
reward = AnswerReward()


def client_of(model):
    if model.base_url is None:
        return AsyncAnthropicBedrock()
    # The client adds /v1. A model on SageMaker has no Messages API, so production needs a server that has it.
    return AsyncAnthropic(base_url=model.base_url.removesuffix("/v1"), api_key=model.api_key)


@app.entrypoint
async def invoke_agent(payload):
    model = app.model(default=HOSTED)
    messages = [{"role": "user", "content": payload["prompt"]}]
    async with client_of(model) as client:
        for _ in range(TURNS):
            reply = await client.messages.create(
                model=model.model_id, system=SYSTEM_PROMPT, messages=messages, tools=TOOLS, max_tokens=64
            )
            PolicyFailure.check_stop(reply.stop_reason)  # out of tokens
            messages.append({"role": "assistant", "content": reply.content})
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                return {"answer": "".join(block.text for block in reply.content if block.type == "text")}
            results = [(call.id, call_tool(call.name, call.input)) for call in calls]
            content = [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in results]
            messages.append({"role": "user", "content": content})
    raise PolicyFailure("turns")


@app.rollout_entrypoint(on_policy_failure=0.0)
async def rollout(payload):
    result = await invoke_agent(payload)
    return {"rewards": reward(response_text=result["answer"], answer=payload["answer"])}


if __name__ == "__main__":
    app.run()
