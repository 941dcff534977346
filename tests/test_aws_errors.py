"""The table of AWS errors, row by row, with the exceptions that the libraries themselves raise."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.exceptions as boto
import pytest
import urllib3
from botocore.config import Config

from agentcore_rl_toolkit.app.causes import blame
from agentcore_rl_toolkit.aws_errors import CODES, Fate, look_up
from agentcore_rl_toolkit.contract import Cause
from scripted_runtime import ARN

SESSION_ID = "s" * 40


def answered(status: int, code: str, **headers: str) -> boto.ClientError:
    about = {"HTTPStatusCode": status, "HTTPHeaders": headers}
    words = "Rate exceeded (429), InternalServerException"  # words decide nothing
    return boto.ClientError({"Error": {"Code": code, "Message": words}, "ResponseMetadata": about}, "Operation")


@pytest.mark.parametrize("code", sorted(CODES))
def test_each_code_has_its_fate_with_any_status(code: str) -> None:
    for status in (400, 403, 429, 503):
        fault, event = (look_up(answered(status, name)) for name in (code, code[0].lower() + code[1:]))
        assert fault is not None
        assert event is not None
        assert (fault.fate, fault.code, fault.status) == (CODES[code], code, status)
        assert event.fate is fault.fate  # names in event streams begin with a small letter
        assert fault.credentials == (
            "Expired" in code or "Skewed" in code or "InTheFuture" in code or "Refresh" in code
        )


@pytest.mark.parametrize(
    ("status", "code", "fate"),
    [
        (400, "ThrottlingException", Fate.REFUSED),  # DynamoDB, SSM
        (400, "ProvisionedThroughputExceededException", Fate.REFUSED),
        (402, "ServiceQuotaExceededException", Fate.REFUSED),
        (409, "", Fate.REFUSED),
        (429, "", Fate.REFUSED),
        (403, "ExpiredTokenException", Fate.TRANSIENT),
        (403, "RequestTimeTooSkewed", Fate.TRANSIENT),
        (408, "", Fate.TRANSIENT),
        (500, "", Fate.UNCERTAIN),
        (502, "Odd", Fate.UNCERTAIN),
        (400, "ValidationException", Fate.FINAL),
        (403, "AccessDeniedException", Fate.FINAL),
        (403, "InvalidSignatureException", Fate.FINAL),
        (404, "ResourceNotFoundException", Fate.FINAL),
        (424, "RuntimeClientError", Fate.FINAL),
    ],
)
def test_the_status_decides_about_codes_without_a_row(status: int, code: str, fate: Fate) -> None:
    fault = look_up(answered(status, code))
    assert fault is not None
    assert fault.fate is fate


def test_a_wrong_signature_is_the_clocks_if_the_clock_is_off() -> None:
    for hours, fate in ((0, Fate.FINAL), (2, Fate.TRANSIENT), (-2, Fate.TRANSIENT)):
        theirs = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=hours)
        fault = look_up(answered(403, "InvalidSignatureException", date=email.utils.format_datetime(theirs)))
        assert fault is not None
        assert (fault.fate, fault.credentials) == (fate, hours != 0)
    fault = look_up(answered(403, "InvalidSignatureException", date="Mon, 20 Nov 1995 19:12:08 -0000"))
    assert fault is not None
    assert fault.fate is Fate.FINAL  # a date without a time zone


@pytest.mark.parametrize(
    ("error", "fate", "credentials"),
    [
        (boto.NoCredentialsError(), Fate.FINAL, False),
        (boto.PartialCredentialsError(provider="env", cred_var="x"), Fate.FINAL, False),
        (boto.CredentialRetrievalError(provider="role", error_msg="x"), Fate.TRANSIENT, True),
        (boto.MetadataRetrievalError(error_msg="x"), Fate.TRANSIENT, True),
        (boto.UnauthorizedSSOTokenError(), Fate.TRANSIENT, True),
        (boto.TokenRetrievalError(provider="sso", error_msg="x"), Fate.TRANSIENT, True),
        (boto.ParamValidationError(report="x"), Fate.FINAL, False),
        (boto.NoRegionError(), Fate.FINAL, False),
        (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), Fate.UNCERTAIN, False),
        (boto.ResponseStreamingError(error="x"), Fate.UNCERTAIN, False),
        (boto.ProxyConnectionError(proxy_url="http://p"), Fate.TRANSIENT, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_errors_that_botocore_raises_without_an_answer(error: Exception, fate: Fate, credentials: bool) -> None:
    fault = look_up(error)
    assert fault is not None
    assert (fault.fate, fault.code, fault.credentials) == (fate, type(error).__name__, credentials)


def test_exceptions_of_other_code_have_no_row() -> None:
    assert look_up(ValueError("x")) is None
    assert look_up(KeyError("x")) is None


@pytest.mark.parametrize("code", ["ThrottlingException", "TooManyRequestsException", "ExpiredTokenException"])
def test_an_agents_own_call_that_aws_throttles_is_not_the_agents_failure(code: str) -> None:
    for status in (400, 429):
        failed = ValueError("the tool failed")
        failed.__cause__ = answered(status, code)
        assert blame(failed).cause is Cause.INFRASTRUCTURE
    assert blame(answered(400, "ValidationException")).cause is Cause.AGENT


def test_a_conversation_that_bedrock_finds_too_long_is_the_policys_failure() -> None:
    response = {"Error": {"Code": "ValidationException", "Message": "Input is too long for requested model."}}
    found = blame(boto.ClientError({**response, "ResponseMetadata": {"HTTPStatusCode": 400}}, "Converse"))
    assert (found.cause, found.failure) == (Cause.POLICY, "context")


# ---- exceptions of real connections


def certificate(folder: Path) -> Path:
    path = folder / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(folder / "key.pem"), "-out", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    path.write_text(path.read_text() + (folder / "key.pem").read_text())
    return path


@contextlib.contextmanager
def listening(serve: Callable[[socket.socket], object]) -> Iterator[int]:
    """A server that does this with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        serve(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def invoked(url: str, **config: Any) -> tuple[Exception, Exception]:
    """The exceptions of boto3 and urllib3 for one request to this address."""
    verify = config.pop("verify", None)
    found: list[Exception] = []
    options = Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=1, **config)
    client = boto3.Session("k", "s", region_name="us-west-2").client(
        "bedrock-agentcore", endpoint_url=url, config=options, verify=verify
    )
    with contextlib.closing(client), pytest.raises(Exception) as caught:  # noqa: PT011
        client.invoke_agent_runtime(agentRuntimeArn=ARN, runtimeSessionId=SESSION_ID, payload=b"x" * 100)
    found.append(caught.value)
    certificates = {"ca_certs": str(verify)} if verify else {}
    with urllib3.PoolManager(retries=False, timeout=1, **certificates) as pool, pytest.raises(Exception) as caught:  # noqa: PT011
        pool.request("POST", url, body=b"x" * 100)
    found.append(caught.value)
    return found[0], found[1]


