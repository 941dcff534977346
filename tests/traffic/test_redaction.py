"""Redaction: what is replaced, what is kept, and that equal values get equal placeholders."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.traffic.redaction import Redaction


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("mail bob.o+x@example.co.uk now", "mail <EMAIL_1> now"),
        ("call +1 415-555-0132 or (030) 1234 5678", "call <PHONE_1> or <PHONE_2>"),
        ("card 4111 1111 1111 1111.", "card <CARD_1>."),
        ("IBAN DE89 3704 0044 0532 0130 00", "IBAN <IBAN_1>"),
        ("from 192.168.10.7 and 2001:db8::8a2e:370:7334", "from <IP_1> and <IP_2>"),
        ("AKIAIOSFODNN7EXAMPLE", "<SECRET_1>"),
        ("key sk-proj-abcdefghijklmnop1234", "key <SECRET_1>"),
        ("Authorization: Bearer eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.c2ln", "Authorization: <SECRET_1>"),
        ("my password is: hunter2hunter2", "my password is: hunter2hunter2"),  # words between: no rule finds it
        ("password=hunter2hunter2", "<SECRET_1>"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "<SECRET_1>"),
    ],
)
def test_personal_data_and_secrets_are_replaced(text: str, redacted: str) -> None:
    assert Redaction().text(text) == redacted


@pytest.mark.parametrize(
    "text",
    [
        "What is 347 + 1,254?",
        "on 2026-11-29 at 12:30:45, for 19.99",
        "order 4111111111111112 has version 1.2.3 and 10.5.3",  # no check digit, and no address
        "GB00WEST12345698765432",
        "the token budget is 4096 tokens",
        "ratio 16:9, ids 1234567",
    ],
)
def test_other_texts_stay(text: str) -> None:
    assert Redaction().text(text) == text


def test_the_same_value_gets_the_same_placeholder_in_every_field() -> None:
    redaction = Redaction([r"ACME-\d+"])
    row = {
        "prompt": "a@x.org and b@x.org",
        "meta": [{"from": "a@x.org", "n": 4111111111111111, "small": 7}, "ACME-12", True],
    }
    assert redaction.value(row) == {
        "prompt": "<EMAIL_1> and <EMAIL_2>",
        "meta": [{"from": "<EMAIL_1>", "n": "<CARD_1>", "small": 7}, "<OTHER_1>", True],
    }
    assert redaction.value("4111-1111-1111-1111") == "<CARD_1>"
    assert redaction.counts == {"EMAIL": 3, "CARD": 2, "OTHER": 1}


def test_a_pattern_must_be_a_regular_expression() -> None:
    with pytest.raises(ConfigError, match="no regular expression"):
        Redaction(["("])
