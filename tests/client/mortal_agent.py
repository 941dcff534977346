"""An agent whose session dies as its payload says."""

import os
import threading
import time

from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()


@app.rollout_entrypoint
def run(payload, context):
    how = payload["how"]
    time.sleep(payload.get("after_s", 0.3))
    if how == "exit":
        os._exit(3)
    elif how == "memory":
        held = []
        while True:
            held.append(bytearray(b"x") * 2**22)
    elif how == "disk":
        for number in range(100):
            with open(f"file{number}", "wb") as file:
                file.write(bytes(2**22))
    elif how == "ok":
        return {"rewards": 1.0}
    threading.Event().wait()


if __name__ == "__main__":
    app.run()
