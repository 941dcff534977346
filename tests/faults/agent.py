"""An agent that misbehaves as its payload asks. Each run leaves a line in RUNS_DIR, so that tests can count them."""

import os
import signal
import time

from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()


def act(what: str) -> object:
    if what == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    if what == "out_of_memory":
        hoard = []
        while True:
            hoard.append(bytearray(16 * 2**20))
    if what == "exit":
        os._exit(3)
    if what == "raise":
        raise RuntimeError("agent code raised")
    if what == "not_a_dict":
        return [1, 2, 3]
    return {"rewards": 1.0}


@app.rollout_entrypoint
def run(payload, context):
    with open(f"{os.environ['RUNS_DIR']}/{context.session_id}", "a") as f:
        f.write(f"{payload['_rollout'].get('input_id')}\n")
    time.sleep(payload.get("run_s", 0.0))
    return act(payload.get("act", ""))


if __name__ == "__main__":
    app.run()
