"""An agent that answers with the headers and body its payload names."""

from bedrock_agentcore.runtime import BedrockAgentCoreApp
from starlette.responses import JSONResponse, Response

app = BedrockAgentCoreApp()


@app.entrypoint
async def main(payload, context):
    seen = {k.lower(): v for k, v in context.request.headers.items()}
    if payload.get("body") is not None:
        return Response(payload["body"], headers=payload.get("headers", {}), status_code=payload.get("status", 200))
    return JSONResponse(seen, headers=payload.get("headers", {}))


if __name__ == "__main__":
    app.run()
