"""An S3 endpoint over a directory: `S3App` for any ASGI server, `serve` to run it alone."""

from __future__ import annotations

from .app import S3App, S3Config

__all__ = ["S3App", "S3Config"]
