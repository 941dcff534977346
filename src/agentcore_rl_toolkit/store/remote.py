"""S3 over obstore: one try per call, errors mapped, credentials and sockets on first use.

obstore's runtime does not survive a fork. In a child of a process that used obstore, S3 goes through boto3.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import re
import sys
import time
from collections.abc import Awaitable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from ..aws_errors import Fate, Fault, fault_of, look_up
from ..errors import AgentCoreRLError, ConfigError, ObjectNotFoundError, StoreError, StorePermissionError
from .base import ObjectInfo, ObjectStore, TransientStoreError, check_size
from .boto import EXPIRED_AT_HEAD, BotoStore, error_of

T = TypeVar("T")

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
# botocore renews temporary credentials 10 to 15 minutes before they expire, so every 5 minutes is often enough to ask it.
TTL = timedelta(minutes=5)
_used_in: set[int] = set()  # process ids. A forked child has that of its parent
_FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}


def find_session() -> Any:
    """Return boto3's default session, or a fresh one, for every AWS call of this toolkit. Raises: ConfigError."""
    import boto3
    from botocore.exceptions import BotoCoreError

    try:
        return boto3.DEFAULT_SESSION or boto3.Session()
    except BotoCoreError as e:
        raise ConfigError(f"the AWS configuration cannot be read: {e}") from e


def renewed_session() -> Any:
    """Return a session that reads its credentials again, unless the program itself gave them. Raises: ConfigError."""
    import boto3
    from botocore.exceptions import BotoCoreError

    session = find_session()
    with contextlib.suppress(BotoCoreError):
        named = session._session.instance_variables().get("profile")  # `profile_name` may be a guess
        fresh = boto3.Session(profile_name=named)
        if getattr(fresh.get_credentials(), "method", "") == getattr(session.get_credentials(), "method", ""):
            return fresh
    return session


def find_region(default: str | None = None) -> str | None:
    """Return AWS_REGION (which botocore ignores), AWS_DEFAULT_REGION, the session's, or the default. Raises: ConfigError."""
    named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return named or (find_session().region_name if _has_configuration() else None) or default


def find_endpoint(region: str) -> str | None:
    """Find the endpoint of S3 as boto3 does. None means AWS's own endpoint. Raises: ConfigError."""
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if (named or not _has_configuration("endpoint_url")) and not os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"):
        return named  # without loading boto3
    keys = {"aws_access_key_id": "-", "aws_secret_access_key": "-"}  # or it would look for credentials
    return str(find_session().client("s3", region_name=region, **keys).meta.endpoint_url)


def find_provider(*, renewed: bool) -> Any:
    """Make a credential provider that asks boto3, or None if the environment has static keys, which obstore reads by itself.

    The environment comes first, as with boto3, and without loading boto3: a session of the local runtime saves 70 ms of CPU.
    Raises: StorePermissionError when there are no credentials; TransientStoreError when their source does not answer.
    """
    keys = os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY")
    if keys and not _default_session():
        return None
    from botocore.exceptions import BotoCoreError
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider(renewed_session() if renewed else find_session(), ttl=TTL)
    except (ValueError, BotoCoreError) as e:
        raise _no_credentials(e) from e


def _no_credentials(e: Exception) -> StoreError:
    fault = look_up(e)
    if fault is not None and fault.fate is not Fate.FINAL:  # their source did not answer
        return TransientStoreError(f"credentials for the store: {e}", ambiguous=False)
    return StorePermissionError(
        "no credentials for the store: export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
        f"or use an instance role ({e})"
    )


def _default_session() -> Any:
    return getattr(sys.modules.get("boto3"), "DEFAULT_SESSION", None)


def _has_configuration(word: str = "") -> bool:
    """Return True if boto3 knows more than the environment: a session of the program, or a file with this word."""
    files = [Path(os.environ.get(name) or usual).expanduser() for name, usual in _FILES.items()]
    return _default_session() is not None or any(f.is_file() and word in f.read_text(errors="replace") for f in files)


