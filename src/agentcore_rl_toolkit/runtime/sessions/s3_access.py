"""Who calls the runtime's own S3 endpoint, and which objects are its own.

A session is known by the key that it got, or by the kernel where it signs with another one or not at all: clients that were made
before there was a session have placeholders. Whoever else is no user of this machine needs one of the runtime's credentials.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..._servers.callers import Callers
from ...s3.access import Scope
from ...s3.wire.errors import S3Error
from .grants import is_record
from .s3_keys import SessionKeys
from .session import Session


class SessionAccess:
    """Judges the callers of the endpoint. ``signed_only``: users of this machine need a credential, as at the runtime itself."""

    def __init__(
        self, callers: Callers[Session], keys: SessionKeys, *, stores: Iterable[str], signed_only: bool
    ) -> None:
        self._callers = callers
        self._keys = keys
        self._prefixes = tuple(f"{store.strip('/')}/" for store in stores if store.strip("/"))
        self._signed_only = signed_only

    def secrets_of(self, access_key: str) -> Mapping[str, str]:
        found = self._keys.find(access_key)
        return {} if found is None else {access_key: found[0]}

    async def scope(self, asgi_scope: Mapping[str, Any], access_key: str) -> Scope | None:
        found = self._keys.find(access_key)
        if found is not None:
            return self._scope_of(found[1])
        caller = await self._callers.of_scope(asgi_scope)
        if caller.session is not None:
            return self._scope_of(caller.session)
        if self._signed_only:
            raise S3Error("InvalidAccessKeyId", AWSAccessKeyId=access_key)
        if not caller.is_user:
            raise S3Error(
                "AccessDenied", f"Access Denied: this store is not open to {caller.reason} without a credential"
            )
        return None

    def _scope_of(self, session: Session) -> Scope:
        return Scope(
            granted=lambda bucket, key: _is_granted(session, bucket, key), once=is_record, prefixes=self._prefixes
        )


def _is_granted(session: Session, bucket: str, key: str) -> bool:
    for grant in session.grants:
        scheme, _, place = grant.store.partition("://")
        name, _, prefix = place.partition("/")
        if scheme == "s3" and name == bucket:
            inner = key.removeprefix(f"{prefix}/") if prefix else key
            if (not prefix or inner != key) and inner in grant.keys:
                return True
    return False
