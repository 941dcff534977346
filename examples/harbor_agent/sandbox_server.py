"""Process 1 of a sandbox: runs commands, writes and reads files, as asked over its standard input.

One JSON object per line, one answer per line. Standard library only: it runs in whatever Python the sandbox sees.

    {"do": "run", "argv": [...], "cwd": "/app", "env": {...}, "limit_s": 30}  ->  {"code": 0 or null, "output": "..."}
    {"do": "write", "folder": "/tests", "files": {"test.sh": base64}, "empty_first": true}  ->  {}
    {"do": "read", "path": "/logs/verifier/reward.txt"}  ->  {"data": base64 or null}

The children of a command continue after its end, as in a container. Processes in the namespace cannot kill process 1 or read its
memory.
"""

import base64
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

PR_SET_DUMPABLE = 4
MAX_OUTPUT = 256 << 10
MAX_FILE = 16 << 20


def run(request):
    """Run a command to its end or its deadline. Its output goes through a file, so a remaining child does not block."""
    folder = request.get("cwd") or "/"
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                request["argv"],
                cwd=folder if os.path.isdir(folder) else "/",
                env=request["env"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as e:
            return {"code": 127, "output": str(e)}
        try:
            code = process.wait(request["limit_s"])
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with contextlib.suppress(ChildProcessError):  # process 1 inherits the remaining children
            while os.getpid() == 1 and os.waitpid(-1, os.WNOHANG)[0]:
                pass
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - MAX_OUTPUT))
        return {"code": code, "output": output.read().decode(errors="replace")}


def write(request):
    """Write files below a folder; those that begin with #! become executable."""
    folder = request["folder"]
    if request.get("empty_first") and os.path.isdir(folder):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
    os.makedirs(folder, exist_ok=True)
    for path, data in request["files"].items():
        target = os.path.join(folder, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        content = base64.b64decode(data)
        with open(target, "wb") as file:
            file.write(content)
        os.chmod(target, 0o755 if content.startswith(b"#!") else 0o644)
    return {}


def read(request):
    """A regular file's content, or none."""
    path = request["path"]
    try:
        if os.path.islink(path) or not os.path.isfile(path) or os.path.getsize(path) > MAX_FILE:
            return {"data": None}
        with open(path, "rb") as file:
            return {"data": base64.b64encode(file.read()).decode()}
    except OSError:
        return {"data": None}


DO = {"run": run, "write": write, "read": read}


def main():
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = DO[request["do"]](request)
        except OSError as e:
            answer = {"error": str(e)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
