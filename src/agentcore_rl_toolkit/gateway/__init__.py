"""Model gateway: relays an agent's model calls and records the exact tokens of every one of them.

Names load on first use: a trainer that only needs `GatewayClient` does not load the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .client import GatewayClient as GatewayClient
    from .client import SessionCapture as SessionCapture
    from .client import SessionHandle as SessionHandle
    from .config import GatewayConfig as GatewayConfig
    from .config import Limits as Limits
    from .config import UpstreamConfig as UpstreamConfig
    from .server import Gateway as Gateway
    from .service import serve as serve
else:
    __all__, __getattr__, __dir__ = lazy(__name__)
