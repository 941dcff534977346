"""What options of several commands say about themselves."""

from __future__ import annotations

ALLOWED_HOST = "Another name of this server (of a load balancer, a service); with * for any part. Repeatable."
