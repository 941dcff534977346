"""An agent that hides what it takes of the disk, or leaves folders that are hard to remove, as its payload says."""

import mmap
import os
import socket
import subprocess
import sys
import time

from bedrock_agentcore.runtime import BedrockAgentCoreApp

app = BedrockAgentCoreApp()
held = []
CHILD = """
import os, time
name = f"c{os.getpid()}"  # its own: another one may be about to begin
file = open(name, "wb")
os.unlink(name)
for _ in range(%d):
    file.write(bytes(2**20))
file.flush()
time.sleep(600)
"""


def nest(levels, mode):
    """Folders in folders, each of this mode, further down than any path reaches."""
    name = f"nest{time.time_ns()}"
    os.mkdir(name)
    fd = os.open(name, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d" * 50, dir_fd=fd)
        below = os.open("d" * 50, os.O_RDONLY, dir_fd=fd)
        os.fchmod(fd, mode)
        os.close(fd)
        fd = below
    return fd


def write(file, megabytes):
    for _ in range(megabytes):
        file.write(bytes(2**20))
    file.flush()


@app.entrypoint
def main(payload):
    what, size = payload["do"], payload.get("mb", 0)
    if what == "open":
        held.append(open("gone", "wb"))  # noqa: SIM115  # it stays open
        os.unlink("gone")
        write(held[-1], size)
    elif what == "map":
        with open("gone", "wb+") as file:
            write(file, size)
            held.append(mmap.mmap(file.fileno(), size * 2**20))
        os.unlink("gone")
    elif what == "child":
        subprocess.Popen([sys.executable, "-c", CHILD % size], start_new_session=True)
    elif what == "deep":  # below what a path can name
        fd = nest(120, 0o000)
        with open(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=fd), "wb") as file:
            write(file, size)
    elif what == "nest":
        os.close(nest(payload["levels"], payload["mode"]))
    elif what == "empty":
        os.mkdir("many")
        for number in range(payload["files"]):
            os.close(os.open(f"many/{number}", os.O_WRONLY | os.O_CREAT))
    elif what == "log":
        for _ in range(size):
            print("x" * (2**20 - 1), flush=True)
        print("the last line", flush=True)
    time.sleep(payload.get("s", 0))
    return {"host": socket.gethostname()}


if __name__ == "__main__":
    app.run()
