"""Replaces personal data and secrets in texts by placeholders. The same value gets the same placeholder."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from ..errors import ConfigError

# All repetitions are bounded, or begin where a run of their characters begins: the time is linear in the length of a text.


def _number(pattern: str) -> re.Pattern[str]:
    """Compile the pattern of a number. A blank or a hyphen in it stands for all kinds of them, as web pages have them."""
    return re.compile(pattern.replace("[ ", "[ \u00a0\u2007\u2009\u202f").replace("-]", "\u2010\u2011-]"))


_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]+(?:@|%40)[\w-]+(?:\.[\w-]+)+")
_IBAN = _number(r"(?ai)\b[A-Z]{2}\d{2}(?:[ ]?[A-Z0-9]{4}){2,7}(?:[ ]?[A-Z0-9]{1,4})?\b")
# A first digit as cards have it: no year before a card is a part of it.
_CARD_GROUPS = _number(r"(?<!\d)(?<!\d[.,])(?:[3-6]\d{3}|2[2-7]\d\d)([ .\u2013-])\d{4}\1\d{4}\1\d{4}(?!\d)")
_CARD = _number(r"(?<!\d)(?<!\d[.,])\d(?:[ \u2013-]?\d){12,18}(?!\d)")
_PHONE = _number(
    r"(?<![\w.])(?!\d{4}[.-]\d\d[.-]\d\d\b|\d\d[.-]\d\d[.-]\d{4}\b)"  # no date
    r"(?:\(\d{1,4}\)[ .-]?\d{2,4}(?:[ .-]\d{2,4})+|\d{2,4}(?:[ .-]\d{2,4}){2,4})(?![\w.])"
    r"|(?<!\w)\+\d(?:[ .-]?\(?\d\)?){7,14}"  # any country
    r"|(?<![\w.-])0\d{2,4}[ /-]?\d{5,9}(?![\w-])"
    r"|(?<![\w.-])[2-9]\d{2}[2-9]\d{6}(?![\w-])"  # North America
)
_SECRET = re.compile(
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"  # access key ids of AWS
    r"|\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}"
    r"|\b(?:sk|pk|rk)_(?:live|test)_[A-Za-z0-9]{10,}"
    r"|\bAIza[\w-]{30,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bhf_[A-Za-z0-9]{20,}"
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"  # a JSON Web Token
    # also one whose end was cut off
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----(?>(?:[^-]|-(?!----))*)"
    r"(?:-----END [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----|\Z)"
    r"|(?<=://)[^\s/:@]{0,100}:[^\s/@]{1,200}(?=@)"  # user and password of an address
    r"|(?i:\bbasic )(?=[A-Za-z+/]{0,200}[0-9=])[A-Za-z0-9+/]{8,}={0,2}"
    # name=value: a long value, or one with a digit
    r"|(?i:(?:(?<![^\W_])|(?<![\w-])[\w-]{0,60}?)(?:password|passwd|secret|api[_-]?key|access[_-]?key|token|signature)(?:key)?(?:[_-][a-z0-9]{1,20}){0,3}"
    r"[\"']?\s{0,3}[:=]\s{0,3}[\"']?)(?:(?=[^\s\"',;&]{0,200}?\d)[^\s\"',;&]{8,}|[^\s\"',;&]{16,})"
    r"|(?i:\b(?:password|passwd|secret|api[_-]?key|token|bearer)\b[\"']?\s{0,3}[:=]?\s{0,3}[\"']?)(?=[^\s\"',;&]{0,200}?\d)[^\s\"',;&]{8,}"
)
_IP = re.compile(
    r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\w)"
    r"|(?<![\w:])(?:[0-9a-fA-F]{0,4}:){2,7}(?:(?:\d{1,3}\.){3}\d{1,3}|[0-9a-fA-F]{0,4})(?![\w:])"
)


# Secrets come first: parts of one may look like something else.
_KINDS = (
    ("SECRET", _SECRET),
    ("EMAIL", _EMAIL),
    ("IBAN", _IBAN),
    ("CARD", _CARD_GROUPS),
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
        self._numbers: defaultdict[str, dict[str, int]] = defaultdict(
            dict
        )  # numbers of placeholders, by kind and value
        self.counts: Counter[str] = Counter()

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
        if isinstance(value, int) and abs(value) >= 10**7 and (redacted := self.text(str(value))) != str(value):
            return redacted
        return value

    def _replaced(self, kind: str, found: str) -> str:
        value = found
        while not _is_one(kind, value):  # the next word or number may be no part of a card or an IBAN
            shorter = re.sub(r"\s\S*\Z", "", value)
            if kind not in ("CARD", "IBAN") or shorter == value:
                return found
            value = shorter
        self.counts[kind] += 1
        same = re.sub(r"\W", "", value).lower() if kind in ("CARD", "IBAN", "PHONE") else value
        number = self._numbers[kind].setdefault(same, len(self._numbers[kind]) + 1)
        return f"<{kind}_{number}>{found[len(value) :]}"


def _is_one(kind: str, found: str) -> bool:
    """Return False for a match that only looks like one: a card needs its check digit, an IBAN its check sum."""
    digits = [int(d) for d in found if d.isdecimal()]
    if kind == "CARD":
        doubled = [d if place % 2 == 0 else sum(divmod(2 * d, 10)) for place, d in enumerate(reversed(digits))]
        return len(digits) >= 13 and sum(doubled) % 10 == 0
    if kind == "IBAN":
        compact = re.sub(r"\s", "", found)
        return len(compact) >= 15 and int("".join(str(int(c, 36)) for c in compact[4:] + compact[:4])) % 97 == 1
    if kind == "IP":
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(found)
            return found != "::" and (found.count(":") != 2 or "::" in found)  # 12:30:45 is a time, and :: code
        return False
    return 8 <= len(digits) <= 15 if kind == "PHONE" else bool(found)
