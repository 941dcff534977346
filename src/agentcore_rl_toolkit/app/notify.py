"""Tells a waiting client that a record is stored. Best effort: the record in the store is the truth, this only saves a poll."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)


async def notify(url: str, message: Mapping[str, Any], *, timeout_s: float, api_key: str | None = None) -> bool:
    """POST the message as JSON; True when the answer was 2xx. Never raises, never follows a redirect."""
    try:
        async with asyncio.timeout(timeout_s + 1.0):
            status = await asyncio.to_thread(_post, url, json.dumps(message).encode(), timeout_s, api_key)
    except Exception as e:  # whatever happens here, the rollout has ended well
        logger.warning("push to %s failed: %s: %s", place_of(url), type(e).__name__, e)
        return False
    if not 200 <= status < 300:
        logger.warning("push to %s was answered with HTTP %d", place_of(url), status)
    return 200 <= status < 300


def place_of(url: str) -> str:
    """A URL as it may be logged: whoever knows its path may push."""
    scheme, found, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0].partition('?')[0].rpartition('@')[2]}" if found else "notify_url"


def _post(url: str, body: bytes, timeout_s: float, api_key: str | None) -> int:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("notify_url must be an http or https URL")
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=timeout_s, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        connection.request("POST", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), body, headers)
        response = connection.getresponse()
        response.read(65_536)
        return response.status
    finally:
        connection.close()
