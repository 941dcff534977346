"""Prepares a process for an agent that knows nothing of rollouts, before the agent's file is imported."""

from __future__ import annotations

import os
from typing import Any

from ...contract import AS_IS
from .clients import install

PLACEHOLDER = "placeholder"


def prepare() -> None:
    """Redirect HTTP libraries, and add rollouts to the apps that uvicorn serves. Does nothing without ``AGENTCORE_RL_AS_IS``."""
    if not os.environ.get(AS_IS):
        return
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):  # clients refuse to work without; redirected calls need none
        os.environ.setdefault(name, PLACEHOLDER)
    install()
    import uvicorn

    make, load, end = uvicorn.Config.__init__, uvicorn.Config.load, uvicorn.Server.shutdown

    def make_with_one_process(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.reload, self.workers = False, 1  # other processes start again, without this preparation

    def load_with_rollouts(self: Any) -> None:
        load(self)
        app = self.loaded_app
        while type(app).__module__.startswith("uvicorn."):
            app = app.app
        if getattr(app, "add_rollouts", True):
            from .served import DeployedApp

            self.loaded_app = DeployedApp(self.loaded_app)

    async def end_after_rollouts(self: Any, *args: Any, **options: Any) -> None:
        if hasattr(self.config.loaded_app, "end_rollouts"):
            await self.config.loaded_app.end_rollouts()
        await end(self, *args, **options)

    uvicorn.Config.__init__, uvicorn.Config.load = make_with_one_process, load_with_rollouts  # type: ignore[method-assign]
    uvicorn.Server.shutdown = end_after_rollouts  # type: ignore[method-assign]
