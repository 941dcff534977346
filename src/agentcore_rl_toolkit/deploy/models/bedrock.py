"""Imports a model into Amazon Bedrock, step by step. Each step checks the present state, so an interrupted run continues.

An imported model never changes. Each promoted model is a new one, whose name ends with the digest of its files. Earlier ones stay
for roll-backs.

Sources: User guide of Amazon Bedrock, "Import a pre-trained model" and "Invoke your imported model", October 2026; API reference.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ...errors import ConfigError
from .. import iam
from ..calls import Calls, wait_for
from ..resources import Resources
from .facts import ModelFacts, refusals_of_import
from .settings import ModelSettings

IMPORT_S, WARM_S = 7200.0, 1800.0  # 65 GB were not ready after botocore's own retries of 68 s
PAUSE_S = 10.0


class ImportedModel:
    """The imported model of ``settings``. ``arn`` is known after `up`.

    Raises (all its methods): ConfigError, RefusedError.
    """

    def __init__(self, settings: ModelSettings, calls: Calls) -> None:
        self.settings, self._call = settings, calls
        self._resources = Resources(settings.tag, calls)
        self._bedrock = partial(calls, "bedrock")
        self._tag = {"key": self._resources.tag["Key"], "value": self._resources.tag["Value"]}
        self.arn = f"arn:{calls.partition}:bedrock:{calls.region}:{calls.account}:imported-model/the-new-one"

    @property
    def address(self) -> dict[str, str]:
        """The model's name, as `app.model()` takes it."""
        return {"model_id": self.arn}

    def addresses(self) -> list[str]:
        """Return all addresses that agents may have of the model, also those of earlier imports."""
        return [str(model["modelArn"]) for model in self._models()]

    @property
    def rights(self) -> iam.Policy:
        """The statements that an agent's role needs to call the model, and earlier ones until it no longer uses them."""
        return iam.imported_model_user(*sorted({self.arn, *self.addresses()}))

    # -- up

    def check(self, facts: ModelFacts, *, force: bool = False) -> str:
        """Return what is known of the price, for people. Raises: ConfigError if Bedrock does not import the model."""
        refusals = refusals_of_import(facts, str(self._call.region), force=force)
        if refusals:
            raise ConfigError("; ".join(refusals))
        return "price per hour unknown: Bedrock charges custom model units while the model is awake, and its storage"

    def up(self, facts: ModelFacts) -> None:
        """Import this model unless it is there, and wait until the import ends."""
        s = self.settings
        name = f"{s.name}-{facts.digest}"
        found = next((each["modelArn"] for each in self._models() if each["modelName"] == name), None)
        if found is not None:
            self._call.say(f"imported model {name}: is up to date")
            self.arn = found
            return
        uri = self._resources.upload(facts.files, s.bucket, f"{s.prefix}{facts.digest}/")
        job = next(self._running(name), None) or self._start(name, uri, s.role or self._role())
        if self._call.rehearse:
            return
        ended = self._ended(job)
        if ended["status"] != "Completed":
            raise ConfigError(
                f"Bedrock did not import {name}: {ended.get('failureMessage') or 'it gave no reason'}. Correct the cause and "
                "repeat the command"
            )
        self.arn = ended["importedModelArn"]
        units = self._bedrock("GetImportedModel", modelIdentifier=self.arn).get("customModelUnits", {})
        count = units.get("customModelUnitsPerModelCopy", "an unknown number of")
        self._call.say(f"imported model {name}: a copy has {count} custom model units")

    def _role(self) -> str:
        s, calls = self.settings, self._call
        trust, rights = iam.imports(calls.partition, calls.account, s.bucket, s.prefix, str(calls.region))
        return self._resources.role(s.role_name, f"Import of the model {s.name}", trust, rights)

    def _start(self, name: str, uri: str, role: str) -> str:
        """Start a job, and return its ARN. The names of failed jobs stay taken."""
        job = f"{name}-{time.time_ns()}"
        wanted: dict[str, Any] = {
            "jobName": job,
            "importedModelName": name,
            "roleArn": role,
            "modelDataSource": {"s3DataSource": {"s3Uri": uri}},
            "jobTags": [self._tag],
            "importedModelTags": [self._tag],
            "clientRequestToken": job,
        }
        self._call.step(f"import job {job}", "started")
        own = self.settings.role is None
        started = self._resources.until_role_is_known(
            lambda: self._bedrock("CreateModelImportJob", **wanted), own_role=own
        )
        return str((started or {}).get("jobArn"))

    def _running(self, name: str) -> Iterator[str]:
        """Yield the ARNs of running jobs that import this model, or any model of the settings' name."""
        which = {"nameContains": name, "statusEquals": "InProgress"}
        for job in self._call.every("bedrock", "ListModelImportJobs", "modelImportJobSummaries", **which):
            made = str(job.get("importedModelName", ""))
            if name in (made, made.rpartition("-")[0]):
                yield job["jobArn"]

    def _models(self) -> list[Mapping[str, Any]]:
        """Return all models that this command imported under the name of the settings."""
        listed = self._call.every("bedrock", "ListImportedModels", "modelSummaries", nameContains=self.settings.name)
        named = [model for model in listed if model["modelName"].rpartition("-")[0] == self.settings.name]
        return [model for model in named if self._tag in self._tags_of(model["modelArn"])]

    def _tags_of(self, arn: str) -> list[Mapping[str, str]]:
        found: list[Mapping[str, str]] = (self._bedrock("ListTagsForResource", resourceARN=arn) or {}).get("tags", [])
        return found

    def _ended(self, job: str) -> Mapping[str, Any]:
        """Wait until a job has ended. Returns its description."""
        find = partial(self._bedrock, "GetModelImportJob", jobIdentifier=job)
        what = f"import job {job.rsplit('/', 1)[1]}"
        return self._call.settled(find, what, ("InProgress",), (IMPORT_S, PAUSE_S)) or {}

    # -- proof

    def chat(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a request in the form of OpenAI's chat completions. Waits while Bedrock loads the model. Returns the reply."""
        which: dict[str, Any] = {"modelId": self.arn, "absent": ("ModelNotReadyException",)}
        which |= {"contentType": "application/json", "body": json.dumps(body).encode()}
        invoke = partial(self._call, "bedrock-runtime", "InvokeModel", **which)
        if (reply := invoke()) is None:
            self._call.say("the model is being loaded: waiting")
            reply = wait_for(invoke, WARM_S, PAUSE_S, "the model is not loaded")
        return dict(json.loads(reply["body"].read()))

    # -- down

    def find(self) -> None:
        """Check that there is something to remove. Raises: ConfigError if there is nothing."""
        s = self.settings
        made = self._models() or any(self._running(s.name))
        if not made and not self._resources.has_any(s.role_name, s.bucket, s.prefix):
            raise ConfigError(
                f"no imported model {s.name} in {s.region}, and nothing else that promote made for it there"
            )

    def remove(self) -> None:
        """Remove the imported models of this name, the role and the uploaded weights, as far as this command made them."""
        s = self.settings
        for job in self._running(s.name):  # Bedrock cannot stop it
            self._ended(job)
        for model in self._models():
            self._call.step(f"imported model {model['modelName']}", "removed")
            self._bedrock(
                "DeleteImportedModel", modelIdentifier=model["modelArn"], absent=("ResourceNotFoundException",)
            )
        self._resources.remove_role(s.role_name)
        self._resources.remove_objects(s.bucket, s.prefix)
