"""Checks of an AWS account: may this user do what a trainer does, and is everything where the settings say?"""

from __future__ import annotations

import datetime
import email.utils
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from ...contract import PROBE_EXPERIMENT, new_session_id
from ...deploy import quotas
from ...errors import (
    AgentCoreRLError,
    ContractError,
    GatewayError,
    ObjectExistsError,
    StoreError,
    StorePermissionError,
)
from . import session
from .finding import Finding, fail, note, ok

PROBE = PROBE_EXPERIMENT
MOST_SKEW_S = 60.0  # AWS refuses signatures that are five minutes off
DEADLINE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Account:
    """What is to be checked; None: nothing is known of it.

    ``session_gateway_url``: the gateway as sessions see it, where that is another address.
    """

    agent_arn: str | None
    bucket: str | None
    gateway_url: str | None
    gateway_admin_key: str | None
    session_gateway_url: str | None = None

    @cached_property
    def session(self) -> Any:
        import boto3

        return boto3.Session()

    @property
    def region(self) -> str | None:
        if self.agent_arn is not None and self.agent_arn.count(":") >= 5:
            return self.agent_arn.split(":")[3]
        return self.session.region_name or os.environ.get("AWS_REGION")  # boto3 reads AWS_DEFAULT_REGION only

    def client(self, service: str) -> Any:
        from botocore.config import Config

        config = Config(connect_timeout=5, read_timeout=DEADLINE_S, retries={"total_max_attempts": 2})
        return self.session.client(service, region_name=self.region, config=config)

    # -- checks

    def credentials(self) -> Finding:
        from botocore.exceptions import BotoCoreError, ClientError

        if self.session.get_credentials() is None:
            advice = "export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the machine a role"
            return fail("credentials", "no credentials", advice)
        if self.region is None:
            return fail("credentials", "no region", "export AWS_REGION")
        try:
            who = self.client("sts").get_caller_identity()
        except ClientError as e:
            code = e.response["Error"]["Code"]
            advice = "log in again, or export new ones" if "Expired" in code else "check which credentials are in use"
            return fail("credentials", f"{code}: {e.response['Error'].get('Message', '')}", advice)
        except BotoCoreError as e:
            return fail("credentials", str(e), "check the network, and the endpoint if one is set")
        return ok("credentials", f"{who['Arn']}, {self.region}")

    def clock(self) -> Finding:
        """Compare this machine's clock with the date of a reply of AWS."""
        import botocore.exceptions

        try:
            reply = self.client("sts").get_caller_identity()["ResponseMetadata"]["HTTPHeaders"]
        except botocore.exceptions.ClientError as e:
            reply = e.response["ResponseMetadata"]["HTTPHeaders"]
        except botocore.exceptions.BotoCoreError as e:
            return note("clock", f"AWS was not asked: {e}", "see the credentials")
        if "date" not in reply:
            return note("clock", "the reply has no date", "compare the clock with another one")
        theirs = email.utils.parsedate_to_datetime(reply["date"])
        skew_s = (datetime.datetime.now(datetime.UTC) - theirs).total_seconds()
        if abs(skew_s) > MOST_SKEW_S:
            return fail(
                "clock", f"{skew_s:+.0f} s off: AWS refuses signatures from 300 s on", "set it with NTP (chrony)"
            )
        return ok("clock", f"{skew_s:+.0f} s from AWS's")

    def store(self) -> list[Finding]:
        """Put, create-only put, get, list and delete, on a key of our own."""
        from ...store import open_store

        if self.bucket is None:
            return [note("bucket", "none given", "--bucket NAME, or export AGENTCORE_S3_BUCKET")]
        elsewhere = self._bucket_region()
        if elsewhere is not None:
            return [elsewhere]
        store = open_store(self.bucket)
        key = f"{PROBE}/{secrets.token_hex(8)}.json"
        found: list[Finding] = []

        def step(name: str, right: str, work: Callable[[], object]) -> bool:
            try:
                work()
            except StorePermissionError as e:
                advice = f"allow {right} on {self.bucket} for this user, and for the agent's execution role"
                found.append(fail(f"bucket {name}", str(e).splitlines()[0], advice))
                return False
            except StoreError as e:
                advice = f"check that {self.bucket} exists, and in which region it is (AWS_REGION, here {self.region})"
                found.append(fail(f"bucket {name}", str(e).splitlines()[0], advice))
                return False
            found.append(ok(f"bucket {name}", f"{self.bucket}/{key}"))
            return True

        def create_only() -> None:
            try:
                store.put(key, b"{}", create_only=True, timeout_s=DEADLINE_S)
            except ObjectExistsError:
                return
            raise StoreError("a record could be written twice: the store does not know If-None-Match")

        if step("put", "s3:PutObject", lambda: store.put(key, b"{}", timeout_s=DEADLINE_S)):
            step("create-only", "s3:PutObject with If-None-Match", create_only)
            step("get", "s3:GetObject", lambda: store.get(key, timeout_s=DEADLINE_S))
            step("list", "s3:ListBucket", lambda: store.list(f"{PROBE}/", timeout_s=DEADLINE_S))
            step("delete", "s3:DeleteObject", lambda: store.delete(key, timeout_s=DEADLINE_S))
        return found

    def _bucket_region(self) -> Finding | None:
        """A finding where the bucket is in another region than the agent, None where it is not, or cannot be told."""
        from botocore.exceptions import BotoCoreError, ClientError

        from ...store import parse_url

        url = parse_url(str(self.bucket))
        if url.scheme != "s3":
            return None
        try:
            found = self.client("s3").head_bucket(Bucket=url.bucket)["ResponseMetadata"]
        except ClientError as e:
            found = e.response.get("ResponseMetadata", {})
        except BotoCoreError:
            return None  # the steps that follow say what is wrong
        theirs = found.get("HTTPHeaders", {}).get("x-amz-bucket-region")
        if theirs in (None, self.region):
            return None
        advice = f"give the run a bucket in {self.region}, where the agent is; or deploy the agent to {theirs}"
        return fail("bucket region", f"{url.bucket} is in {theirs}, not in {self.region}", advice)

    @cached_property
    def _described(self) -> Any:
        """What the control plane says of the agent, or the exception of asking."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            name = str(self.agent_arn).rpartition("/")[2]
            return self.client("bedrock-agentcore-control").get_agent_runtime(agentRuntimeId=name)
        except (ClientError, BotoCoreError) as e:
            return e

    def runtime(self) -> Finding:
        """Whether the agent is there and ready."""
        from botocore.exceptions import ClientError

        if self.agent_arn is None:
            return note("agent", "none given", "--agent ARN, or export AGENTCORE_AGENT_ARN")
        name = self.agent_arn.rpartition("/")[2]
        if not self.agent_arn.startswith("arn:") or ":runtime/" not in self.agent_arn:
            advice = "it reads arn:aws:bedrock-agentcore:REGION:ACCOUNT:runtime/NAME"
            return fail("agent", f"{self.agent_arn!r} is not the ARN of an agent", advice)
        now = self._described
        if isinstance(now, ClientError):
            code, message = now.response["Error"]["Code"], now.response["Error"].get("Message", "")
            advice = {
                "AccessDeniedException": "allow bedrock-agentcore:GetAgentRuntime, InvokeAgentRuntime and StopRuntimeSession",
                "ResourceNotFoundException": f"check account, region ({self.region}) and name of the ARN",
            }.get(code, "see AWS's message")
            return fail("agent", f"{code}: {message}", advice)
        if isinstance(now, Exception):
            return fail("agent", str(now), "check the network and AWS_ENDPOINT_URL_BEDROCK_AGENTCORE_CONTROL")
        if now["status"] != "READY":
            reason = now.get("failureReason", "")
            return fail("agent", f"{name} is {now['status']}. {reason}".strip(), "wait, or deploy it again")
        return ok("agent", f"{name}, version {now.get('agentRuntimeVersion', '?')}, READY")

    def quotas(self) -> Finding:
        """The account's."""
        archive = isinstance(self._described, dict) and "codeConfiguration" in self._described.get(
            "agentRuntimeArtifact", {}
        )
        found = quotas.read(self.client("service-quotas"), self.region, archive=archive)
        text = quotas.line(found)
        refusal = quotas.nothing_runs(found.quotas)
        if refusal is not None:
            return fail("quotas", refusal.partition(": ")[0], quotas.HOW_TO_RAISE)
        if found.why:
            advice = "allow servicequotas:ListServiceQuotas, or look at them in the console"
            return note("quotas", text, advice)
        return ok("quotas", text)

    def inside(self) -> list[Finding]:
        """What a session of the agent reaches: its bucket, the gateway with a key of its own, the model."""
        from ...gateway import GatewayClient

        ready = isinstance(self._described, dict) and self._described["status"] == "READY"
        if self.agent_arn is None or self.bucket is None or not ready:
            return []
        from botocore.config import Config

        config = Config(connect_timeout=10, read_timeout=session.START_WITHIN_S, retries={"total_max_attempts": 1})
        client = self.session.client("bedrock-agentcore", region_name=self.region, config=config)
        session_id = new_session_id()

        def ask(base_url: str | None = None, api_key: str | None = None) -> list[Finding]:
            block = session.block(str(self.bucket), base_url=base_url, api_key=api_key)
            return session.ask(client, str(self.agent_arn), session_id, block)

        if self.gateway_url is None:
            return ask()
        with GatewayClient(
            self.gateway_url, admin_key=self.gateway_admin_key, public_url=self.session_gateway_url
        ) as gateway:
            try:
                [made] = gateway.create_sessions([session_id], max_turns=1)
            except (GatewayError, ContractError):
                return ask()  # the check of the gateway says why
            try:
                return ask(made.base_url, made.api_key)
            finally:
                gateway.delete([session_id])

    def gateway(self) -> list[Finding]:
        """Reachable from here, with this key, and its engine answers. From inside a session it may still be out of reach."""
        from ...gateway.client import gateway_urls

        if self.gateway_url is None:
            return [note("gateway", "none given", "--gateway-url URL, or export AGENTCORE_RL_GATEWAY_URL")]
        return [finding for url in gateway_urls(self.gateway_url) for finding in self._gateway_at(url)]

    def _gateway_at(self, url: str) -> list[Finding]:
        from ...gateway import GatewayClient

        where = urlsplit(url)
        found: list[Finding] = []
        with GatewayClient(url, admin_key=self.gateway_admin_key) as client:
            try:
                health = client.health()
                found.append(ok("gateway", f"{url}: {health['status']}, {health['sessions']} sessions"))
                client.workers()
            except GatewayError as e:
                right = e.status in (401, 403)
                advice = "export AGENTCORE_RL_GATEWAY_ADMIN_KEY" if right else "is it started, and the address right?"
                return [*found, fail("gateway", str(e).splitlines()[0], advice)]
            if self.session_gateway_url is None and where.hostname in ("127.0.0.1", "localhost", "::1"):
                advice = "sessions on AWS cannot reach it: give it an address that they can (docs/deploy.md)"
                found.append(note("gateway address", "only this machine can reach it", advice))
            try:
                [session] = client.create_sessions([new_session_id()], max_turns=1)
            except (GatewayError, ContractError) as e:
                return [*found, fail("model", str(e).splitlines()[0], "see the gateway's log")]
            try:
                found.append(self._model(session))
            finally:
                client.delete([session.session_id])
        return found

    def _model(self, session: Any) -> Finding:
        """Whether the first model that is served answers."""
        import json
        import urllib.error
        import urllib.request

        def ask(path: str, body: dict[str, Any] | None = None) -> Any:
            data = None if body is None else json.dumps(body).encode()
            headers = {"authorization": f"Bearer {session.api_key}", "content-type": "application/json"}
            request = urllib.request.Request(f"{session.base_url}/{path}", data=data, headers=headers)
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
                return json.load(reply)

        messages = [{"role": "user", "content": "Say one word."}]
        try:
            model = ask("models")["data"][0]["id"]
            reply = ask("chat/completions", {"model": model, "max_tokens": 1, "messages": messages})
        except urllib.error.HTTPError as e:
            text = e.read(500).decode(errors="replace")
            return fail("model", f"HTTP {e.code}: {text}", "look at the inference server's log")
        except (OSError, ValueError, LookupError) as e:
            return fail("model", f"{type(e).__name__}: {e}", "look at the inference server's log")
        return ok("model", f"{model!r} answered, {reply.get('usage', {}).get('completion_tokens', '?')} token")


def checks(account: Account) -> list[tuple[str, Callable[[], Finding | list[Finding]]]]:
    return [
        ("credentials", account.credentials),
        ("clock", account.clock),
        ("bucket", account.store),
        ("agent", account.runtime),
        ("quotas", account.quotas),
        ("gateway", account.gateway),
        ("session", account.inside),
    ]


def template(model: str) -> Finding:
    """Will turns of this model extend each other, will its tool calls be read? Blocks. See `gateway doctor`."""
    try:
        from ...messages.render import Renderer, examine

        report = examine(Renderer.from_path(model))
    except AgentCoreRLError as e:
        return fail("template", str(e).splitlines()[0], "see docs/rendering.md")
    if not report.ok:
        return fail("template", str(report).splitlines()[0], f"agentcore-rl gateway doctor {model}")
    return ok("template", f"turns extend each other, calls are read ({model})")