def fates(errors: tuple[Exception, Exception]) -> list[Fate]:
    found = [look_up(error) for error in errors]
    return [fault.fate for fault in found if fault is not None]


def test_nothing_was_sent_if_there_was_no_connection() -> None:
    assert fates(invoked("http://127.0.0.1:9")) == [Fate.TRANSIENT] * 2
    assert fates(invoked("http://no-such-host.invalid")) == [Fate.TRANSIENT] * 2
    with pytest.raises(socket.gaierror) as unknown:
        socket.create_connection(("no-such-host.invalid", 80))
    with pytest.raises(ConnectionRefusedError) as refused:
        socket.create_connection(("127.0.0.1", 9))
    assert [getattr(look_up(e.value), "fate", None) for e in (unknown, refused)] == [Fate.TRANSIENT] * 2


@pytest.mark.parametrize("then", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\npart", b"rubbish\r\n\r\n"])
def test_a_request_that_was_sent_and_got_no_usable_answer_is_uncertain(then: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(then)

    with listening(serve) as port:
        error, plain = invoked(f"http://127.0.0.1:{port}") if not then.startswith(b"HTTP") else (None, None)
        if error is None:  # the body breaks off while it is read
            with urllib3.PoolManager(retries=False) as pool, pytest.raises(urllib3.exceptions.HTTPError) as caught:
                pool.request("POST", f"http://127.0.0.1:{port}", body=b"x")
            plain = caught.value
        for one in (error, plain):
            assert one is None or getattr(look_up(one), "fate", None) is Fate.UNCERTAIN


def test_an_answer_that_takes_too_long_is_uncertain() -> None:
    over = threading.Event()
    with listening(lambda connection: (connection.recv(65536), over.wait(30))) as port:
        found = fates(invoked(f"http://127.0.0.1:{port}"))
        over.set()
    assert found == [Fate.UNCERTAIN] * 2


def test_tls_that_fails_before_the_request_is_transient_and_after_it_uncertain(tmp_path: Path) -> None:
    pem = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)

    def break_after_request(connection: socket.socket) -> None:
        raw = connection.dup()
        with raw, context.wrap_socket(connection, server_side=True) as secure:
            received = b""
            while not received.endswith(b"x" * 100):  # the whole request
                received += secure.recv(65536)
            raw.sendall(b"\x17\x03\x03\x00\x20" + b"broken record" * 3)  # not what the session's keys encrypt
            raw.recv(1)

    with listening(lambda connection: connection.sendall(b"not TLS\r\n" * 10)) as port:
        assert fates(invoked(f"https://127.0.0.1:{port}")) == [Fate.TRANSIENT] * 2
    with listening(lambda connection: context.wrap_socket(connection, server_side=True)) as port:
        assert fates(invoked(f"https://127.0.0.1:{port}")) == [Fate.TRANSIENT] * 2  # its certificate is unknown
    with listening(break_after_request) as port:
        errors = invoked(f"https://127.0.0.1:{port}", verify=pem)
    assert fates(errors) == [Fate.UNCERTAIN] * 2
    assert [type(error).__name__ for error in errors] == ["SSLError"] * 2
