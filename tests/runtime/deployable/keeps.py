"""An agent that keeps open what KEEPS names when it is loaded: most of it forks would share."""

import asyncio
import http.client
import json
import logging
import multiprocessing
import os
import socket
import sqlite3
import subprocess
import threading
from urllib.parse import urlsplit

import uvicorn

DATABASE = os.path.join(os.environ["HOME"], "agent.db")


def connection():
    made = http.client.HTTPConnection(urlsplit(os.environ["URL"]).netloc)
    made.request("GET", "/setting")
    made.getresponse().read()
    return made


def closed_connection():
    connection().close()


def connection_of_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(connection()))
    thread.start()
    thread.join()
    return found


def unix_connection():
    listener, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    listener.bind(f"\0keeps-{os.getpid()}")
    listener.listen()
    client.connect(listener.getsockname())
    return listener, client


def udp_socket():
    made = socket.socket(type=socket.SOCK_DGRAM)
    made.sendto(b"hello", ("127.0.0.1", 9))
    return made


def database():
    made = sqlite3.connect(DATABASE)
    made.execute("create table if not exists notes (text)")
    made.commit()
    return made


def database_to_read():
    database().close()
    return sqlite3.connect(f"file:{DATABASE}?mode=ro", uri=True).execute("select * from notes")


def listener():
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    made.listen()
    return made


def rows():
    with open(f"{DATABASE}.rows", "w") as file:
        file.write("row\n" * 10_000)
    return open(f"{DATABASE}.rows")


def terminal():
    ours, theirs = os.openpty()
    subprocess.Popen("cat", stdin=theirs, stdout=theirs)
    os.close(theirs)
    return ours


def used_loop():
    return asyncio.run(asyncio.sleep(0))


KINDS = {
    "connection": connection,
    "closed connection": closed_connection,
    "connection of a thread": connection_of_a_thread,
    "unix": unix_connection,
    "udp": udp_socket,
    "socket of a child": lambda: subprocess.Popen("cat", stdin=socket_of_a_child(), stdout=subprocess.DEVNULL),
    "input of a child": lambda: subprocess.Popen("cat", stdin=subprocess.PIPE, stdout=subprocess.DEVNULL),
    "terminal": terminal,
    "child": lambda: subprocess.Popen(["sleep", "600"]),
    "pool": lambda: multiprocessing.get_context("spawn").Pool(1),
    "database to read": database_to_read,
    "database in memory": lambda: sqlite3.connect(":memory:"),
    "new database": lambda: sqlite3.connect(f"{DATABASE}.new").execute("pragma user_version").connection,
    "listener": listener,
    "rows": rows,
    "file to change": lambda: os.open(f"{DATABASE}.state", os.O_RDWR | os.O_CREAT),
    "log": lambda: (logging.FileHandler(f"{DATABASE}.log"), os.open(os.devnull, os.O_RDWR)),
    "tracker": lambda: multiprocessing.get_context("spawn").Lock(),
    "loop": asyncio.new_event_loop,
    "used loop": used_loop,
}


def socket_of_a_child():
    global ours
    ours, theirs = socket.socketpair()
    return theirs


kept = KINDS[os.environ["KEEPS"]]() if __name__ == "__main__" else None


async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    body = (await receive()).get("body", b"")
    text = {"status": "Healthy"}
    if scope["path"] != "/ping":
        kept.request("POST", "/question", body)
        text = json.loads(kept.getresponse().read())
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(text).encode()})


if __name__ == "__main__":
    uvicorn.run(app, host="0.0.0.0", port=8080, lifespan="off", log_level="warning")
