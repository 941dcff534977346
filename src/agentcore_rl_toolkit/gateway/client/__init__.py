"""The trainer's client: one gateway, or several that are used as one."""

from .captures import SessionCapture as SessionCapture
from .client import ADMIN_KEY_ENV as ADMIN_KEY_ENV
from .client import GatewayClient as GatewayClient
from .client import SessionHandle as SessionHandle
from .client import gateway_urls as gateway_urls
