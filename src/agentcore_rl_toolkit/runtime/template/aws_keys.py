"""Lets AWS clients that an agent's module code makes sign with the key of the session that uses them.

boto3 reads the environment when a client is made. In a template that is before there is a session, so every fork would go on with
the template's placeholders. Where botocore is imported in a template, credentials that come from the environment are read from it
at every use instead; each session has its own there.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from typing import Any

MODULE = "botocore.credentials"


def follow_environment() -> None:
    """To be called before the agent's script runs. Imports nothing."""
    if MODULE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        _patch(module)


def _patch(module: Any) -> None:
    load = module.EnvProvider.load

    class FromTheEnvironment(module.Credentials):  # type: ignore[misc]  # the agent's botocore
        def get_frozen_credentials(self) -> Any:
            for name, variable in (("access_key", "AWS_ACCESS_KEY_ID"), ("secret_key", "AWS_SECRET_ACCESS_KEY")):
                setattr(self, name, os.environ.get(variable, getattr(self, name)))
            return super().get_frozen_credentials()

    def load_following(self: Any) -> Any:
        found = load(self)
        if type(found) is module.Credentials:
            found.__class__ = FromTheEnvironment
        return found

    module.EnvProvider.load = load_following
