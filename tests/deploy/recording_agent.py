"""An agent for an image without packages, of the standard library only. It ends a rollout by leaving its record, as any does."""

import base64
import hmac
import http.client
import json
import os
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SESSION_HEADER = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"


def key_of(session, rollout):
    return f"{rollout['exp_id']}/{rollout['input_id']}/{session}.json"


def leave_record(rollout, key):
    """Put the record by a presigned address. Source: Amazon S3, "Signing and Authenticating REST Requests"."""
    endpoint = urllib.parse.urlsplit(os.environ["AWS_ENDPOINT_URL_S3"])
    expires = str(int(time.time()) + 60)
    path = urllib.parse.quote(f"/{rollout['s3_bucket'].removeprefix('s3://')}/{key}")
    secret = os.environ.get("AWS_SECRET_ACCESS_KEY", "").encode()
    signature = hmac.digest(secret, f"PUT\n\n\n{expires}\n{path}".encode(), "sha1")
    query = {
        "AWSAccessKeyId": os.environ.get("AWS_ACCESS_KEY_ID", ""),
        "Signature": base64.b64encode(signature).decode(),
        "Expires": expires,
    }
    body = json.dumps({"status_code": 200, "stop_reason": "end_turn", "rewards": 1.0}).encode()
    connection = http.client.HTTPConnection(endpoint.hostname, endpoint.port, timeout=30)
    connection.request("PUT", f"{path}?{urllib.parse.urlencode(query)}", body)
    reply = connection.getresponse()
    print("record:", reply.status, reply.read()[:500], flush=True)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({"status": "Healthy"})

    def do_POST(self):
        payload = json.loads(self.rfile.read(int(self.headers["content-length"])))
        rollout = payload["_rollout"]
        key = key_of(self.headers[SESSION_HEADER], rollout)
        threading.Thread(target=leave_record, args=(rollout, key)).start()
        self.answer({"status": "processing", "s3_bucket": rollout["s3_bucket"], "result_key": key})

    def log_message(self, *words):
        return


ThreadingHTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
