"""The agent of the container tests: standard library only, does what its payload says."""

import json
import os
import signal
import socket
import socketserver
import sys
import time
from http.server import BaseHTTPRequestHandler


def stop(number, frame):
    print("stopping", flush=True)
    os._exit(0)


def act(payload):
    what = payload.get("do", "echo")
    if what == "echo":
        return {"echo": payload, "pid": os.getpid(), "host": socket.gethostname()}
    if what == "env":
        return dict(os.environ)
    if what == "die":
        print("dying on purpose", flush=True)
        os._exit(7)
    if what == "fill":
        held = [bytearray(b"x") * 2**20 for _ in range(payload["mb"])]
        return {"held": len(held)}
    raise KeyError(what)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, {"status": "Healthy"})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            self.answer(200, act(json.loads(body)))
        except Exception as e:
            self.answer(500, {"error": str(e)})

    def log_message(self, *args):
        return


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True


if os.environ.get("FAIL"):
    sys.exit(f"cannot start: {os.environ['FAIL']}")
signal.signal(signal.SIGTERM, stop)
time.sleep(float(os.environ.get("SLOW", "0")))
print("listening", flush=True)
Server(("0.0.0.0", 8080), Handler).serve_forever()