class RemoteStore(ObjectStore):
    """``s3://bucket/prefix``. Keys are relative to the prefix.

    Endpoint and credentials are looked up on first use as botocore does, and so is the region unless it is given.
    """

    def __init__(self, url: str, *, bucket: str, prefix: str, region: str | None, default_region: str | None) -> None:
        super().__init__(url)
        self._bucket, self._prefix = bucket, prefix
        self._given_region, self._default_region = region, default_region
        self._opened: tuple[int, Any] | None = None  # process and client that are open
        self._refused = False  # S3 refused the credentials at least once

    @property
    def _region(self) -> str:
        return self._given_region or find_region(self._default_region) or "us-east-1"  # what local S3 servers expect

    def _here(self) -> ObjectStore:
        if _used_in <= {os.getpid()}:
            return self
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), self._with_boto3(find_session()))
        elif self._opened[1].refused:
            self._opened = (os.getpid(), self._with_boto3(renewed_session()))
        store: BotoStore = self._opened[1]
        return store

    def _with_boto3(self, session: Any) -> BotoStore:
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        config = Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"})
        where = {"region_name": self._region, "endpoint_url": find_endpoint(self._region)}
        try:
            client = session.client("s3", config=config, **where)
        except BotoCoreError as e:
            fault = look_up(e)
            if fault is None or not fault.credentials:
                raise
            raise _no_credentials(e) from e
        return BotoStore(self.url, client, self._bucket, self._prefix)

    def _store(self) -> Any:
        # No lock: opening it twice is harmless, and a lock held during a fork is not.
        from obstore.exceptions import BaseError

        if self._opened is None or self._opened[0] != os.getpid():
            try:
                self._opened = (os.getpid(), self._open())
            except BaseError as e:
                raise ConfigError(f"{self.url} cannot be opened: {_headline(e)}") from e
        return self._opened[1]

    def _open(self) -> Any:
        import obstore.store

        _used_in.add(os.getpid())
        _settle_at_exit()
        options: dict[str, Any] = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(minutes=10)}
        region = self._region
        endpoint = find_endpoint(region)
        if endpoint is not None and endpoint.lower().startswith("http://"):
            # Without TLS there is no certificate to check, and reading the system's costs 7 ms of CPU per session.
            options |= {"allow_http": True, "allow_invalid_certificates": True}
        more: dict[str, Any] = {"client_options": options}
        if endpoint is not None:
            more["aws_endpoint_url_s3"] = endpoint.rstrip("/")  # under this name it also wins over the environment's
        return obstore.store.S3Store(
            self._bucket,
            region=region,
            virtual_hosted_style_request=False,
            credential_provider=find_provider(renewed=self._refused),
            disable_bulk_delete=True,  # every S3-compatible server understands plain DELETE
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},  # the retry loop is in ObjectStore
            **more,
        )

    async def _put(self, key: str, body: bytes, create_only: bool, durable: bool) -> None:
        import obstore

        # One request even for 100 MB: a multipart upload cannot be create-only.
        put = obstore.put_async(
            self._store(),
            self._prefix + key,
            body,
            attributes={"Content-Type": "application/json"},
            mode="create" if create_only else "overwrite",
            use_multipart=False,
        )
        await self._mapped(key, put)

    async def _get(self, key: str, max_bytes: int | None) -> bytes:
        import obstore

        async def read() -> bytes:
            async with asyncio.timeout(self.attempt_s):  # a silent server must not get a large body's time
                result = await obstore.get_async(self._store(), self._prefix + key)
            check_size(key, self.url, result.meta["size"], max_bytes)
            return bytes(await result.bytes_async())

        return await self._mapped(key, read())

    async def _head(self, key: str) -> ObjectInfo:
        import obstore

        return self._info(await self._mapped(key, obstore.head_async(self._store(), self._prefix + key)))

    async def _list(self, prefix: str) -> list[ObjectInfo]:
        import obstore

        folder = (self._prefix + prefix).rpartition("/")[0]  # obstore matches path parts only
        stream, found = obstore.list(self._store(), prefix=folder or None, chunk_size=1000), list[ObjectInfo]()

        async def read() -> None:
            page: Any = True
            while page:  # each has its own deadline: there may be any number
                async with asyncio.timeout(self.attempt_s):
                    page = await anext(stream, None)
                found.extend(self._info(meta) for meta in page or ())

        await self._mapped(prefix, read())
        return sorted((info for info in found if info.key.startswith(prefix)), key=lambda info: info.key)

    async def _delete(self, key: str) -> None:
        import obstore

        with contextlib.suppress(ObjectNotFoundError):  # some stores answer 404 instead of S3's 204
            await self._mapped(key, obstore.delete_async(self._store(), self._prefix + key))

    def _info(self, meta: Any) -> ObjectInfo:
        key, changed = meta["path"][len(self._prefix) :], meta["last_modified"]
        return ObjectInfo(key=key, size=meta["size"], last_modified=changed, etag=meta["e_tag"])

    async def _mapped(self, key: str, call: Awaitable[T]) -> T:
        from obstore import exceptions

        try:
            return await call
        except (AgentCoreRLError, TimeoutError):  # a time limit of this process is no fault of S3
            raise
        except (exceptions.BaseError, OSError, ValueError) as e:
            raise self._error(key, e) from e

    def _error(self, key: str, e: Exception) -> AgentCoreRLError:
        from obstore import exceptions

        text = _headline(e)
        unusable = isinstance(e, (ValueError, exceptions.InvalidPathError, exceptions.NotSupportedError))
        if unusable or "invalid list response" in text:  # the XML of a listing cannot hold every key
            return ConfigError(f"{key!r} in {self.url}: {text}", key=key)
        status_match, code_match = _STATUS.search(text), _CODE.search(text)
        status = int(status_match[1]) if status_match else None
        code = code_match[1] if code_match else ""
        if isinstance(e, exceptions.UnauthenticatedError) and status is None:  # the request was not sent
            return TransientStoreError(f"credentials for the store: {text}", ambiguous=False, key=key)
        if "incorrectly configured region" in text:
            code = code or "PermanentRedirect"
        elif isinstance(e, FileNotFoundError):
            status = 404
        elif isinstance(e, (exceptions.AlreadyExistsError, exceptions.PreconditionError)) and status != 409:
            status = 412
        elif isinstance(e, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
            status = status or 403
        fault = fault_of(code, status) if code or status else Fault(fate=Fate.UNCERTAIN, code=type(e).__name__)
        if fault.credentials or fault.code == EXPIRED_AT_HEAD:
            self._opened, self._refused = None, True  # the next try asks for fresh credentials
        return error_of(self.url, key, fault, text)


@functools.cache
def _settle_at_exit() -> None:
    # A thread of obstore hands a result over, and needs the interpreter a moment longer than the caller that it wakes. A program
    # that ends right then would abort. Source: PyO3/pyo3-async-runtimes, issue 40.
    atexit.register(time.sleep, 0.05)


def _headline(e: BaseException) -> str:
    """Return an obstore error without its dump of Rust structures."""
    return str(e).partition("\n\nDebug source:")[0]
