"""A light agent: a few turns with the model over plain HTTP, each reply that it read whole noted in a file before it goes on.

A call whose reply did not arrive whole is sent again with the same key, as the clients of OpenAI and Anthropic do.
"""

import http.client
import json
import os
import time
import uuid
from urllib.parse import urlsplit

from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()
PATIENCE_S = 40.0
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)


class Model:
    """One kept connection to the session's address at the gateway."""

    def __init__(self, base_url: str, key: str) -> None:
        self.url = urlsplit(base_url)
        self.key = key
        self.connection: http.client.HTTPConnection | None = None

    def ask(self, messages: list[dict[str, str]], stream: bool) -> str:
        """The reply's text. Raises: RuntimeError when there is none in time."""
        named, give_up_s, tries, pause_s, why = uuid.uuid4().hex, time.monotonic() + PATIENCE_S, 0, 0.05, "nothing"
        body = json.dumps({"model": "scripted", "messages": messages, "stream": stream})
        while time.monotonic() < give_up_s:
            headers = {
                "authorization": f"Bearer {self.key}",
                "content-type": "application/json",
                "idempotency-key": named,
                "x-stainless-retry-count": str(tries),
            }
            try:
                status, text = self._once(body, headers, stream)
            except (OSError, http.client.HTTPException, ValueError) as e:
                why = f"{type(e).__name__}: {e}"
                self.close()
            else:
                if status == 200:
                    return text
                why = f"{status}: {text[:200]}"
                if status not in AGAIN:
                    break
            tries += 1
            time.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)
        raise RuntimeError(f"no reply of the model after {tries} tries, the last one: {why}")

    def _once(self, body: str, headers: dict[str, str], stream: bool) -> tuple[int, str]:
        if self.connection is None:
            self.connection = http.client.HTTPConnection(self.url.hostname, self.url.port, timeout=15)
        self.connection.request("POST", self.url.path + "/chat/completions", body, headers)
        reply = self.connection.getresponse()
        data = reply.read()
        if reply.status != 200:
            return reply.status, data.decode(errors="replace")
        if not stream:
            return 200, json.loads(data)["choices"][0]["message"]["content"]
        events = [event[6:] for event in data.decode().split("\n\n") if event.startswith("data: ")]
        if not events or events[-1] != "[DONE]":
            raise ValueError("the stream broke off")
        deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
        return 200, "".join(delta.get("content") or "" for delta in deltas)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


@app.rollout_entrypoint
def run(payload, context):
    rollout = payload["_rollout"]
    model = Model(rollout["base_url"], rollout["api_key"])
    messages = [{"role": "system", "content": f"task {payload['task']}"}]
    texts = []
    seen = os.open(f"{os.environ['SEEN']}/{context.session_id}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        for turn in range(payload["turns"]):
            messages.append({"role": "user", "content": f"turn {turn}"})
            text = model.ask(messages, stream=payload["stream"])
            os.write(seen, json.dumps([turn, text]).encode() + b"\n")
            texts.append(text)
            messages.append({"role": "assistant", "content": text})
    finally:
        os.close(seen)
        model.close()
    return {"rewards": float(1 + sum(int(word[1:]) for text in texts for word in text.split()) % 997)}


if __name__ == "__main__":
    app.run()
