"""The scripted engine: one process, plain sockets and epoll, answers made before the first call.

    python -m gateway_load.upstream

Prints its port. Every call is answered at once, a stream in a single write: the server is never waited for and costs next to
nothing.

Size: `max_tokens` of the call (64, 256, 1024). `model` "history-N" answers with a prompt of N tokens that extends the
call's before; "distinct" rotates through prompts and completions that differ.
"""

from __future__ import annotations

import re
import select
import socket

from .replies import (
    SIZES,
    VARIANTS,
    GrowingHistory,
    chat_body,
    chat_stream,
    generate_body,
    text_stream,
    whole,
)

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_SIZE = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')
_HISTORY = re.compile(rb'"model": ?"history-(\d+)"')
_STREAM = re.compile(rb'"stream": ?true')


class Agent:
    """A connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = b""
        self.unsent: list[bytes] = []
        self.open = True


class Upstream:
    def __init__(self) -> None:
        self.wholes = {n: whole(chat_body(n)) for n in SIZES}
        self.streams = {n: chat_stream(n) for n in SIZES}
        self.generated = {n: whole(generate_body(n)) for n in SIZES}
        self.texts = {n: text_stream(n) for n in SIZES}
        self.distinct = [whole(chat_body(1024, v, 1024)) for v in range(VARIANTS)]
        self.asked = 0
        self.history = GrowingHistory()
        self.poll = select.epoll()
        self.agents: dict[int, Agent] = {}
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.listener.setblocking(False)
        self.poll.register(self.listener, select.EPOLLIN)

    def run(self) -> None:
        listening = self.listener.fileno()
        while True:
            for fd, event in self.poll.poll(-1, 1024):
                if fd == listening:
                    self.accept()
                    continue
                agent = self.agents[fd]
                if event & select.EPOLLOUT:
                    self.flush(agent)
                if agent.open and event & ~select.EPOLLOUT:
                    self.receive(agent)

    def accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
            self.agents[sock.fileno()] = Agent(sock)
            self.poll.register(sock, select.EPOLLIN)

    def close(self, agent: Agent) -> None:
        agent.open = False
        self.poll.unregister(agent.sock)
        del self.agents[agent.sock.fileno()]
        agent.sock.close()

    def receive(self, agent: Agent) -> None:
        try:
            data = agent.sock.recv(2**18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close(agent)
            return
        if agent.received:
            data = agent.received + data
        while data and agent.open:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                break
            length = _LENGTH.search(data, 0, end)
            size = end + (int(length[1]) if length else 0)
            if len(data) < size:
                break
            request, data = data[:size], data[size:]
            self.answer(agent, request, end)
        agent.received = data

    def answer(self, agent: Agent, request: bytes, body_at: int) -> None:
        if request.startswith(b"GET"):
            self.write(agent, whole(b"{}"))
            return
        grown = _HISTORY.search(request, body_at)
        if grown:
            streamed = _STREAM.search(request, body_at)
            grow = self.history.stream if streamed else self.history.reply
            self.write(agent, grow(int(grown[1])))
            return
        found = _SIZE.search(request, body_at)
        size = int(found[1]) if found else 64
        path = request[: request.index(b"\r\n")]
        if b"/generate" in path:
            reply = self.generated[size]
        elif _STREAM.search(request, body_at):
            streams = self.streams if b"/chat/" in path else self.texts
            if size not in streams:  # made once: a long stream of a scenario
                streams[size] = chat_stream(size) if b"/chat/" in path else text_stream(size)
            reply = streams[size].at_once
        elif b'"distinct"' in request:
            self.asked += 1
            reply = self.distinct[self.asked % VARIANTS]
        else:
            reply = self.wholes[size]
        self.write(agent, reply)

    def write(self, agent: Agent, data: bytes) -> None:
        if agent.unsent:
            agent.unsent.append(data)
            return
        try:
            sent = agent.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close(agent)
            return
        if sent < len(data):
            agent.unsent.append(data[sent:])
            self.poll.modify(agent.sock, select.EPOLLIN | select.EPOLLOUT)

    def flush(self, agent: Agent) -> None:
        waiting, agent.unsent = agent.unsent, []
        self.poll.modify(agent.sock, select.EPOLLIN)
        for i, data in enumerate(waiting):
            self.write(agent, data)
            if not agent.open:
                return
            if agent.unsent:
                agent.unsent += waiting[i + 1 :]
                return


if __name__ == "__main__":
    server = Upstream()
    print(server.listener.getsockname()[1], flush=True)
    server.run()
