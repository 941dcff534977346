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
from .finding import Finding, fail, note, ok

MOST_SKEW_S = 60.0  # AWS refuses signatures that are five minutes off
MOST_REPLY_BYTES = 2**20  # a probe's report has a few hundred
DEADLINE_S = 20.0
START_WITHIN_S = 150.0  # a cold start, and the probe's own deadlines
ADVICE = {  # keys are AWS's codes of errors, and classes of botocore's
    "AccessDeniedException": "allow bedrock-agentcore:GetAgentRuntime, InvokeAgentRuntime and StopRuntimeSession on this agent",
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException"), "log in again, or export new ones"),
    "NoCredentialsError": HOW_TO_HAVE_THEM,
    "ResourceNotFoundException": "check the account, the region and the name in the ARN",
    "RuntimeClientError": "the agent did not start, or refused the call: read its log /aws/bedrock-agentcore/runtimes/ID-DEFAULT",
    "ServiceQuotaExceededException": "the account has reached its quota of sessions: stop some, or ask AWS for a higher quota",
    "ThrottlingException": "too many requests at the moment: run this again",
}
RELAYED = (
    "start it with --model DIR (token mode): relay mode splits one conversation into 4 to 5 sequences if the client writes "
    "compact JSON, as Mastra and Strands for TypeScript do"
)
ANSWERED: dict[int | None, str] = {  # the advice for each status that a session got at the gateway's address
    **dict.fromkeys((401, 403), "the session's key is refused: check that this is the address of this gateway"),
    404: "another server or another gateway answers at this address: check the address",
    421: "start the gateway with --allowed-host and the name in the address",
    None: "another server answers at this address, or the load balancer has no healthy target: check both",
}


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
                region = find_region(self.region)
                advice = f"check that {self.bucket} exists, and in which region it is (AWS_REGION, here {region})"
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
        refusal = quotas.nothing_runs(found)
        if refusal is not None:
            return fail("quotas", refusal.partition(": ")[0], quotas.HOW_TO_RAISE)
        if found.why:
            advice = "allow servicequotas:ListServiceQuotas, or read the quotas in the console"
            return note("quotas", quotas.line(found), advice)
        return ok("quotas", quotas.line(found))

    def training(self) -> list[Finding]:
        """Return the running sessions and jobs on SageMaker, or None if this user may not list them and so created none."""
        from botocore.exceptions import BotoCoreError, ClientError

        from ...backends.sagemaker.session import LIVE, REGIONS

        sessions = [("list_training_sessions", {"StatusEquals": status}) for status in LIVE]
        categories = ("AgentRFT", "AgentRFTEvaluation")
        jobs = [("list_jobs", {"JobCategory": each, "StatusEquals": "InProgress"}) for each in categories]
        advice = {
            "list_training_sessions": "agentcore-rl train --stop-session NAME, unless its run is alive",
            "list_jobs": "the command that created it follows it and stops it at Ctrl-C. Otherwise: `aws sagemaker stop-job`",
        }
        found: dict[str, Finding] = {}  # keys are ARNs
        for region in dict.fromkeys([*REGIONS, *filter(None, [self.region])]):
            client = self.client("sagemaker", region=region)
            if not hasattr(client, "list_training_sessions"):  # botocore before 1.43.112
                return []
            for verb, filters in [*sessions, *(jobs if region == self.region else ())]:
                with contextlib.suppress(ClientError, BotoCoreError):
                    for page in client.get_paginator(verb).paginate(**filters):
                        for each in page.get("TrainingSessionSummaries") or page.get("JobSummaries", []):
                            arn = each.get("TrainingSessionArn") or each["JobArn"]
                            text = f"{arn.rpartition('/')[2]} runs, which costs"
                            found[arn] = note("training", text, advice[verb])
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
                right = getattr(e, "status", None) in (401, 403)
                advice = (
                    "export AGENTCORE_RL_GATEWAY_ADMIN_KEY"
                    if right
                    else "check that the gateway is started, and that the address is right"
                )
                return [fail("gateway", str(e).splitlines()[0], advice)]
            try:
                stats = client.stats()
                each = stats.get("gateways", {self.gateway_url: stats})
                relays = ", ".join(url for url, its in each.items() if not its["token_mode"])
                found = ok("gateway", self.gateway_url)
                if relays:
                    found = note("gateway", f"{relays} in relay mode", RELAYED)
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

    def checks(self) -> list[tuple[str, Callable[[], Finding | list[Finding]]]]:
        checks: dict[str, Callable[[], Finding | list[Finding]]] = {
            "credentials": self.credentials,
            "bucket": self.store,
            "agent": self.runtime,
            "quotas": self.quotas,
            "training": self.training,
            "gateway": self.gateway,
            "session": self.inside,
        }
        return [(name, partial(_explained, name, check)) for name, check in checks.items()]


