"""The mail of a shop, and two scripted models, which sort the mail and propose prompts.

`sort` follows a rule of the shop only if its system prompt contains the rule, and sorts one mail of twenty wrongly. `reflect`
gets the same request as a reflection model. It adds the first rule that it finds in the feedback, and sometimes proposes a
useless text.
"""

import hashlib
import random
import re

# The text of a mail, its queue without the rule, its queue with the rule, and the rule.
KINDS = [
    ("My order {n} has not arrived.", "orders", "orders", "Mail about a delivery goes to orders."),
    ("I want {n} EUR back for a broken lamp.", "orders", "billing", "Mail that wants money back goes to billing."),
    ("My lawyer will write to you about order {n}.", "orders", "legal", "Mail that names a lawyer goes to legal."),
    ("As a gold member I ask where order {n} is.", "orders", "vip", "Mail of a gold member goes to vip."),
]


def rows(number, seed):
    draw = random.Random(seed)
    made = []
    for at in range(number):
        text, _, queue, why = draw.choice(KINDS)
        made.append({"id": f"{seed}-{at}", "mail": text.format(n=draw.randrange(10**6)), "queue": queue, "why": why})
    return made


def sort(messages, tools):
    system, mail = messages[0]["content"], messages[-1]["content"]
    if int(hashlib.sha256(mail.encode()).hexdigest(), 16) % 20 == 0:
        return "spam"
    without, queue, rule = next(kind[1:] for kind in KINDS if re.fullmatch(kind[0].format(n=r"\d+"), mail))
    return queue if rule in system else without


def reflect(messages, tools):
    prompt = messages[-1]["content"]
    blocks = re.findall(r"```\n(.*?)\n```", prompt, re.DOTALL)
    if not blocks:
        return "ready"
    now, shown = blocks[0], blocks[1]
    rules = [rule for rule in re.findall(r"This mail belongs to \w+: (.*)", shown) if rule not in now]
    if not rules or len(prompt) % 4 == 0:
        return "```\nBe polite.\n```"
    return f"The assistant does not know a rule of the shop.\n```\n{now} {rules[0]}\n```"
