"""How the router proves itself to a node agent when it opens a connection.

The agent sends a nonce, the router answers with one line of JSON that says what the connection is for, and a MAC over both.
The cluster's token is never sent. What follows is plain: the cluster's network is trusted, as it is for Ray itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
from typing import Any

from ...errors import LocalRuntimeError

NONCE_BYTES = 32  # as hex digits, with its newline one more
LINE_LIMIT_BYTES = 4096
TIMEOUT_S = 10.0


def new_nonce() -> bytes:
    """What an agent greets with, newline included."""
    return secrets.token_hex(NONCE_BYTES // 2).encode() + b"\n"


def _mac(token: str, nonce: bytes, body: bytes) -> str:
    return hmac.new(token.encode(), nonce + b"\0" + body, hashlib.sha256).hexdigest()


def opening(token: str, nonce: bytes, purpose: dict[str, Any]) -> bytes:
    """The router's first line."""
    body = json.dumps(purpose)
    return json.dumps({"for": body, "mac": _mac(token, nonce.strip(), body.encode())}).encode() + b"\n"


def verify(token: str, nonce: bytes, line: bytes) -> dict[str, Any] | None:
    """The purpose of a connection, or None when the line is not by a holder of the token."""
    try:
        message = json.loads(line)
        body, mac = message["for"], message["mac"]
        if not hmac.compare_digest(_mac(token, nonce.strip(), body.encode()).encode(), mac.encode()):
            return None
        purpose = json.loads(body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return purpose if isinstance(purpose, dict) else None


async def dial(
    host: str, port: int, token: str, purpose: dict[str, Any], *, timeout_s: float = TIMEOUT_S
) -> socket.socket:
    """A connection to a node agent, for this purpose. Raises: LocalRuntimeError when there is none in time."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(timeout_s):
            await loop.sock_connect(sock, (host, port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = b""
            while len(nonce) <= NONCE_BYTES:
                piece = await loop.sock_recv(sock, NONCE_BYTES + 1 - len(nonce))
                if not piece:
                    raise LocalRuntimeError(f"the node agent at {host}:{port} closed the connection")
                nonce += piece
            await loop.sock_sendall(sock, opening(token, nonce, purpose))
    except (OSError, TimeoutError) as e:
        sock.close()
        raise LocalRuntimeError(f"cannot reach the node agent at {host}:{port}: {str(e) or 'no answer in time'}") from e
    except BaseException:
        sock.close()
        raise
    return sock
