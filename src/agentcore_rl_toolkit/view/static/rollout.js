import { el, link, messageCalls, messageText, many, number, outcomeClass, outcomeText, placeOf, small, svg, tip } from "./dom.js";
import { decoded, rolloutOf, textsOf } from "./source.js";

const LIMITS = { logprob: [0.105, 0.69, 2.3, 4.6, 6.9], gap: [0.001, 0.01, 0.05, 0.2, 1], entropy: [0.1, 0.5, 1, 2, 3] };
const WORDS = { mask: "trained or not", logprob: "how unlikely the sampler found it", gap: "sampler and trainer apart", entropy: "how open the choice was" };
const STAGES = { queue: "waiting for a place and for the pace of requests", start: "the invoke, with a cold start", run: "from the accepted invoke to the record", result: "reading the record", stop: "ending the session" };
const MOST = 6000; // tokens shown at once; more on request

export function dialogueOf(dialogue, mark) {
  if (dialogue === null || dialogue === undefined) return [el("p", { class: "soft" }, "No dialogue: the rollout had no gateway, or it was not kept.")];
  if (!dialogue.length) return [el("p", { class: "soft" }, "The agent made no model call.")];
  return dialogue.map((message, i) => {
    const role = String(message.role ?? message.type ?? "?"), text = messageText(message), [at, known_calls = []] = mark?.[i] ?? [];
    const body = at === undefined || at >= text.length ? text : [text.slice(0, at), el("mark", {}, text.slice(at))];
    const known = ["user", "system", "assistant", "tool"].includes(role) ? role : "";
    const thought = typeof message.reasoning_content === "string" ? el("details", {}, el("summary", { class: "soft" }, "reasoning"), el("div", { class: "text soft" }, message.reasoning_content)) : null;
    return el("div", { class: `message ${known}` }, el("div", { class: "role" }, role + (message.name ? ` ${message.name}` : "")), thought, text !== "" ? el("div", { class: "text" }, body) : null, messageCalls(message).map((call, n) => el("div", {}, el("span", { class: "call" }, at === undefined || call === known_calls[n] ? call : el("mark", {}, call)))));
  });
}

export function judgeOf(parts) {
  return parts?.judge ? el("p", { class: "notice judge" }, `The judge gave ${number(parts.judge.score)}: ${parts.judge.reason}`) : null;
}

