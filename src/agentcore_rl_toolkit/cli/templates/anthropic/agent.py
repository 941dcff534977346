"""An agent on Anthropic's Messages API, with a loop of its own. The gateway speaks that API in front of any engine."""

from anthropic import AsyncAnthropic
from reward import AnswerReward
from tools import SYSTEM_PROMPT, call_tool

from agentcore_rl_toolkit import AgentCoreRLApp, PolicyFailure

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


@app.rollout_entrypoint(on_policy_failure=0.0)
async def invoke_agent(payload):
    rollout = payload["_rollout"]
    messages = [{"role": "user", "content": payload["prompt"]}]
    where = rollout["base_url"].removesuffix("/v1")  # the client adds it
    async with AsyncAnthropic(base_url=where, api_key=rollout.get("api_key", "none")) as client:
        for _ in range(TURNS):
            reply = await client.messages.create(
                model=rollout["model_id"],
                system=SYSTEM_PROMPT,
                messages=messages,
                tools=TOOLS,
                max_tokens=64,
            )
            PolicyFailure.check_stop(reply.stop_reason)  # out of tokens
            messages.append({"role": "assistant", "content": reply.content})
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                break
            results = [(call.id, call_tool(call.name, call.input)) for call in calls]
            content = [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in results]
            messages.append({"role": "user", "content": content})
        else:
            raise PolicyFailure("turns")
    text = "".join(block.text for block in reply.content if block.type == "text")
    return {"rewards": reward(response_text=text, answer=payload["answer"])}


if __name__ == "__main__":
    app.run()
