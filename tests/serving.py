"""Servers of a test: programs, applications in a thread, scripts of answers, and an AWS of moto's."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

WITHIN_S = 60.0  # of a machine with five times as many busy processes as cores
START_S = 180.0  # of a program that imports torch, there
OURS = (sys.executable, "-W", "ignore", "-m", "agentcore_rl_toolkit.cli")


def wait_for(
    condition: Callable[[], Any], *, within_s: float = WITHIN_S, process: subprocess.Popen[Any] | None = None
) -> Any:
    """The first true value of the condition. Fails when there is none in time, or a process ends before."""
    deadline_s = time.monotonic() + within_s
    while not (value := condition()):
        assert process is None or process.poll() is None, f"{process.args!r} ended with {process.returncode}"
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def serving(
    folder: Path,
    *words: str,
    program: Sequence[str] = OURS,
    cwd: Path | None = None,
    **environment: str,
) -> Iterator[dict[str, Any]]:
    """What a server writes into its ready file, while it runs. Its output is in ``folder``; ours end with 0."""
    ours = program[-1] == OURS[-1]
    name = words[0] if ours else Path(program[-1]).stem
    ready, log = folder / f"{name}.json", folder / f"{name}.log"
    ready.unlink(missing_ok=True)
    line = [*program, *words, "--ready-file", str(ready), "--parent-pid", str(os.getpid())]
    with log.open("wb") as output:
        process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        wait_for(lambda: ready.exists() or process.poll() is not None, within_s=START_S)
        assert process.poll() is None, log.read_text()[-4000:]
        yield json.loads(ready.read_text())
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert process.returncode == 0 or not ours, log.read_text()[-4000:]


@contextlib.contextmanager
def hosted(app: Any) -> Iterator[str]:
    """Where an ASGI application is served, by a thread of this process."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(30)


@contextlib.contextmanager
def gateway_before(url: str, **settings: Any) -> Iterator[Any]:
    """A gateway before this engine of vLLM's kind, in a thread of this process."""
    from agentcore_rl_toolkit._portal import Portal
    from agentcore_rl_toolkit.gateway import Gateway, GatewayConfig, UpstreamConfig

    portal = Portal("gateway-of-the-test")
    gateway = Gateway(GatewayConfig(upstreams=(UpstreamConfig(url=url, engine="vllm"),), **settings))
    portal.call(gateway.start())
    try:
        yield gateway
    finally:
        portal.call(gateway.stop(grace_s=0.2))
        portal.close()


def busy_credentials(folder: Path, patch: Any, *, busy: int) -> None:
    """Make the only source of AWS credentials a program that fails as often as this before it answers."""
    for name in range(busy):
        (folder / f"busy-{name}").touch()
    found = {"Version": 1, "AccessKeyId": "AKLATE", "SecretAccessKey": "s", "SessionToken": "t"}
    found["Expiration"] = "2100-01-01T00:00:00Z"
    program = folder / "credentials"
    program.write_text(f"""#!/bin/sh
for busy in "{folder}"/busy-*; do [ -e "$busy" ] && rm "$busy" && exit 1; done
echo '{json.dumps(found)}'
""")
    program.chmod(0o700)
    (folder / "config").write_text(f"[default]\ncredential_process = {program}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        patch.delenv(name, raising=False)
    patch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    patch.setattr("boto3.DEFAULT_SESSION", None)


class Asked(NamedTuple):
    """A request. The names of its headers are in small letters."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


def certificate(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate for 127.0.0.1 that signs itself, and a server's context with it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    chain, secret = folder / "cert.pem", folder / "key.pem"
    chain.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, secret)
    return chain, context


@contextlib.contextmanager
def answering(answer: Callable[[Asked], tuple[Any, ...] | None], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """An HTTP server that answers with a status, a body (bytes, or what is sent as JSON) and headers; or hangs up, on None."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            said = answer(Asked(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            if said is None:
                self.close_connection = True
                return
            status, content, *more = said
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"content-length": str(len(data)), **(more[0] if more else {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                with contextlib.suppress(ConnectionError):  # who asked may have given up
                    self.wfile.write(data)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

        def log_message(self, *args: object) -> None:
            """Nothing: the requests are in the script."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        if tls is not None:  # the handshake is left to the thread of the connection
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(5)


@contextlib.contextmanager
def served_view(folder: Path, *words: str) -> Iterator[str]:
    """Address of `agentcore-rl view`, started in a folder as a person does."""
    program = (sys.executable, "-W", "ignore", "-m", "agentcore_rl_toolkit")
    with serving(folder, "view", *words, "--no-open", program=program, cwd=folder) as ready:
        yield ready["url"]


@contextlib.contextmanager
def moto_server(host: str = "127.0.0.1") -> Iterator[str]:
    """Where an AWS of moto's is. What it holds is the process's: another file's server may have the same."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(host, 0, verbose=False)
    server.start()
    yield f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    server.stop()