export async function rolloutPage(name, id, query, go) {
  const row = await rolloutOf(name, id);
  const detail = row.detail ?? {};
  const group = row.group, at = group.findIndex((r) => r.id === row.id);
  const facts = [["outcome", outcomeText(row), outcomeClass(row)], ["reward", number(row.reward)], ["advantage", number(row.advantage)], ["place in group", `${at + 1} of ${group.length}`], ["turns", number(row.turns)], ["tokens sampled", number(row.sampled_tokens)], ["tokens that could be trained", number(row.trained_tokens)], ["least logprob", number(row.logprob_min)], ["largest gap", small(row.gap_max)], ["entropy", number(row.entropy_mean)], ["weight version", row.weight_min === null ? "–" : row.weight_min === row.weight_max ? number(row.weight_min) : `${row.weight_min} to ${row.weight_max}`], ["versions behind", number(row.staleness)], ["time", row.elapsed_s === null ? "–" : `${number(row.elapsed_s, 2)} s`], ...Object.entries(detail.metrics ?? {}).map(([n, v]) => [n, number(v)])].filter(([n, v]) => v !== "–" || ["reward", "advantage", "least logprob"].includes(n));
  const tokens = await tokenView(name, row, query, go);
  const parts = [
    el("h1", {}, `Rollout ${row.id}`), el("p", { class: "spaced" }, el("a", { href: link(name, "rollouts", { phase: row.phase, step: row.step, sort: "reward" }) }, placeOf(row)), el("span", {}, "group ", el("a", { id: "group", href: link(name, `group/${row.id}`) }, row.grp)), el("span", { class: "soft" }, row.session_id), group[at - 1] ? el("a", { id: "previous", href: link(name, `rollout/${group[at - 1].id}`, query) }, "‹ previous of the group") : null, group[at + 1] ? el("a", { id: "next", href: link(name, `rollout/${group[at + 1].id}`, query) }, "next of the group ›") : null),
    el("div", { class: "facts" }, facts.map(([n, v, c]) => el("div", { class: "card fact" }, el("span", {}, n), el("b", { class: c ?? "" }, v)))),
    row.dropped ? el("p", { class: "notice" }, `To keep the run within its size, these parts were given up: ${row.dropped}.`) : null,
    row.error ? el("p", { class: "notice" }, `${row.stage ? `in stage ${row.stage}: ` : ""}${row.error}${row.failure ? ` (policy failed at: ${row.failure})` : ""}`) : null,
    judgeOf(detail.reward_parts),
    detail.traceback ? el("details", { class: "card", open: true }, el("summary", {}, "Traceback"), el("pre", {}, detail.traceback)) : null,
    waterfall(row, detail),
    el("h2", {}, "Dialogue, as the agent saw it"), el("div", { class: "card", id: "dialogue" }, dialogueOf(row.dialogue)), ...tokens, fidelity(row, detail),
    detail.log ? el("details", { class: "card" }, el("summary", {}, "Log of the session"), el("pre", {}, detail.log)) : null,
    el("h2", {}, "Raw"), el("details", { class: "card" }, el("summary", {}, "input"), el("pre", {}, JSON.stringify(detail.payload, null, 2))), el("details", { class: "card" }, el("summary", {}, "record of the agent"), el("pre", {}, JSON.stringify(detail.record, null, 2))),
    el("details", { class: "card" }, el("summary", {}, "everything but tokens"), el("pre", {}, JSON.stringify({ ...row, group: undefined, sequences: undefined }, null, 2))),
  ];
  const other = (by) => { const next = group[at + by]; if (next) go(link(name, `rollout/${next.id}`, query)); return true; };
  return { nodes: parts, keys: (key) => (key === "j" ? other(1) : key === "k" ? other(-1) : key === "g" ? (go(link(name, `group/${row.id}`)), true) : key === "l" ? (document.getElementById("least")?.click(), true) : false) };
}

