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
from .facts import ModelFacts, refusals_of_import
from .host import Host, Part

IMPORT_S, WARM_S = 7200.0, 1800.0  # 65 GB were not ready after botocore's own retries of 68 s
PAUSE_S = 10.0


class ImportedModel(Host):
    """An imported model. ``arn`` is known after `up`."""

    service = "bedrock"

    def __init__(self, name: str, bucket: str, calls: Calls) -> None:
        super().__init__(name, bucket, calls)
        self.arn = f"arn:{self._where}:imported-model/the-new-one"

    @property
    def address(self) -> dict[str, str]:
        """The model's name, as `app.model()` takes it."""
        return {"model_id": self.arn}

    def addresses(self) -> list[str]:
        """Return all addresses that agents may have of the model, also those of earlier imports."""
        return [arn for model in self._versions() if self._is_ours(arn := str(model["modelArn"]))]

    @property
    def rights(self) -> iam.Policy:
        """The statements that an agent's role needs to call the model, and earlier ones until it no longer uses them."""
        return iam.imported_model_user(*sorted({self.arn, *self.addresses()}))

    def check(self, facts: ModelFacts) -> str:
        """Return what is known of the price, for people. Raises: ConfigError if Bedrock does not import the model."""
        if refusals := refusals_of_import(facts, str(self._call.region)):
            raise ConfigError("; ".join(refusals))
        return "price per hour unknown: Bedrock charges custom model units while the model is awake, and its storage"

    def up(self, facts: ModelFacts) -> None:
        """Import this model unless it is there, and wait until the import ends."""
        name, calls = f"{self.name}-{facts.digest}", self._call
        found = [model["modelArn"] for model in self._versions() if model["modelName"] == name]
        if found:
            self._check_ours(f"the imported model {name}", found[0])
            calls.say(f"imported model {name}: is up to date")
            self.arn = found[0]
            return
        source = {"s3DataSource": {"s3Uri": self._upload(facts)}}
        job = next((job["jobArn"] for job in self._running() if job["importedModelName"] == name), None)
        if job is None:
            # Its name is a new one, because those of failed jobs stay taken.
            new: dict[str, Any] = {"jobName": f"{self.name}-{time.time_ns() // 10**6}", "importedModelName": name}
            new["importedModelTags"] = [{key.lower(): value for key, value in self._resources.tag.items()}]
            calls.step(f"import job {new['jobName']}", "started")
            policies = iam.imports(calls.partition, calls.account, self._bucket, self._prefix, str(calls.region))
            started = self._with_role(*policies, "CreateModelImportJob", "roleArn", modelDataSource=source, **new)
            job = (started or {}).get("jobArn")
        if calls.rehearse:
            return
        ended = self._ended(str(job))
        if ended["status"] != "Completed":
            reason = ended.get("failureMessage") or "it gave no reason"
            raise ConfigError(f"Bedrock did not import {name}: {reason}. Correct the cause and repeat the command")
        self.arn = ended["importedModelArn"]

    def chat(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a request in the form of OpenAI's chat completions. Waits while Bedrock loads the model. Returns the reply."""
        which: dict[str, Any] = {"modelId": self.arn, "absent": ("ModelNotReadyException",)}
        which |= {"contentType": "application/json", "body": json.dumps(body).encode()}
        invoke = partial(self._call, "bedrock-runtime", "InvokeModel", **which)
        if (reply := invoke()) is None:
            self._call.say("the model is being loaded: waiting")
            reply = wait_for(invoke, WARM_S, PAUSE_S, "the model is not loaded")
        return dict(json.loads(reply["body"].read()))

    def _parts(self) -> Iterator[Part]:
        for job in self._running():  # Bedrock cannot stop it
            self._ended(job["jobArn"])
        for model in self._versions():
            gone = {"modelIdentifier": model["modelArn"], "absent": ("ResourceNotFoundException",)}
            delete = partial(self._api, "DeleteImportedModel", **gone)
            yield f"imported model {model['modelName']}", model["modelArn"], delete

    def _versions(self) -> list[Mapping[str, Any]]:
        listed = self._call.every("bedrock", "ListImportedModels", "modelSummaries", nameContains=self.name)
        return [model for model in listed if self._is_version(model["modelName"])]

    def _tags(self, arn: str) -> Mapping[str, str]:
        found = self._api("ListTagsForResource", resourceARN=arn)
        return {tag["key"]: tag["value"] for tag in found["tags"]}

    def _running(self) -> list[Mapping[str, Any]]:
        which = {"nameContains": self.name, "statusEquals": "InProgress"}
        listed = self._call.every("bedrock", "ListModelImportJobs", "modelImportJobSummaries", **which)
        return [job for job in listed if self._is_version(str(job.get("importedModelName", "")))]

    def _ended(self, job: str) -> Mapping[str, Any]:
        find = partial(self._api, "GetModelImportJob", jobIdentifier=job)
        what = f"import job {job.rsplit('/', 1)[1]}"
        return self._call.settled(find, what, ("InProgress",), (IMPORT_S, PAUSE_S)) or {}
