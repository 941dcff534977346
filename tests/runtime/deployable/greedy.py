"""An agent that takes as much memory as its payload says."""

from bedrock_agentcore.runtime import BedrockAgentCoreApp

app = BedrockAgentCoreApp()


@app.entrypoint
def main(payload):
    held = [bytearray(b"x") * 2**20 for _ in range(payload.get("memory_mb", 0))]
    return {"held": len(held)}


if __name__ == "__main__":
    app.run()
