"""Checks of an AWS account: the rights of this user as a trainer, and the services that a session of the agent reaches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from ...client.transport import HOW_TO_HAVE_THEM
from ...contract import PROBE_EXPERIMENT, PROBE_FIELD, PROBED, ROLLOUT_FIELD, ROLLOUTS_OFF, new_session_id
from ...deploy import quotas
from ...errors import ContractError, GatewayError, ObjectExistsError, StoreError, StorePermissionError
from ...store import open_store
from ...store.remote import find_region, find_session
from .finding import Check, Finding, fail, note, ok

MOST_SKEW_S = 60.0  # AWS refuses signatures that are five minutes off
DEADLINE_S = 20.0
START_WITHIN_S = 150.0  # a cold start, and the probe's own deadlines
ADVICE = {  # keys are AWS's codes of errors, and classes of botocore's
    "AccessDeniedException": "allow bedrock-agentcore:GetAgentRuntime, InvokeAgentRuntime and StopRuntimeSession on this agent",
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException"), "log in again, or export new ones"),
    "NoCredentialsError": HOW_TO_HAVE_THEM,
    "ResourceNotFoundException": "check the account, the region and the name in the ARN",
    "RuntimeClientError": "the agent did not start, or refused the call: read its log /aws/bedrock-agentcore/runtimes/ID-DEFAULT",
    "ServiceQuotaExceededException": "the account has reached its quota of sessions: stop some, or ask AWS for a higher quota",
}
OTHER_ADVICE = "read AWS's message, and check the network, the credentials, and this machine's clock"
RELAYED = (
    "start it with --model DIR (token mode): relay mode splits one conversation into 4 to 5 sequences if the client writes "
    "compact JSON, as Mastra and Strands for TypeScript do"
)
REACHED = (
    "another server, or another gateway, answers at this address, or the gateway needs --allowed-host with this name"
)
NOT_REACHED = (
    "give the gateway an address that sessions reach, and let them in: its security group, the route, the load balancer "
    "(docs/deploy.md, Reach the gateway)"
)


@dataclass(kw_only=True)
class Account:
    """The parts of an account to check, None for those that were not given.

    ``session_gateway_url``: the gateway as sessions see it, where that is another address. ``ready``: the agent was found ready.
    """

    agent_arn: str | None
    bucket: str | None
    gateway_url: str | None
    gateway_admin_key: str | None
    session_gateway_url: str | None = None
    ready: bool = False

    @property
    def region(self) -> str | None:
        if self.agent_arn is not None and self.agent_arn.count(":") >= 5:
            return self.agent_arn.split(":")[3]
        return find_region()

    @cached_property
    def _session(self) -> Any:
        """Make one session for all checks, because each session reads the descriptions of its services again."""
        return find_session()

    def client(
        self, service: str, read_timeout_s: float = DEADLINE_S, attempts: int = 2, region: str | None = None
    ) -> Any:
        from botocore.config import Config

        config = Config(connect_timeout=5, read_timeout=read_timeout_s, retries={"total_max_attempts": attempts})
        return self._session.client(service, region_name=region or self.region, config=config)

    # -- checks. They may raise errors of botocore.

    def credentials(self) -> Finding:
        if self.region is None:
            return fail("credentials", "no region", "export AWS_REGION")
        return ok("credentials", f"{self.client('sts').get_caller_identity()['Arn']}, {self.region}")

    def store(self) -> Finding:
        """Check put, create-only put, get, list and delete on a new key."""
        if self.bucket is None:
            return note("bucket", "none given", "--bucket NAME, or export AGENTCORE_S3_BUCKET")
        store = open_store(self.bucket, default_region=self.region)
        key = f"{PROBE_EXPERIMENT}/{secrets.token_hex(8)}.json"

        def create_only() -> None:
            with contextlib.suppress(ObjectExistsError):
                store.put(key, b"{}", create_only=True, timeout_s=DEADLINE_S)
                raise StoreError("a record could be written twice: the store ignores If-None-Match")

        steps: list[tuple[str, Callable[[], object]]] = [
            ("s3:PutObject", lambda: store.put(key, b"{}", timeout_s=DEADLINE_S)),
            ("s3:PutObject with If-None-Match", create_only),
            ("s3:GetObject", lambda: store.get(key, timeout_s=DEADLINE_S)),
            ("s3:ListBucket", lambda: store.list(f"{PROBE_EXPERIMENT}/", timeout_s=DEADLINE_S)),
            ("s3:DeleteObject", lambda: store.delete(key, timeout_s=DEADLINE_S)),
        ]
        for right, work in steps:
            try:
                work()
            except StoreError as e:
                advice = (
                    f"check that {self.bucket} exists, and its region (AWS_REGION, here {find_region(self.region)})"
                )
                if isinstance(e, StorePermissionError):
                    advice = f"allow {right} on {self.bucket} for this user, and for the agent's execution role"
                return fail("bucket", f"{right}: {str(e).splitlines()[0]}", advice)
        return ok("bucket", f"{self.bucket}: a record can be put once, read, listed and deleted")

    def runtime(self) -> Finding:
        """Check that the agent exists and is ready."""
        if self.agent_arn is None:
            return note("agent", "none given", "--agent ARN, or export AGENTCORE_AGENT_ARN")
        name = self.agent_arn.rpartition("/")[2]
        if not self.agent_arn.startswith("arn:") or ":runtime/" not in self.agent_arn:
            advice = "give an ARN such as arn:aws:bedrock-agentcore:REGION:ACCOUNT:runtime/NAME"
            return fail("agent", f"{self.agent_arn!r} is not the ARN of an agent", advice)
        now = self.client("bedrock-agentcore-control").get_agent_runtime(agentRuntimeId=name)
        self.ready = now["status"] == "READY"
        if not self.ready:
            reason = now.get("failureReason", "")
            return fail("agent", f"{name} is {now['status']}. {reason}".strip(), "wait, or deploy it again")
        return ok("agent", f"{name}, version {now.get('agentRuntimeVersion', '?')}, READY")

    def quotas(self) -> Finding:
        if self.region is None:
            return note("quotas", "unknown without a region", "export AWS_REGION")
        found = quotas.read(self.client("service-quotas"))
        if (refusal := quotas.nothing_runs(found)) is not None:
            return fail("quotas", refusal.partition(": ")[0], quotas.HOW_TO_RAISE)
        if found.why:
            advice = "allow servicequotas:ListServiceQuotas, or read the quotas in the console"
            return note("quotas", quotas.line(found), advice)
        return ok("quotas", quotas.line(found))

    def training(self) -> list[Finding]:
        """Return the training sessions on SageMaker that run. A user who may not list them has created none."""
        from botocore.exceptions import BotoCoreError, ClientError

        from ...backends.sagemaker.session import LIVE, REGIONS

        found: dict[str, Finding] = {}  # keys are ARNs
        for region in dict.fromkeys([*REGIONS, *filter(None, [self.region])]):
            client = self.client("sagemaker", region=region)
            if not hasattr(client, "list_training_sessions"):  # botocore before 1.43.112
                return []
            for status in LIVE:
                with contextlib.suppress(ClientError, BotoCoreError):
                    for page in client.get_paginator("list_training_sessions").paginate(StatusEquals=status):
                        for each in page["TrainingSessionSummaries"]:
                            arn = each["TrainingSessionArn"]
                            advice = "agentcore-rl train --stop-session NAME, unless its run is alive"
                            found[arn] = note("training", f"{arn.rpartition('/')[2]} runs, which costs", advice)
        return list(found.values())

    def gateway(self) -> list[Finding]:
        """Check that the gateway and its engine answer this machine with this key. Sessions may still not reach it."""
        from ...gateway import GatewayClient

        if self.gateway_url is None:
            return [note("gateway", "none given", "--gateway-url URL, or export AGENTCORE_RL_GATEWAY_URL")]
        with GatewayClient(self.gateway_url, admin_key=self.gateway_admin_key) as client:
            try:
                [made] = client.create_sessions([new_session_id()], max_turns=1)
            except (GatewayError, ContractError) as e:
                advice = "check that it is started, its address, and AGENTCORE_RL_GATEWAY_ADMIN_KEY"
                return [fail("gateway", str(e).splitlines()[0], advice)]
            try:
                stats = client.stats()
                each = stats.get("gateways", {self.gateway_url: stats})
                relays = ", ".join(url for url, its in each.items() if not its["token_mode"])
                found = (
                    note("gateway", f"{relays} in relay mode", RELAYED) if relays else ok("gateway", self.gateway_url)
                )
                return [found, _model(made)]
            finally:
                client.delete([made.session_id])

    def inside(self) -> list[Finding]:
        """Check from a session of the agent: its bucket, and the gateway with its own key."""
        from ...gateway import GatewayClient

        if self.agent_arn is None or self.bucket is None or not self.ready:
            return []
        client = self.client("bedrock-agentcore", START_WITHIN_S, attempts=1)
        session_id = new_session_id()
        block = {
            "exp_id": PROBE_EXPERIMENT,
            "input_id": "probe",
            "s3_bucket": self.bucket,
            "proof_key": secrets.token_hex(32),
        }
        with contextlib.ExitStack() as stack:
            if self.gateway_url is not None:
                key, public = self.gateway_admin_key, self.session_gateway_url
                gateway = stack.enter_context(GatewayClient(self.gateway_url, admin_key=key, public_url=public))
                with contextlib.suppress(GatewayError, ContractError):  # the check of the gateway reports the reason
                    [made] = gateway.create_sessions([session_id], max_turns=1)
                    stack.callback(gateway.delete, [session_id])
                    block |= {"base_url": made.base_url, "api_key": made.api_key}
            return ask(client, self.agent_arn, session_id, block)

    def checks(self) -> list[tuple[str, Check]]:
        checks: dict[str, Check] = {
            "credentials": self.credentials,
            "bucket": self.store,
            "agent": self.runtime,
            "quotas": self.quotas,
            "training": self.training,
            "gateway": self.gateway,
            "session": self.inside,
        }
        return [(name, partial(_explained, name, check)) for name, check in checks.items()]


def _explained(name: str, check: Check) -> Finding | list[Finding]:
    """Run a check. A call that AWS refused, or that did not reach it, is a finding."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return check()
    except ClientError as e:
        code, message = (e.response["Error"].get(part, "") for part in ("Code", "Message"))
        off = code == "RuntimeClientError" and "(403)" in message  # the agent's own text is missing in it
        return fail(name, f"{code}: {message}"[:500], ROLLOUTS_OFF if off else ADVICE.get(code, OTHER_ADVICE))
    except BotoCoreError as e:
        return fail(name, str(e)[:500], ADVICE.get(type(e).__name__, OTHER_ADVICE))


