"""The probe without the SDK, whose import is most of what a start costs: for tests of starts and ends, not of agents."""

import asyncio
import json
import os
import subprocess
import time
import uuid

import uvicorn

LOADED = uuid.uuid4().hex  # differs with every run of this module
SESSION = b"x-amzn-bedrock-agentcore-runtime-session-id"
calls = 0


async def answer(payload, session):
    global calls
    calls += 1
    what = payload.get("do", "echo")
    if what == "echo":
        return {"echo": payload, "pid": os.getpid(), "loaded": LOADED, "calls": calls, "session": session}
    if what == "sleep":
        print(payload.get("say", ""), flush=True)  # for a test that waits until it has begun
        await asyncio.sleep(payload["s"])
        return {"slept": payload["s"], "calls": calls}
    if what == "where":
        return {"cwd": os.getcwd(), "files": sorted(os.listdir()), "env": dict(os.environ)}
    if what == "spawn":
        # a daemon: in a session of its own, and its parent is gone
        text = "sleep 600 >/dev/null 2>&1 & echo $!"
        started = subprocess.run(["/bin/sh", "-c", text], start_new_session=True, capture_output=True, check=True)  # noqa: ASYNC221
        return {"child": int(started.stdout)}
    if what == "print":
        print(payload["text"])
        return {}
    if what == "spin":
        end = time.monotonic() + payload["s"]
        while time.monotonic() < end:
            pass
        return {}
    if what == "die":
        os._exit(7)
    raise KeyError(what)


async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    if scope["path"] == "/ping":
        text = {"status": "Healthy"}
    else:
        text = await answer(json.loads(body), dict(scope["headers"]).get(SESSION, b"").decode())
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(text).encode()})


if __name__ == "__main__":
    uvicorn.run(app, host="0.0.0.0", port=8080, lifespan="off", log_level="warning")
