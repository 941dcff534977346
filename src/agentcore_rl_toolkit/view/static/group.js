import { el, link, messageCalls, messageText, many, number, outcomeClass, outcomeText, placeOf } from "./dom.js";
import { groupOf } from "./source.js";
import { dialogueOf, judgeOf } from "./rollout.js";

// Where a dialogue leaves the first one of its group: message, and character in it.
function leaves(first, other) {
  for (let i = 0; i < other.length; i++) {
    const mine = messageText(other[i]), theirs = first[i] ? messageText(first[i]) : null;
    if (theirs === null) return [i, 0];
    let at = 0;
    while (at < mine.length && at < theirs.length && mine[at] === theirs[at]) at++;
    if (at < mine.length || at < theirs.length) return [i, at, messageCalls(first[i])];
    if (messageCalls(first[i]).join() !== messageCalls(other[i]).join()) return [i, mine.length, messageCalls(first[i])];
  }
  return null;
}

export async function groupPage(name, id, query, go) {
  const group = await groupOf(name, id);
  const first = group.members[0].dialogue ?? [];
  const members = group.members.map((m, n) => {
    const at = n && m.dialogue ? leaves(first, m.dialogue) : null;
    const said = n === 0 ? "the others are compared with this one" : at ? `differs from message ${at[0] + 1} on` : "the same dialogue";
    return el("section", { class: "card member", "data-id": m.id }, el("div", {}, el("a", { href: link(name, `rollout/${m.id}`) }, `Rollout ${m.id}`), "  ", el("span", { class: outcomeClass(m) }, outcomeText(m))),
      el("div", {}, "reward ", el("b", {}, number(m.reward)), "   advantage ", el("b", { class: m.advantage > 0 ? "good" : m.advantage < 0 ? "bad" : "" }, number(m.advantage)), el("span", { class: "soft" }, `   ${many(m.turns, "turn")}, ${many(m.sampled_tokens, "token")}`)),
      el("div", { class: "soft" }, said), m.error ? el("div", { class: "bad" }, m.error) : null, judgeOf(m.parts), dialogueOf(m.dialogue, at ? { [at[0]]: at.slice(1) } : null));
  });
  return { nodes: [el("h1", {}, "Group"), el("p", { class: "spaced" }, el("a", { href: link(name, "rollouts", { phase: group.phase, step: group.step }) }, placeOf(group)), el("span", {}, group.grp), el("span", { class: "soft" }, `${many(group.members.length, "rollout")} of one input`)),
    el("details", { class: "card" }, el("summary", {}, "input"), el("pre", {}, JSON.stringify(group.payload, null, 2))), el("h2", {}, "Side by side"), el("div", { class: "members", tabindex: 0 }, members)], keys: (key) => (key === "Enter" ? (go(link(name, `rollout/${id}`)), true) : false) };
}
