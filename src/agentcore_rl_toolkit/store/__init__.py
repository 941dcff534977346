"""Object storage by URL: a local directory, this process's memory, or S3."""

from __future__ import annotations

from .base import ObjectInfo, ObjectStore, backoff_s, jitter
from .urls import StoreURL, open_store, parse_url, url_matches

__all__ = ["ObjectInfo", "ObjectStore", "StoreURL", "backoff_s", "jitter", "open_store", "parse_url", "url_matches"]
