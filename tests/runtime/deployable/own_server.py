"""An agent that runs a uvicorn server of its own, inside a loop of its own."""

import asyncio

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route


async def ping(request):
    return JSONResponse({"status": "Healthy"})


async def invoke(request):
    return JSONResponse({"got": await request.json()})


app = Starlette(
    routes=[
        Route("/ping", ping),
        Route("/invocations", invoke, methods=["POST"]),
    ]
)


async def main():
    await uvicorn.Server(uvicorn.Config(app, host="0.0.0.0", port=8080, log_level="warning")).serve()


if __name__ == "__main__":
    asyncio.run(main())
