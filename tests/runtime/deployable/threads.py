"""An agent that starts a thread when it is loaded: it cannot be forked and is started by exec."""

import os
import threading

from bedrock_agentcore.runtime import BedrockAgentCoreApp

app = BedrockAgentCoreApp()
ticks = threading.Event()
os.environ["LOADS"] = os.environ.get("LOADS", "") + "x"
threading.Thread(target=ticks.wait, daemon=True, name="ticker").start()


@app.entrypoint
def main(payload):
    return {"loads": os.environ["LOADS"], "threads": [t.name for t in threading.enumerate() if t.name == "ticker"]}


if __name__ == "__main__":
    app.run()
