// @ts-check
// The rollouts of one input in one step: what did the better one do differently?
import { choice, el, filters, fold, link, messageCalls, messageText, many, notice, number, outcomeClass, outcomeText, soft, stopText, table, to } from "./dom.js";
import { lineChart } from "./charts.js";
import { groupOf } from "./source.js";
import { dialogueOf, expectedOf, judgeOf } from "./rollout.js";

const sameMessage = (a, b) => a && b && a.role === b.role && messageText(a) === messageText(b) && messageCalls(a).join() === messageCalls(b).join();

// How many messages all members begin with.
function sharedMessages(dialogues) {
  if (!dialogues.length || dialogues.some((d) => !d)) return 0;
  let n = 0;
  while (dialogues.every((d) => n < d.length && sameMessage(d[n], dialogues[0][n]))) n++;
  return n;
}

// Of each message that differs from the other's at its place: from which character to which, and the other's calls.
function differences(own, other) {
  /** @type {Record<number, [number, number, string[]]>} */
  const found = {};
  own.forEach((message, i) => {
    if (sameMessage(message, other[i])) return;
    const mine = messageText(message), theirs = other[i] ? messageText(other[i]) : "";
    let start = 0, end = 0;
    while (start < mine.length && start < theirs.length && mine[start] === theirs[start]) start++;
    while (end < Math.min(mine.length, theirs.length) - start && mine[mine.length - 1 - end] === theirs[theirs.length - 1 - end]) end++;
    found[i] = [start, mine.length - end, other[i] ? messageCalls(other[i]) : []];
  });
  return found;
}

export async function groupPage(name, id, query, go) {
  const found = await groupOf(name, id), group = found.members[0];
  const members = [...found.members].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.place - b.place);
  const shared = sharedMessages(members.filter((m) => m.dialogue?.length).map((m) => m.dialogue));
  const withDialogue = members.filter((m) => m.dialogue?.length);
  const chosen = (key, fallback) => members.find((m) => String(m.id) === query[key]) ?? fallback;
  const one = chosen("one", withDialogue[0] ?? members[0]), other = chosen("other", withDialogue.at(-1) ?? members.at(-1));
  const here = (changed) => link(name, `group/${id}`, { one: one.id, other: other.id, ...changed });
  const pick = (key, label, current) => choice(key, label, current.id, members.map((m) => [m.id, `#${m.id}, reward ${number(m.reward)}`]), (value) => go(here({ [key]: value })));
  const parts = [...new Set(members.flatMap((m) => Object.keys(m.numbers)))].sort();
  const rows = members.map((m) => [el("a", { href: link(name, `rollout/${m.id}`), class: "member", "data-id": m.id }, `#${m.id}`), el("b", {}, number(m.reward)), el("span", { class: m.advantage > 0 ? "good" : m.advantage < 0 ? "bad" : null }, number(m.advantage)), ...parts.map((p) => number(m.numbers[p])), number(m.turns), number(m.sampled_tokens), stopText(m.stop) ?? "–", el("span", { class: outcomeClass(m) }, outcomeText(m)), el("span", { class: "long" }, m.error ?? "")]);
  const side = (m, against) => el("section", { class: "card", "data-id": m.id }, el("div", {}, to(link(name, `rollout/${m.id}`), `Rollout ${m.id}`), "  reward ", el("b", {}, number(m.reward)), soft(`   ${many(m.turns, "turn")}, ${many(m.sampled_tokens, "token")}, stopped by ${stopText(m.stop) ?? "–"}`)),
    m.error ? el("div", { class: "bad" }, m.error) : null, judgeOf(m.detail?.reward_parts), dialogueOf(m.dialogue, { mark: m !== against && m.dialogue && against.dialogue ? differences(m.dialogue, against.dialogue) : null, from: m.dialogue?.length ? shared : 0 }));
  const expected = expectedOf(group.detail?.payload), history = found.history;
  const held = history.filter((h) => h.number !== null || h.phase !== "train");
  const past = held.length > 1 ? [el("h2", {}, "This input over the run"), lineChart("Reward of this input", ["train", ...new Set(held.map((h) => h.phase).filter((p) => p !== "train"))].map((phase) => ({ name: phase, kind: phase === "train" ? undefined : "held", points: held.filter((h) => h.phase === phase).map((h) => ({ x: h.number ?? (phase === "before" ? 0 : Math.max(1, ...held.map((o) => o.number ?? 0))), y: h.reward, low: h.low, high: h.high, href: link(name, `group/${h.first}`) })) })), { from: 0, to: 1, join: true, note: "Mean of each step. The band is from the lowest to the highest rollout. A click opens that group." })] : null;
  const beginning = members.find((m) => m.dialogue?.length)?.dialogue.slice(0, shared);
  return [el("h1", {}, "Group"),
    el("p", { class: "spaced" }, to(link(name, "rollouts", { phase: group.phase, number: group.number }), group.at), el("span", {}, group.grp), soft(`${many(members.length, "rollout")} of one input`), group.input_key ? to(link(name, "rollouts", { input: group.input_key }), "all rollouts of this input") : null),
    expected !== null ? el("p", { class: "notice", id: "expected" }, "Expected: ", el("b", {}, expected)) : null,
    table(["rollout", "#reward", "#advantage", ...parts.map((p) => `#${p}`), "#turns", "#tokens", "end", "outcome", ""], rows, { id: "members" }),
    shared ? [el("h2", {}, `The beginning of all: ${many(shared, "message")}`), el("details", { class: "card", id: "shared", open: shared <= 2 }, el("summary", {}, messageText(beginning[shared - 1]).slice(0, 120)), dialogueOf(beginning))] : null,
    el("h2", {}, "Side by side"), filters(pick("one", "left", one), pick("other", "right", other), soft("What differs is marked.")),
    el("div", { class: "sides" }, side(one, other), one === other ? null : side(other, one)), past,
    fold("input", el("pre", {}, JSON.stringify(group.detail?.payload, null, 2)))];
}