def _model(session: Any) -> Finding:
    """Check that the first served model responds."""
    from ...gateway.http.client import error_message, request

    def ask(path: str, body: dict[str, Any] | None = None) -> Any:
        method, url = "GET" if body is None else "POST", f"{session.base_url}/{path}"
        status, data = asyncio.run(request(method, url, body=body, key=session.api_key, timeout_s=DEADLINE_S))
        if status != 200:
            raise ValueError(f"HTTP {status}: {error_message(data)}")
        return json.loads(data)

    try:
        model = ask("models")["data"][0]["id"]
        messages = [{"role": "user", "content": "Say one word."}]
        ask("chat/completions", {"model": model, "max_tokens": 1, "messages": messages})
    except (GatewayError, ValueError, LookupError) as e:
        return fail("model", str(e), "read the log of the engine")
    return ok("model", f"{model!r} answered one token")


def ask(client: Any, arn: str, session_id: str, rollout: Mapping[str, Any]) -> list[Finding]:
    """Start a session, ask it, stop it. ``client``: a boto3 client of ``bedrock-agentcore`` without retries."""
    from botocore.exceptions import BotoCoreError, ClientError

    place = arn.split(":")  # no job of this name exists
    job_arn = ":".join([*place[:2], "sagemaker", *place[3:5], f"job/AgentRFT/{PROBE_EXPERIMENT}"])
    body = json.dumps({PROBE_FIELD: {"job_arn": job_arn}, ROLLOUT_FIELD: dict(rollout)}).encode()
    asked_s = time.time()
    try:
        reply = client.invoke_agent_runtime(
            agentRuntimeArn=arn, runtimeSessionId=session_id, contentType="application/json", payload=body
        )
        result = json.loads(reply["response"].read())
    except (OSError, ValueError) as e:
        return [fail("session", str(e)[:500], "check the network, and read the log of the agent")]
    finally:
        with contextlib.suppress(ClientError, BotoCoreError):
            client.stop_runtime_session(agentRuntimeArn=arn, runtimeSessionId=session_id)
    if isinstance(result, dict) and result.get("status") == PROBED:
        return findings(result["probe"], rollout, asked_s, time.time())
    advice = "it runs the published toolkit, or an older version of this one: deploy it again for this check"
    return [note("session", f"a session starts, but its agent answered {result!s}"[:500], advice)]


