"""A scripted judge with OpenAI's chat API, which replaces a judge model. It scores the word problems of the quickstart.

    python examples/signals/judge_server.py --right 0.9 --seed 0        # prints its URL; Ctrl-C ends it

An attempt gets 1 if its last message ends with the answer of the task, otherwise 0. This is the score of a share of
``--right`` of all attempts. The others get the opposite score. The choice depends on the seed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], tuple[int, str]]  # the body of a call -> a status, and the judge's text


def right_mostly(share: float, seed: int) -> Answer:
    """A judge that is right about this share of the attempts."""

    def answer(body: dict[str, Any]) -> tuple[int, str]:
        shown = json.loads(body["messages"][-1]["content"])
        wanted = str(json.loads(shown["task"])["answer"])
        scores = []
        for attempt in shown["attempts"]:
            last = attempt["dialogue"].rpartition("assistant: ")[2]
            found = re.findall(r"-?\d+", last)
            right = bool(found) and found[-1] == wanted
            if random.Random(f"{seed}/{shown['task']}/{attempt['dialogue']}").random() >= share:
                right = not right
            reason = f"It ends in {found[-1] if found else 'no number'}, the answer is {wanted}."
            scores.append({"id": attempt["id"], "reason": reason, "score": float(right)})
        return 200, json.dumps({"scores": scores})

    return answer


def server(answer: Answer, port: int = 0) -> ThreadingHTTPServer:
    """A judge on a port. Serve it with `serve_forever`; ``calls`` contains the authorization and body of each call."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            made.calls.append((self.headers["authorization"], body))  # type: ignore[attr-defined]
            status, text = answer(body) if self.path == "/v1/chat/completions" else (404, "no such route")
            reply: dict[str, Any] = {"error": {"message": text, "type": "scripted"}}
            if status == 200:
                tokens = {"prompt_tokens": len(json.dumps(body["messages"])) // 4, "completion_tokens": len(text) // 4}
                choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
                reply = {"object": "chat.completion", "model": body["model"], "choices": [choice], "usage": tokens}
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            with contextlib.suppress(ConnectionError):  # the caller has disconnected
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Do not log calls."""

    made = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    made.calls = []  # type: ignore[attr-defined]
    made.daemon_threads = True
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--right", type=float, default=0.9, help="share of the attempts that it judges right [%(default)s]"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8090)
    given = parser.parse_args()
    made = server(right_mostly(given.right, given.seed), given.port)
    print(f"http://127.0.0.1:{made.server_port}/v1", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        made.serve_forever()


if __name__ == "__main__":
    main()
