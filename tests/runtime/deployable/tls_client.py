"""An agent that calls a server by TLS in several threads at once, with one client."""

import ssl
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
from bedrock_agentcore.runtime import BedrockAgentCoreApp

THREADS = 4
app = BedrockAgentCoreApp()


@app.entrypoint
def main(payload):
    together = threading.Barrier(THREADS)
    with httpx.Client(verify=ssl.create_default_context(cafile=payload["certificates"])) as client:

        def call(_):
            together.wait()
            try:
                return client.get(payload["url"]).text
            except httpx.HTTPError as e:
                return repr(e)

        with ThreadPoolExecutor(THREADS) as pool:
            return {"texts": list(pool.map(call, range(THREADS)))}


if __name__ == "__main__":
    app.run()