def _explained(name: str, check: Callable[[], Finding | list[Finding]]) -> Finding | list[Finding]:
    """Run a check. A call that AWS refused, or that did not reach it, is a finding."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return check()
    except ClientError as e:
        code, message = (e.response["Error"].get(part, "") for part in ("Code", "Message"))
        advice = ADVICE.get(code, "read AWS's message, and check the credentials and this machine's clock")
        if code == "RuntimeClientError" and "(403)" in message:  # the agent's own text is missing in it
            advice = ROLLOUTS_OFF
        return fail(name, f"{code}: {message}"[:500], advice)
    except BotoCoreError as e:
        return fail(
            name, str(e)[:500], ADVICE.get(type(e).__name__, "check the network, and the endpoint if one is set")
        )


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
        result = json.loads(reply["response"].read(MOST_REPLY_BYTES))
    except (OSError, ValueError, RecursionError) as e:
        return [fail("session", str(e)[:500], "check the network, and read the log of the agent")]
    finally:
        with contextlib.suppress(ClientError, BotoCoreError):
            client.stop_runtime_session(agentRuntimeArn=arn, runtimeSessionId=session_id)
    answered_s = time.time()
    if isinstance(result, dict) and result.get("status") == PROBED:
        return findings(result["probe"], rollout, asked_s, answered_s)
    if isinstance(result, dict) and result.get("error"):
        return [fail("session", f"the agent refused: {result['error']}"[:500], "deploy it again, and read its log")]
    advice = "it runs the published toolkit, or an older version of this one: deploy it again for this check"
    return [note("session", "a session starts, but its agent does not know this check", advice)]


def findings(report: Mapping[str, Any], rollout: Mapping[str, Any], asked_s: float, answered_s: float) -> list[Finding]:
    """Return the findings of a session's report. Its clock must lie between question and answer."""
    found = [
        ok("session", f"starts, {report['architecture']}, Python {report['python']}, toolkit {report['toolkit']}"),
        _clock(float(report["time_s"]), asked_s, answered_s),
        _store(report["store"], str(rollout["s3_bucket"])),
    ]
    jobs = report.get("jobs", {"ok": None})
    if jobs["ok"]:
        found.append(ok("session jobs", "its role may report to SageMaker's multi-turn RL jobs"))
    elif jobs["ok"] is not None:
        advice = "allow what the statement Jobs of `agentcore-rl deploy iam` has, for the agent's execution role"
        found.append(fail("session jobs", jobs["text"], advice))
    gateway = report["gateway"]
    text = f"{rollout.get('base_url')}: {gateway['text']}" if gateway["ok"] is not None else ""
    if gateway["ok"]:
        found.append(ok("session gateway", text))
    elif gateway["ok"] is not None and gateway["reached"]:
        found.append(fail("session gateway", text, ANSWERED.get(gateway.get("status"), ANSWERED[None])))
    elif gateway["ok"] is not None:
        advice = (
            "give the gateway an address that sessions reach, and let them in: its security group, the route, the load "
            "balancer (docs/deploy.md, Reach the gateway)"
        )
        found.append(fail("session gateway", f"a session cannot reach {text}", advice))
    return found


def _clock(theirs_s: float, asked_s: float, answered_s: float) -> Finding:
    skew_s = min(theirs_s - asked_s, 0.0) or max(theirs_s - answered_s, 0.0)
    if abs(skew_s) > MOST_SKEW_S:
        return fail(
            "session clock", f"{skew_s:+.0f} s from this machine's", "set this machine's clock with NTP (chrony)"
        )
    return ok("session clock", f"{skew_s:+.0f} s from this machine's")


def _store(store: Mapping[str, Any], bucket: str) -> Finding:
    if store["ok"]:
        return ok("session bucket", f"{bucket}: a record can be put and deleted")
    right = store.get("right")
    advice = (
        f"allow {right} on {bucket} for the agent's execution role (`agentcore-rl deploy iam` prints the policy)"
        if right
        else f"check that {bucket} exists, and its region; in a VPC: that sessions have a way to S3, by an endpoint or a NAT"
    )
    return fail("session bucket", f"a session cannot write to {bucket}: {store['text']}", advice)
