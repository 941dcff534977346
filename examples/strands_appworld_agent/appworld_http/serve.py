"""Serve AppWorld's environment on a free port of 127.0.0.1. Run it with AppWorld's Python, which needs no package of ours.

    python serve.py READY_FILE PARENT_PID

`appworld serve environment` listens on all addresses, and everyone who can reach it can run code. This server listens on
127.0.0.1. It writes {"url": ...} to READY_FILE when it is ready, and ends when the process PARENT_PID ends.
"""

import json
import os
import socket
import sys
import threading
import time


def main() -> None:
    ready, parent = sys.argv[1], int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    import uvicorn
    from appworld.serve.environment import app

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(16)
    with open(f"{ready}.partial", "w") as file:
        json.dump({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"}, file)
    os.replace(f"{ready}.partial", ready)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main()
