"""The URLs of one gateway or of several, as settings, flags and variables give them."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ConfigError

Urls = str | Sequence[str]


def gateway_urls(given: Urls) -> tuple[str, ...]:
    """One URL, several in a list, or several in one text with commas between. Raises: ConfigError for none, or one twice."""
    parts = given.split(",") if isinstance(given, str) else given
    urls = tuple(part.strip().rstrip("/") for part in parts)
    if not urls or not all(urls):
        raise ConfigError(f"{given!r} names no gateway: give a URL, or several with commas between")
    if len(set(urls)) < len(urls):
        raise ConfigError(f"{given!r} names a gateway twice")
    return urls


def public_urls(urls: Sequence[str], given: Urls | None) -> tuple[str, ...]:
    """The same gateways as agents see them, in the same order. Raises: ConfigError where the numbers differ."""
    if given is None:
        return tuple(urls)
    public = gateway_urls(given)
    if len(public) != len(urls):
        raise ConfigError(
            f"there are {len(urls)} gateways and {len(public)} public URLs: give one for each, in their order"
        )
    return public