def findings(report: Mapping[str, Any], rollout: Mapping[str, Any], asked_s: float, answered_s: float) -> list[Finding]:
    """Return the findings of a session's report. Its clock must lie between question and answer."""
    found = [ok("session", f"starts, {report['architecture']}, Python {report['python']}, toolkit {report['toolkit']}")]
    skew_s = min(report["time_s"] - asked_s, 0.0) or max(report["time_s"] - answered_s, 0.0)
    text = f"{skew_s:+.0f} s from this machine's"
    skewed = fail("session clock", text, "set this machine's clock with NTP (chrony)")
    found.append(skewed if abs(skew_s) > MOST_SKEW_S else ok("session clock", text))
    store, bucket, role = (
        report["store"],
        rollout["s3_bucket"],
        "the agent's execution role (`agentcore-rl deploy iam`)",
    )
    if store["ok"]:
        found.append(ok("session bucket", f"{bucket}: a record can be put and deleted"))
    else:
        advice = f"allow {store['right']} on {bucket} for {role}" if store.get("right") else ""
        advice = (
            advice or f"check {bucket}, its region, and in a VPC that sessions have a way to S3 (an endpoint or a NAT)"
        )
        found.append(fail("session bucket", f"a session cannot write to {bucket}: {store['text']}", advice))
    jobs = report.get("jobs", {"ok": None})
    if jobs["ok"]:
        found.append(ok("session jobs", "its role may report to SageMaker's multi-turn RL jobs"))
    elif jobs["ok"] is not None:
        found.append(fail("session jobs", jobs["text"], f"allow what its statement Jobs has, for {role}"))
    gateway = report["gateway"]
    text = f"{rollout.get('base_url')}: {gateway['text']}"
    if gateway["ok"]:
        found.append(ok("session gateway", text))
    elif gateway["ok"] is not None and gateway["reached"]:
        found.append(fail("session gateway", text, REACHED))
    elif gateway["ok"] is not None:
        found.append(fail("session gateway", f"a session cannot reach {text}", NOT_REACHED))
    return found
