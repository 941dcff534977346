"""Conversations for a warm start: the published solutions of the train tasks, with checks before the repairs.

The published solution of a task is a list of repairs. It does not show how to find the faults. Therefore a demonstration makes
all checks for its kind of ticket, always in the same order, and makes each repair directly after the check that shows the fault.
Replies come from the real environment.

With only 74 tasks, a policy could learn the combinations of repairs by heart and ignore the replies. Therefore most
demonstrations begin after some repairs of the task, so that the remaining work depends on the checks.

A *careless* demonstration leaves out some checks, and the repairs after them. A policy that imitates it knows how to check and
to repair. It has to learn from the reward that every check counts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from typing import Any

from benchmark import Episode, Task, gold_actions, left_to_do
from wording import COMPACT_PROMPT, compact

LINE = {"id": "L1002"}
_PHONE: tuple[str, dict[str, Any]] = ("check_network_status", {})
_LINE = ("get_details_by_id", LINE)
CHECKS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "service_issue": (_PHONE, ("check_apn_settings", {}), _LINE),
    "mobile_data_issue": (
        _PHONE,
        ("check_network_mode_preference", {}),
        ("check_vpn_status", {}),
        ("check_data_restriction_status", {}),
        _LINE,
    ),
    "mms_issue": (
        _PHONE,
        ("check_network_mode_preference", {}),
        ("check_wifi_calling_status", {}),
        ("check_apn_settings", {}),
        ("check_app_permissions", {"app_name": "messaging"}),
        _LINE,
    ),
}
SHOWN_BY: dict[str, tuple[str, ...]] = {
    "check_network_status": ("toggle_airplane_mode", "toggle_data", "reseat_sim_card", "toggle_roaming"),
    "check_network_mode_preference": ("set_network_mode_preference",),
    "check_vpn_status": ("disconnect_vpn",),
    "check_data_restriction_status": ("toggle_data_saver_mode",),
    "check_wifi_calling_status": ("toggle_wifi_calling",),
    "check_apn_settings": ("reset_apn_settings", "reboot_device"),
    "check_app_permissions": ("grant_app_permission",),
    "get_details_by_id": (
        *("refuel_data", "enable_roaming"),
        *("send_payment_request", "make_payment", "resume_line", "transfer_to_human_agents"),
    ),
}
# Each of these needs the others of its solution: all of them have been made, or none.
TOGETHER = ("send_payment_request", "make_payment", "resume_line", "reset_apn_settings", "reboot_device")
TRANSFER = "transfer_to_human_agents"  # is no repair
PARTLY_REPAIRED = 0.9  # share of the demonstrations
SKIPPED = 0.15  # share of the checks that a careless demonstration leaves out
DONE = "done"
Action = tuple[str, dict[str, Any]]


def kind_of(task: Task) -> str:
    """``[mms_issue]...`` -> ``mms_issue``."""
    return task.id.partition("]")[0].removeprefix("[")


def goal(episode: Episode) -> frozenset[str]:
    """Return the kind of ticket and the remaining actions."""
    left = (f"{name} {json.dumps(arguments)}" for name, arguments in left_to_do(episode))
    return frozenset([kind_of(episode.task), *left])


def begin(task: Task, rng: random.Random, *, held_out: Collection[frozenset[str]] = ()) -> Episode:
    """Begin a task, in most cases partly repaired. The remaining work is never that of a held-out task."""
    repaired: list[int] = []
    if rng.random() < PARTLY_REPAIRED:
        share = rng.random()
        fate: dict[str, bool] = {}
        for k, (name, arguments) in enumerate(gold_actions(task)):
            unit = "together" if name in TOGETHER else f"{name} {json.dumps(arguments)}"
            if name != TRANSFER and fate.setdefault(unit, rng.random() < share):
                repaired.append(k)
    episode = Episode(domain="telecom", task=task, repaired=repaired)
    return Episode(domain="telecom", task=task) if repaired and goal(episode) in held_out else episode


def in_order(kind: str, left: Collection[Action], checks: Collection[Action]) -> list[Action]:
    """Return these checks and the repairs that follow from them, without other repairs.

    A service ticket may need a transfer in place of every repair: all its checks come first.
    """
    if kind == "service_issue":
        missing = [name for check in CHECKS[kind] if check not in checks for name in SHOWN_BY[check[0]]]
        return [*checks, *(action for action in left if action[0] not in missing)]
    order: list[Action] = []
    for check in checks:
        order += [check, *(action for action in left if action[0] in SHOWN_BY[check[0]])]
    return order


def demonstrate(episode: Episode, careless: random.Random | None = None) -> list[dict[str, Any]]:
    """Return a compact conversation in OpenAI's form. ``careless`` chooses the checks to leave out. None leaves out none."""
    kind = kind_of(episode.task)
    checks = [check for check in CHECKS[kind] if careless is None or careless.random() >= SKIPPED]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": COMPACT_PROMPT},
        {"role": "user", "content": episode.task.ticket},
    ]
    for k, (name, arguments) in enumerate(in_order(kind, left_to_do(episode), checks)):
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call_{k}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": compact(episode.call(name, arguments))})
    return [*messages, {"role": "assistant", "content": DONE}]
