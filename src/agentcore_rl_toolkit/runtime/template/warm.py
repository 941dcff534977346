"""Work that the template does once for all sessions: late imports, and reading certificate bundles.

Some libraries import most of their modules at first use, that is after the fork, in every session. A short table names such
modules of common libraries; the template imports those of the libraries that the agent has loaded.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import ssl
import sys
from collections.abc import Callable
from typing import Any

# Loaded library -> modules it imports on first use.
LATE_IMPORTS = {
    "anyio": ("anyio._backends._asyncio",),
    "anthropic": ("anthropic.resources.messages",),
    "httpx": ("httpcore", "h11"),
    "openai": ("openai.resources", "openai.resources.chat.completions", "openai.lib.streaming.chat"),
    "uvicorn": ("uvicorn.loops.auto", "uvloop"),
    "agentcore_rl_toolkit.app": ("agentcore_rl_toolkit.store.local",),
}
_CERTIFICATE_USES = ("wrap_socket", "wrap_bio", "get_ca_certs", "cert_store_stats")


def import_late_parts() -> None:
    """Import the modules of the table whose library is loaded."""
    for library, names in LATE_IMPORTS.items():
        for name in names if library in sys.modules else ():
            with contextlib.suppress(Exception):  # another version of the library, or one without this part
                importlib.import_module(name)


def defer_certificates() -> None:
    """Let TLS contexts read their certificate bundle at first use.

    HTTP clients make a TLS context whether they need one or not, and reading the usual bundle takes 20 ms of CPU, twice or more
    per session, also for agents that only talk to plain http:// endpoints. A missing file still fails at once.
    """
    load: Callable[..., None] = ssl.SSLContext.load_verify_locations

    def load_verify_locations(self: ssl.SSLContext, cafile: Any = None, capath: Any = None, cadata: Any = None) -> None:
        if cafile is None or cadata is not None or not os.path.isfile(cafile):
            load(self, cafile, capath, cadata)
        else:
            self.__dict__.setdefault("_deferred_certificates", []).append((cafile, capath))

    def wrapped(name: str) -> Callable[..., Any]:
        use = getattr(ssl.SSLContext, name)

        def use_with_certificates(self: ssl.SSLContext, *args: Any, **kwargs: Any) -> Any:
            for cafile, capath in self.__dict__.pop("_deferred_certificates", ()):
                load(self, cafile, capath)
            return use(self, *args, **kwargs)

        use_with_certificates.__name__ = name
        return use_with_certificates

    ssl.SSLContext.load_verify_locations = load_verify_locations  # type: ignore[method-assign]
    for name in _CERTIFICATE_USES:
        setattr(ssl.SSLContext, name, wrapped(name))
