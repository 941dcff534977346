"""A service that runs a model: names of resources, the role, and the uploaded weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from ...errors import ConfigError
from .. import iam
from ..calls import Calls
from ..resources import Resources
from .facts import ModelFacts

Part = tuple[str, str, Callable[[], object]]  # a resource, for people, its ARN, and the call that removes it


class Host:
    """A model in production. The names of its resources begin with ``agentcore-rl-NAME``.

    Args:
        name: name of the model: lower-case letters, digits and single hyphens, at most 36.
        bucket: where the weights go, below `agentcore-rl-models/`.

    Raises (all its methods): ConfigError, RefusedError.
    """

    service: ClassVar[str]

    def __init__(self, name: str, bucket: str, calls: Calls) -> None:
        self.name, self._bucket, self._call = f"agentcore-rl-{name}", bucket, calls
        self._where = f"{calls.partition}:{self.service}:{calls.region}:{calls.account}"
        self._role_name = f"agentcore-rl-model-{name}"
        self._prefix = f"agentcore-rl-models/{self.service}/{calls.region}/{name}/"
        # Roles belong to no region, so the tag names it.
        self._resources = Resources(f"model-{self.service}-{calls.region}-{name}", calls)
        self._tag = "{Key}={Value}".format_map(self._resources.tag)
        self._api = partial(calls, self.service)

    def _is_version(self, name: str) -> bool:
        """Return True for the name of a version of this model, which ends with a digest."""
        return re.fullmatch(rf"{self.name}-[0-9a-f]{{12}}", name) is not None

    def _is_ours(self, arn: str) -> bool:
        """Return True for a resource with this model's tag. Others of the same name are left alone."""
        return self._tags(arn).get(self._resources.tag["Key"]) == self._resources.tag["Value"]

    def _check_ours(self, what: str, arn: str) -> None:
        """Check that a resource has the tag of this model. Raises: ConfigError."""
        if not self._is_ours(arn):
            raise ConfigError(
                f"{what} exists without the tag {self._tag}, so this command did not create it, or an earlier version of the "
                f"command did. Choose another --name. If {what} is yours, add the tag to {arn} and repeat the command"
            )

    def _tags(self, arn: str) -> Mapping[str, str]:
        raise NotImplementedError

    def _upload(self, facts: ModelFacts) -> str:
        return self._resources.upload(facts.files, self._bucket, f"{self._prefix}{facts.digest}/")

    def _with_role(self, trust: iam.Policy, rights: iam.Policy, operation: str, name: str, **parameters: Any) -> Any:
        """Call an operation with the ARN of the role as this parameter, when the service knows the role. Returns its reply."""
        parameters[name] = self._resources.role(self._role_name, f"The model {self.name}", trust, rights)
        return self._resources.until_role_is_known(lambda: self._api(operation, **parameters))

    def remove(self) -> None:
        """Remove what `promote` created for this model, with the role and the uploaded weights."""
        found = False
        for what, arn, delete in self._parts():
            if not self._is_ours(arn):
                self._call.say(f"{what}: stays, because it does not have the tag {self._tag}")
                continue
            found = True
            self._call.step(what, "removed")
            delete()
        if not found:
            which = f"{self.name} with the tag {self._tag}"
            self._call.say(f"there is no model {which} on {self.service} in {self._call.region}")
        self._resources.remove_role(self._role_name)
        self._resources.remove_objects(self._bucket, self._prefix)

    def _parts(self) -> Iterator[Part]:
        """Yield what the service has of this model, in the order of its removal."""
        raise NotImplementedError
