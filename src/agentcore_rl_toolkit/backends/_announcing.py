"""A gateway's client that remembers which weights it announced."""

from __future__ import annotations

import asyncio

from ..gateway import GatewayClient


class AnnouncingClient(GatewayClient):
    """A gateway that was started again has its sessions back, but has to be told the weight version and sampler."""

    announced: tuple[int, str | None] | None = None

    async def set_weight_version_async(self, version: int, *, sampler: str | None = None) -> None:
        await super().set_weight_version_async(version, sampler=sampler)
        self.announced = (version, sampler)

    def announce_again(self) -> None:
        """Tell the gateway what it was told last. Not from a running event loop. Raises: GatewayError."""
        if self.announced is not None:
            version, sampler = self.announced
            asyncio.run(super().set_weight_version_async(version, sampler=sampler))