// Sequences as a tree: each turn a dot in the order of the calls, each sequence a row, a curve from the turn where it branched.
function branchTree(sequences, calls) {
  if (sequences.length < 2) return null;
  const order = [], place = new Map();
  for (const s of sequences) for (const t of [...s.context_turn_ids, ...s.turn_ids]) if (!place.has(t)) { place.set(t, 0); order.push(t); }
  const began = new Map((calls ?? []).map((c) => [c.turn_id, c.started_s ?? 0]));
  order.sort((a, b) => (began.get(a) ?? 0) - (began.get(b) ?? 0)).forEach((t, i) => place.set(t, i));
  const at = new Map(), wide = 34, high = 40, X = (t) => 24 + place.get(t) * wide, Y = (n) => 20 + n * high;
  sequences.forEach((s, n) => s.turn_ids.forEach((t) => at.set(t, n)));
  const width = Math.max(420, 24 + order.length * wide + 330), height = sequences.length * high + 6;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${sequences.length} branches` });
  sequences.forEach((s, n) => {
    const own = s.turn_ids, from = s.context_turn_ids.at(-1), why = s.side_call ? "side call" : n === 0 ? "the first" : s.branch_reason ?? "separate";
    if (!own.length) return;
    if (from !== undefined && at.has(from)) picture.append(svg("path", { class: "twig", d: `M ${X(from)} ${Y(at.get(from))} C ${X(from) + 20} ${Y(n)}, ${X(own[0]) - 20} ${Y(n)}, ${X(own[0])} ${Y(n)}` }));
    picture.append(svg("line", { class: "twig", x1: X(own[0]), x2: X(own.at(-1)), y1: Y(n), y2: Y(n) }));
    for (const t of own) {
      const dot = svg("circle", { class: "dot", cx: X(t), cy: Y(n), r: 6 });
      dot.addEventListener("mousemove", (event) => tip(`turn ${place.get(t) + 1}\n${t}`, event));
      dot.addEventListener("mouseleave", () => tip(null));
      dot.addEventListener("click", () => document.querySelector(`[data-sequence="${n}"]`)?.scrollIntoView({ block: "start" }));
      picture.append(dot);
    }
    picture.append(svg("text", { x: X(own.at(-1)) + 16, y: Y(n) + 4 }, `${n + 1}  ${own.length} ${own.length === 1 ? "turn" : "turns"}, ${s.mask.reduce((a, b) => a + b, 0)} tokens trained, ${why.replaceAll("_", " ")}`));
  });
  return el("div", { id: "branches" }, el("h2", {}, "Branches"), el("div", { class: "card wide" }, picture));
}

function waterfall(row, detail) {
  const calls = (detail.calls ?? []).filter((c) => c.started_s !== null && c.finished_s !== null).sort((a, b) => a.started_s - b.started_s);
  const stages = Object.entries(detail.stages ?? {}), total = stages.reduce((n, [, s]) => n + s, 0);
  const bars = [], after = [];
  let running = null;
  if (stages.length && row.ended_s !== null) {
    let from = row.ended_s - total;
    for (const [stage, s] of stages) { if (stage === "run") running = [from, from + s]; else if (running) after.push(["stage", stage, from, from + s, STAGES[stage] ?? ""]); else bars.push(["stage", stage, from, from + s, STAGES[stage] ?? ""]); from += s; }
    if (running) bars.push(["stage", "run", ...running, STAGES.run]);
  }
  if (running && calls.length && calls[0].started_s > running[0]) bars.push(["agent-bar", "agent begins", running[0], calls[0].started_s, "before its first model call"]);
  const names = (row.dialogue ?? []).flatMap((m) => messageCalls(m).map((c) => c.slice(0, c.indexOf("("))));
  let tool = 0;
  calls.forEach((call, i) => {
    const first = call.first_token_s === null ? "" : `first token after ${number(call.first_token_s - call.started_s, 3)} s\n`;
    bars.push(["model", `model call ${i + 1}`, call.started_s, call.finished_s, `${first}${call.prompt_tokens} tokens in, ${call.sampled_tokens} sampled\nends with ${call.finish_reason}${call.untrainable ? `\nnot trained: ${call.untrainable}` : ""}`]);
    const next = calls[i + 1];
    if (next && next.started_s > call.finished_s) bars.push(["tool-bar", names[tool] ? `tool ${names[tool++]}` : "agent", call.finished_s, next.started_s, "between two model calls"]);
  });
  const done = calls.at(-1);
  if (running && done && running[1] > done.finished_s) bars.push(["agent-bar", "agent, reward", done.finished_s, running[1], "after its last model call: the agent ends, its reward is computed, the record is stored"]);
  bars.push(...after);
  if (!bars.length) return null;
  const start = Math.min(...bars.map((b) => b[2])), end = Math.max(...bars.map((b) => b[3])), wide = end - start || 1;
  const lanes = bars.slice(0, 400).flatMap(([kind, label, from, to, note]) => {
    const lane = svg("svg", { viewBox: "0 0 1000 14", preserveAspectRatio: "none", role: "img", "aria-label": `${label} ${number(to - from, 3)} s` }, svg("rect", { class: kind, x: ((from - start) / wide) * 1000, width: Math.max(2, ((to - from) / wide) * 1000), y: 2, height: 10, rx: 2 }));
    lane.addEventListener("mousemove", (event) => tip(`${label}: ${number(to - from, 3)} s, from ${number(from - start, 3)} s\n${note}`, event));
    lane.addEventListener("mouseleave", () => tip(null));
    return [el("span", {}, label), el("div", { class: "lane" }, lane), el("span", { class: "num soft" }, `${number(to - from, 3)} s`)];
  });
  return el("div", {}, el("h2", {}, "Where the time went"), el("div", { class: "card fall" }, lanes));
}

async function tokenView(name, row, query, go) {
  if (!row.sequences) return [el("h2", {}, "Tokens"), el("p", { class: "soft" }, "No tokens: the rollout had no gateway, or they were not kept.")];
  const sequences = row.sequences.map(decoded);
  const texts = await textsOf(name, sequences.flatMap((s) => [...s.ids]));
  const colour = query.colour ?? "logprob";
  const buttons = Object.keys(WORDS).map((c) => el("button", { type: "button", "data-colour": c, "aria-pressed": c === colour ? "true" : "false", title: WORDS[c], onclick: () => go(link(name, `rollout/${row.id}`, { ...query, colour: c }), true) }, c));
  const known = sequences.some((s) => s.ids.some((_, i) => s.mask[i] && !Number.isNaN(valueOf(s, i, colour) ?? NaN)));
  const bounds = colour === "logprob" ? LIMITS.logprob.map((l) => `< ${Number((Math.exp(-l) * 100).toPrecision(1))} %`) : (LIMITS[colour] ?? []).map((l) => `≥ ${l}`);
  const scale = colour === "mask" ? null : known ? el("span", { class: "scale" }, WORDS[colour], bounds.map((b, n) => el("i", { class: `c${n + 1}` }, b))) : el("span", { class: "soft", id: "unknown" }, absent(row, colour));
  const lowest = sequences.flatMap((s, n) => [...s.ids.keys()].filter((i) => s.mask[i] && s.logprobs && !Number.isNaN(s.logprobs[i])).map((i) => ({ n, i, lp: s.logprobs[i] }))).reduce((a, b) => (a && a.lp <= b.lp ? a : b), null);
  const pick = (n, i, block) => {
    const found = document.querySelector(`[data-at="${n}:${i}"]`);
    if (!found) return;
    document.querySelectorAll(".picked").forEach((e) => e.classList.remove("picked"));
    found.classList.add("picked");
    found.scrollIntoView({ block });
    said.textContent = numbersOf(sequences[n], i, texts).replaceAll("\n", "   ");
  };
  const jump = lowest ? el("button", { type: "button", id: "least", onclick: () => pick(lowest.n, lowest.i, "center") }, "least likely token") : null;
  const said = el("span", { id: "picked", class: "soft", "aria-live": "polite" });
  const shown = sequences.map((s, n) => {
    const why = n === 0 ? "" : s.branch_reason ?? "separate";
    const shared = s.context_turn_ids.length ? `, goes on from ${many(s.context_turn_ids.length, "turn")} trained in another sequence` : "";
    const trained = s.mask.reduce((a, b) => a + b, 0);
    const box = el("div", { class: "tokens card", "data-sequence": n, tabindex: 0, role: "group", "aria-label": "tokens: arrow keys go through them" });
    box.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1, Home: -s.ids.length, End: s.ids.length }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      const at = box.querySelector(".picked")?.dataset.i;
      pick(n, Math.max(0, Math.min(box.querySelectorAll("[data-i]").length - 1, at === undefined && by === 1 ? 0 : Number(at ?? 0) + by)), "nearest");
    });
    const add = (from) => { box.append(...spans(s, n, texts, colour, from, Math.min(from + MOST, s.ids.length))); if (from + MOST < s.ids.length) { const more = el("button", { type: "button", onclick: () => { more.remove(); add(from + MOST); } }, many(s.ids.length - from - MOST, "more token")); box.append(more); } };
    add(0);
    box.addEventListener("mousemove", (event) => { const place = event.target.dataset?.i; tip(place === undefined ? null : numbersOf(s, Number(place), texts), event); });
    box.addEventListener("mouseleave", () => tip(null));
    return [el("p", {}, el("b", {}, sequences.length > 1 ? `Sequence ${n + 1} of ${sequences.length}` : "One sequence"), el("span", { class: "soft" }, `  ${s.ids.length} tokens, ${trained} trained, ${many(s.turn_ids.length, "turn")}${shared}${s.updates ? `; the trainer's numbers come after ${many(s.updates, "update")} of this step` : ""}  `), why ? el("span", { class: "warn" }, `branch: ${why}  `) : null, s.side_call ? el("span", { class: "warn" }, `side call, not trained: ${s.side_call}`) : null), box];
  });
  return [branchTree(sequences, row.detail?.calls), el("h2", {}, "Tokens, as the trainer sees them"), el("div", { class: "tools" }, buttons, scale, jump, said), shown];
}

// Why there is nothing to colour by.
function absent(row, colour) {
  if (colour === "logprob") return "The engine gave no logprobs for this rollout.";
  const what = colour === "gap" ? "The trainer's logprobs are not known" : "The entropy is not known";
  if (row.phase !== "train") return `${what}: this rollout was not for training.`;
  if (row.mask_reason) return `${what}: this rollout was not trained (${row.mask_reason}).`;
  if (row.advantage === 0) return `${what}: its advantage is 0, and trainers leave such rollouts out.`;
  return `${what}: this trainer gives none, or not yet.`;
}

function level(value, limits) {
  return value === null || value === undefined || Number.isNaN(value) ? 0 : limits.filter((l) => value >= l).length;
}

function valueOf(s, i, colour) {
  if (colour === "logprob") return s.logprobs ? -s.logprobs[i] : null;
  if (colour === "entropy") return s.entropies ? s.entropies[i] : null;
  return s.logprobs && s.trainer_logprobs ? Math.abs(s.trainer_logprobs[i] - s.logprobs[i]) : null;
}

function spans(s, n, texts, colour, from, to) {
  const made = [];
  for (let i = from; i < to; i++) {
    const trained = s.mask[i] === 1;
    const heat = !trained ? "" : colour === "mask" ? " m1" : ` c${level(valueOf(s, i, colour), LIMITS[colour])}`;
    const span = document.createElement("span");
    span.className = (trained ? "trained" : "context") + heat;
    span.dataset.i = i;
    span.dataset.at = `${n}:${i}`;
    span.textContent = texts[s.ids[i]] ?? `[${s.ids[i]}]`;
    made.push(span);
  }
  return made;
}

function numbersOf(s, i, texts) {
  const lp = s.logprobs?.[i] ?? NaN, again = s.trainer_logprobs?.[i] ?? NaN;
  const lines = [`${JSON.stringify(texts[s.ids[i]] ?? null)}  id ${s.ids[i]}  at ${i}`, s.mask[i] ? "trained" : "context, not trained"];
  if (s.mask[i]) lines.push(`sampler ${number(lp, 4)}${Number.isNaN(lp) ? "" : ` (${(Math.exp(lp) * 100).toPrecision(3)} %)`}`, `trainer ${number(again, 4)}`, `gap ${small(Math.abs(again - lp))}`, `entropy ${number(s.entropies?.[i] ?? NaN, 3)}`, `weights ${number(s.versions?.[i])}`);
  return lines.join("\n");
}

function fidelity(row, detail) {
  const report = detail.fidelity;
  if (!report) return null;
  const rows = Object.entries(report).filter(([, v]) => v !== null && !(typeof v === "object" && !Object.keys(v).length));
  return el("div", {}, el("h2", {}, "Fidelity"), el("div", { class: "card" }, el("table", {}, el("tbody", {}, rows.map(([n, v]) => el("tr", {}, el("td", { class: "soft" }, n.replaceAll("_", " ")), el("td", {}, typeof v === "object" ? Object.entries(v).map(([a, b]) => `${a} ${b}`).join(", ") : typeof v === "string" ? v : number(v))))))));
}
