"""Replaces personal data and secrets in texts by placeholders. The same value gets the same placeholder."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..errors import ConfigError

_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,4})?\b")
_CARD = re.compile(r"\b\d(?:[ -]?\d){12,18}\b")
_PHONE = re.compile(
    r"(?<![\w.])(?:\+\d{1,3}[ .-]?)?(?:\(\d{1,4}\)[ .-]?\d{2,4}(?:[ .-]\d{2,4})+|\d{2,4}(?:[ .-]\d{2,4}){2,4})(?![\w.])"
    r"|\+\d{8,15}\b"
)
_SECRET = re.compile(
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"  # access key ids of AWS
    r"|\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}"
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"  # a JSON Web Token
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----"
    r"|(?i:\b(?:password|passwd|secret|api[_-]?key|token|bearer)\b[\"']?\s*[:=]?\s*[\"']?)(?=[^\s\"',;]*\d)[^\s\"',;]{8,}"
)
_IP = re.compile(
    r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])|(?<![\w:])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:])"
)


# Secrets come first: parts of one may look like something else.
_KINDS = (
    ("SECRET", _SECRET),
    ("EMAIL", _EMAIL),
    ("IBAN", _IBAN),
    ("CARD", _CARD),
    ("IP", _IP),
    ("PHONE", _PHONE),
)


class Redaction:
    """Redacts all texts of one harvest.

    Emails, phone numbers, cards, IBANs, keys and tokens, and IP addresses are replaced. ``patterns`` are further regular
    expressions. ``counts`` is the number of replacements by kind.
    Raises: ConfigError for a pattern that is no regular expression.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        try:
            own = [("OTHER", re.compile(pattern)) for pattern in patterns]
        except re.error as e:
            raise ConfigError(f"--redact {e.pattern!r} is no regular expression: {e}") from e
        self._kinds = [*own, *_KINDS]
        self._placeholders: dict[tuple[str, str], str] = {}
        self._values: Counter[str] = Counter()  # keys are kinds
        self.counts: dict[str, int] = {}

    def text(self, value: str) -> str:
        """Return the text with placeholders such as ``<EMAIL_1>``."""
        for kind, pattern in self._kinds:
            value = pattern.sub(lambda found, kind=kind: self._replaced(kind, found[0]), value)  # type: ignore[misc]
        return value

    def value(self, value: Any) -> Any:
        """Redact every text in a JSON value; keys of objects stay. Numbers of 8 digits or more are read as texts."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self.value(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner) for inner in value]
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**7:
            redacted = self.text(str(value))
            return value if redacted == str(value) else redacted
        return value

    def _replaced(self, kind: str, found: str) -> str:
        if not _is_one(kind, found):
            return found
        self.counts[kind] = self.counts.get(kind, 0) + 1
        same = re.sub(r"[\s.-]", "", found).lower() if kind in ("CARD", "IBAN", "PHONE") else found
        if (kind, same) not in self._placeholders:
            self._values[kind] += 1
            self._placeholders[kind, same] = f"<{kind}_{self._values[kind]}>"
        return self._placeholders[kind, same]


def _is_one(kind: str, found: str) -> bool:
    """Return False for a match that only looks like one: a card needs its check digit, an IBAN its check sum."""
    if kind == "CARD":
        digits = [int(d) for d in found if d.isdigit()]
        doubled = [d if place % 2 == 0 else sum(divmod(2 * d, 10)) for place, d in enumerate(reversed(digits))]
        return sum(doubled) % 10 == 0
    if kind == "IBAN":
        compact = found.replace(" ", "")
        return int("".join(str(int(c, 36)) for c in compact[4:] + compact[:4])) % 97 == 1
    if kind == "IP":
        try:
            ipaddress.ip_address(found)
        except ValueError:
            return False
        return found.count(":") != 2 or "::" in found  # 12:30:45 is a time
    if kind == "PHONE":
        return (
            8 <= sum(c.isdigit() for c in found) <= 15 and re.fullmatch(r"\d{4}[ .-]\d{2}[ .-]\d{2}", found) is None
        )  # a date
    return True
