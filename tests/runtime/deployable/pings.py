"""An agent whose /ping answers as the variable PING says."""

import os
import time

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

first = None


async def ping(request):
    global first
    first = first or time.monotonic()
    kind = os.environ["PING"]
    if kind == "never" or (kind == "late" and time.monotonic() - first < 1.0):
        return JSONResponse({"status": "starting"}, status_code=503)
    if kind == "busy without time":
        return JSONResponse({"status": "HealthyBusy"})
    if kind == "time of now":
        return JSONResponse({"status": "Healthy", "time_of_last_update": time.time_ns()})
    return JSONResponse({"status": "Healthy"})


async def invoke(request):
    return JSONResponse({"got": await request.json()})


app = Starlette(routes=[Route("/ping", ping), Route("/invocations", invoke, methods=["POST"])])
if __name__ == "__main__":
    uvicorn.run(app, host="0.0.0.0", port=8080)
