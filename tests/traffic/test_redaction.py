"""Redaction: what is replaced, what is kept, and that equal values get equal placeholders."""

from __future__ import annotations

import time

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
        ("AWS_SECRET_ACCESS_KEY: wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "<SECRET_1>"),
        ("aws_secret_access_key=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "<SECRET_1>"),
        ("https://x.org/?api_key=abcdefghijklmnop&page=2", "https://x.org/?<SECRET_1>&page=2"),
        ('{"my_token": "abc12345678"}', '{"<SECRET_1>"}'),
        ("AIzaSyA1234567890abcdefghijklmnopqrstuvw", "<SECRET_1>"),
        ("sk_" + "live_51H8abcdefghijklmnopqrst", "<SECRET_1>"),
        ("github_pat_11ABCDEFG0abcdefghijklmnop_abcdef", "<SECRET_1>"),
        ("glpat-abcdefghij1234567890", "<SECRET_1>"),
        ("hf_abcdefghijklmnopqrstuvwxyzABCDEF", "<SECRET_1>"),
        ("postgres://u:s3cr3tpass@h/db", "postgres://<SECRET_1>@h/db"),
        ("Authorization: Basic dXNlcjpwYXNzdzByZDE=", "Authorization: <SECRET_1>"),
        ("john%40example.com", "<EMAIL_1>"),
        ("iban de89370400440532013000 and be68 5390 0754 7034 from", "iban <IBAN_1> and <IBAN_2> from"),
        ("+44 7911 123456, +49 (0)151 23456789", "<PHONE_1>, <PHONE_2>"),
        ("0151 23456789, 02079460958, 030/1234567", "<PHONE_1>, <PHONE_2>, <PHONE_3>"),
        ("4155552671, 06.12.34.56.78", "<PHONE_1>, <PHONE_2>"),
        ("in 2027 4111 1111 1111 1111 12/27", "in 2027 <CARD_1> 12/27"),
        ("card4111111111111111, 3782 822463 10005 12", "card<CARD_1>, <CARD_2> 12"),
        ("4111.1111.1111.1111", "<CARD_1>"),
        ("at 10.0.0.1.", "at <IP_1>."),
        ("from ::ffff:192.168.1.5", "from <IP_1>"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "<SECRET_1>"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE and the rest was cut of", "<SECRET_1>"),
        ("-----BEGIN PGP PRIVATE KEY BLOCK-----\nlQ\n-----END PGP PRIVATE KEY BLOCK-----.", "<SECRET_1>."),
        ('"secretAccessKey":"wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",', '"<SECRET_1>",'),
        (
            "SessionToken: IQoJb3JpZ2luX2VjEJ1; clientSecret=abcd1234; secretKey=efgh5678",
            "<SECRET_1>; <SECRET_2>; <SECRET_3>",
        ),
        ("card 4111\u00a01111\u00a01111\u00a01111", "card <CARD_1>"),
        ("+49\u00a0170\u20111234567, 555\u2011123\u20114567", "<PHONE_1>, <PHONE_2>"),
        ("DE89\u202f3704\u202f0044\u202f0532\u202f0130\u202f00 from", "<IBAN_1> from"),
        ("(030) 1234 5678 is 030 12345678", "<PHONE_1> is <PHONE_1>"),
        ("12 34 56 78, 1111 2222 3333 444", "<PHONE_1>, <PHONE_2>"),
        ("4111\u20131111\u20131111\u20131111", "<CARD_1>"),
        ("-" * 70 + "password: correcthorsebatterystaple", "-" * 70 + "<SECRET_1>"),
        ("A_" * 35 + "API_KEY=correcthorsebatterystaple", "A_" * 35 + "<SECRET_1>"),
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
        "GB12\u017f\u017f\u017f\u017f1234567KK",  # the long s, which is an S without regard to case
        "12 34 567, 1111 2222 3333 4445",  # too few and too many digits of a phone
        "the secretary: 12345678, broken=abcdefghijklmnopqrstuvwxyz",
        "in 2019\u20132020\u20132021 on pages 130\u2013140 200",
        "the token budget is 4096 tokens",
        "ratio 16:9, ids 1234567",
        "from 2026-11-29 12:30 to 01.12.2026 08:15, for 0.4111111111111111",
        "main :: IO (), std::vector, version 10.0.0.1.2",
        "max_tokens=4096, basic understanding, a basic python3.11 script, token: required",
        "550e8400-e29b-41d4-a716-041234567890 at http://localhost:8080/a@b",
    ],
)
def test_other_texts_stay(text: str) -> None:
    assert Redaction().text(text) == text


@pytest.mark.parametrize(
    "part",
    [
        *(
            "a",
            "a.",
            "a@",
            "a@b-",
            "a%40",
            "1",
            "1 ",
            "1.",
            "1-",
            "0151 ",
            "4111 ",
            "+1",
            "(1)",
            "1:",
            "::",
            "DE89 ",
            "ab12 ",
        ),
        *(
            "token",
            "token=",
            "token = ",
            "token ",
            "my_",
            "a-",
            "a_token",
            "aToken",
            "secret",
            "aB-",
            "basic ",
            "Basic a",
            "://",
            "://a:",
            "eyJ",
            "sk-",
            "'",
            " ",
        ),
        *("-----BEGIN PRIVATE KEY-----", "-----BEGIN ", "-----END "),
    ],
)
def test_the_time_is_linear_in_the_length_of_a_text(part: str) -> None:
    def seconds(length: int) -> float:
        text = part * (length // len(part))
        taken = []
        for _ in range(2):
            start = time.process_time()
            Redaction().text(text)
            taken.append(time.process_time() - start)
        return min(taken)

    assert seconds(20_000) < 9 * seconds(5_000) + 0.01  # quadratic: 16 times


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


def test_a_pattern_that_fits_no_letter_replaces_nothing() -> None:
    assert Redaction(["x*"]).text("axa") == "a<OTHER_1>a"


def test_a_pattern_must_be_a_regular_expression() -> None:
    with pytest.raises(ConfigError, match="no regular expression"):
        Redaction(["("])
