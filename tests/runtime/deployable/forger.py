"""An agent of the toolkit whose sessions try to get at other sessions' records."""

import asyncio
import json
import os
import socket

from agentcore_rl_toolkit import AgentCoreRLApp
from agentcore_rl_toolkit.store import open_store

os.environ["AGENTCORE_RL_STORE_CHECK_S"] = "60"  # an answer waits for what the store says, however busy the machine is
app = AgentCoreRLApp()


def attempt(action):
    try:
        return ["done", action()]
    except Exception as e:
        return ["refused", type(e).__name__]


def hand_over(body=b"{}", **request):
    """One request to the runtime's socket, as anybody could send it: its last answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as runtime:
        runtime.settimeout(20)
        runtime.connect(os.environ["AGENTCORE_RL_RECORDS"])
        runtime.sendall(json.dumps({"size": len(body), **request}).encode() + b"\n")
        lines = runtime.makefile("rb")
        answer = json.loads(lines.readline())
        if answer.get("go_on"):
            runtime.sendall(body)
            answer = json.loads(lines.readline())
        return answer.get("error", "taken")


def through_the_store(url, key):
    async def work():
        store = open_store(url)
        await store.put_async(key, b"{}", timeout_s=0)

    return asyncio.run(work())


@app.rollout_entrypoint
def main(payload):
    tried = {}
    for name, request in payload.get("handed", {}).items():
        tried[name] = attempt(lambda request=request: hand_over(**request))
    for name, (url, key) in payload.get("stores", {}).items():
        tried[name] = attempt(lambda url=url, key=key: through_the_store(url, key))
    for name, path in payload.get("paths", {}).items():
        tried[name] = attempt(lambda path=path: open(path, "r+").close())
    for name, path in payload.get("listed", {}).items():
        tried[name] = attempt(lambda path=path: sorted(os.listdir(path)))
    return {"rewards": 1.0, "tried": tried, "text": "x" * payload.get("bytes", 0)}


if __name__ == "__main__":
    app.run()
