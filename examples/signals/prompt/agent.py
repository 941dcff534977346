"""Sorts the mail of a shop into queues. Its model is hosted elsewhere and cannot be trained; its system prompt can change."""

import os

from openai import OpenAI

from agentcore_rl_toolkit import AgentCoreRLApp, rollout_text

app = AgentCoreRLApp()

SYSTEM = "You sort the mail of a shop. Answer with the name of one queue: orders, billing, legal or vip."


@app.rollout_entrypoint
def run(payload):
    system = rollout_text(payload, "system_prompt", SYSTEM)
    with OpenAI(base_url=os.environ["MODEL_URL"], api_key=os.environ.get("MODEL_KEY", "none")) as client:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": payload["mail"]}]
        reply = client.chat.completions.create(model=os.environ.get("MODEL_NAME", "scripted"), messages=messages)
    queue = reply.choices[0].message.content.strip().lower()
    if queue == payload["queue"]:
        return {"rewards": 1.0, "answer": queue}
    return {"rewards": 0.0, "answer": queue, "feedback": f"This mail belongs to {payload['queue']}: {payload['why']}"}


if __name__ == "__main__":
    app.run()
