"""Checks from inside a session of the deployed agent: one session is started, asked what it reaches, and stopped."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from ...contract import PROBE_EXPERIMENT, PROBE_FIELD, PROBED, ROLLOUT_FIELD
from .finding import Finding, fail, note, ok

MOST_SKEW_S = 60.0
MOST_REPLY_BYTES = 2**20  # a report has a few hundred
START_WITHIN_S = 150.0  # a cold start, and the probe's own deadlines
INPUT = "probe"
ADVICE = {
    "AccessDeniedException": "allow bedrock-agentcore:InvokeAgentRuntime and StopRuntimeSession on this agent",
    "ResourceNotFoundException": "check account, region and name of the ARN",
    "RuntimeClientError": "the agent did not start or refused: its log group is /aws/bedrock-agentcore/runtimes/ID-DEFAULT",
    "ServiceQuotaExceededException": "sessions alive are at the account's quota: stop some, or ask for more",
    "ThrottlingException": "too many requests just now: run this again",
}


def block(bucket: str, *, base_url: str | None, api_key: str | None) -> dict[str, Any]:
    """The `_rollout` block of a probe."""
    given = {"base_url": base_url, "api_key": api_key}
    return {
        "exp_id": PROBE_EXPERIMENT,
        "input_id": INPUT,
        "s3_bucket": bucket,
        "proof_key": secrets.token_hex(32),
        **{name: value for name, value in given.items() if value is not None},
    }


def ask(client: Any, arn: str, session_id: str, rollout: Mapping[str, Any]) -> list[Finding]:
    """Start a session, ask it, stop it. ``client``: a boto3 client of ``bedrock-agentcore`` without retries."""
    from botocore.exceptions import BotoCoreError, ClientError

    body = json.dumps({PROBE_FIELD: {}, ROLLOUT_FIELD: dict(rollout)}).encode()
    asked_s = time.time()
    try:
        reply = client.invoke_agent_runtime(
            agentRuntimeArn=arn, runtimeSessionId=session_id, contentType="application/json", payload=body
        )
        result = json.loads(reply["response"].read(MOST_REPLY_BYTES))
    except ClientError as e:
        code, message = e.response["Error"].get("Code", ""), e.response["Error"].get("Message", "")
        return [fail("session", f"{code}: {message}"[:500], ADVICE.get(code, "see AWS's message"))]
    except (BotoCoreError, OSError, ValueError, RecursionError) as e:
        return [fail("session", f"no answer: {e}"[:500], "check the network, and the agent's log")]
    finally:
        with contextlib.suppress(ClientError, BotoCoreError):
            client.stop_runtime_session(agentRuntimeArn=arn, runtimeSessionId=session_id)
    answered_s = time.time()
    if not isinstance(result, dict) or result.get("status") != PROBED:
        error = result.get("error") if isinstance(result, dict) else None
        if error:
            return [fail("session", f"the agent refused: {error}"[:500], "deploy it again, and see its log")]
        advice = "it runs the published toolkit, or an older version of this one: deploy it again to have this checked"
        return [note("session", "a session starts, and its agent knows no probe", advice)]
    return findings(result["probe"], rollout, asked_s, answered_s)


def findings(report: Mapping[str, Any], rollout: Mapping[str, Any], asked_s: float, answered_s: float) -> list[Finding]:
    """What a session's report says. Its clock must lie between question and answer."""
    found = [
        ok("session", f"starts, {report['architecture']}, Python {report['python']}, toolkit {report['toolkit']}"),
        _clock(float(report["time_s"]), asked_s, answered_s),
        *_store(report["egress"], report["store"], str(rollout["s3_bucket"])),
    ]
    gateway = report["gateway"]
    if gateway["ok"] is None:
        return found
    url = rollout["base_url"]
    if gateway["ok"]:
        found.append(ok("session gateway", f"{url}: {gateway['text']}"))
    elif not gateway["reached"]:
        advice = (
            "give the gateway an address that sessions reach, and let them in: its security group, the route, the load "
            "balancer (docs/deploy.md, Reach the gateway)"
        )
        found.append(fail("session gateway", f"a session cannot reach {url}: {gateway['text']}", advice))
    else:
        advice = {
            401: "the session's key is refused: does the address lead to this gateway?",
            403: "the session's key is refused: does the address lead to this gateway?",
            404: "another server answers at this address, or another gateway",
            421: "start the gateway with --allowed-host and the name in the address",
        }.get(
            gateway.get("status"), "another server answers at this address, or the load balancer has no healthy target"
        )
        found.append(fail("session gateway", f"{url}: {gateway['text']}", advice))
    return found


def _clock(theirs_s: float, asked_s: float, answered_s: float) -> Finding:
    skew_s = min(theirs_s - asked_s, 0.0) or max(theirs_s - answered_s, 0.0)
    if abs(skew_s) > MOST_SKEW_S:
        return fail(
            "session clock", f"{skew_s:+.0f} s from this machine's", "set this machine's clock with NTP (chrony)"
        )
    return ok("session clock", f"{skew_s:+.0f} s from this machine's")


def _store(egress: Mapping[str, Any], store: Mapping[str, Any], bucket: str) -> list[Finding]:
    if store["ok"]:
        return [ok("session bucket", f"{bucket}: a record can be put and deleted")]
    if egress["ok"] is False:
        advice = "in a VPC: an endpoint for S3 in the subnets' route tables, or a NAT gateway, and a security group that lets out"
        return [fail("session network", f"a session has no way to S3: {egress['text']}", advice)]
    right = store.get("right")
    advice = (
        f"allow {right} on {bucket} for the agent's execution role (`agentcore-rl deploy iam` prints the policy)"
        if right
        else f"check that {bucket} exists, and its region"
    )
    return [fail("session bucket", f"a session cannot write to {bucket}: {store['text']}", advice)]
