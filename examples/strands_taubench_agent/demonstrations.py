"""Conversations for a warm start: the published solutions of the train tasks, each repair behind the check that shows it.

The published solution of a task is a list of repairs; it does not say how one finds out what is broken. So a demonstration makes
the checks that belong to its kind of ticket, always in the same order, and takes each published action right behind the check
that shows why. Replies come from the real environment.

With only 74 tasks, a policy learns by heart which repairs go together, and ignores what it read. So most demonstrations begin in
a state where some of the repairs of the task have been made already: what is left to do then depends on what the checks show.

A *careless* demonstration skips some of the checks, and what they would have shown. A policy that
has imitated them knows how to check and how to repair, but not that every check counts: that is left to the reward.
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
PARTLY_REPAIRED = 0.9  # of the demonstrations
SKIPPED = 0.15  # of the checks of a careless demonstration
DONE = "done"
Action = tuple[str, dict[str, Any]]


def kind_of(task: Task) -> str:
    """``[mms_issue]...`` -> ``mms_issue``."""
    return task.id.partition("]")[0].removeprefix("[")


def goal(episode: Episode) -> frozenset[str]:
    """The kind of ticket and the actions that are left to take."""
    left = (f"{name} {json.dumps(arguments)}" for name, arguments in left_to_do(episode))
    return frozenset([kind_of(episode.task), *left])


def begin(task: Task, rng: random.Random, *, held_out: Collection[frozenset[str]] = ()) -> Episode:
    """The task, most often partly repaired, but never so that what is left is the goal of a held-out task."""
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
    """These checks, and the actions that they show; the others are not taken.

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
    """A whole conversation in OpenAI's form, compactly rendered. ``careless`` says which checks it skips; None: not one."""
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
