// @ts-check
// One rollout: the list that it is in, its dialogue or its tokens, and its facts.
import { el, fold, hint, link, messageCalls, messageText, many, notice, number, onTyped, outcomeClass, outcomeText, patternOf, seconds, soft, stopText, to, toolCalls } from "./dom.js";
import { filtersOf, rolloutOf, rowsOf } from "./source.js";
import { tokenView } from "./tokens.js";

const STAGES = { queue: "waiting for a free slot and for the pace of requests", start: "the invoke, with a cold start", run: "from the accepted invoke to the record", result: "reading the record", stop: "ending the session" };
const EXPECTED = ["expected", "answer", "target", "ground_truth", "reference", "solution", "label"];
const NEIGHBOURS = 15; // rows of the list before and after

export const expectedOf = (payload) => { const key = EXPECTED.find((k) => payload?.[k] !== undefined && payload[k] !== null); return key ? String(typeof payload[key] === "string" ? payload[key] : JSON.stringify(payload[key])) : null; };

// Text with the places of a word marked, without regard to case.
const marked = (text, word) => (word ? text.split(patternOf(word)).map((piece, n) => (n % 2 ? el("mark", { class: "hit" }, piece) : piece)) : text);

// mark: of a message's place, [first and last character that differ, the other's calls]. turn: the address of a turn.
/**
 * @param {any[] | null | undefined} dialogue
 * @param {{ mark?: Record<number, [number, number, string[]]> | null, find?: string, from?: number,
 *   turn?: (turn: number) => string }} options
 */
export function dialogueOf(dialogue, { mark, find, turn, from = 0 } = {}) {
  if (dialogue === null || dialogue === undefined) return [el("p", { class: "soft" }, "No dialogue: the rollout had no gateway, or it was not kept.")];
  if (!dialogue.length) return [el("p", { class: "soft" }, "The agent made no model call.")];
  const called = new Map(dialogue.flatMap((m) => toolCalls(m).map((c) => [c?.id, c?.function?.name])));
  let turns = 0;
  return dialogue.map((message, i) => {
    const role = String(message.role ?? message.type ?? "?"), text = messageText(message), [at, end, known_calls = []] = mark?.[i] ?? [];
    if (role === "assistant") turns++;
    if (i < from) return null;
    const body = at === undefined || at >= text.length ? marked(text, find) : [text.slice(0, at), el("mark", {}, text.slice(at, end)), text.slice(end)];
    const known = ["user", "system", "assistant", "tool"].includes(role) ? role : "";
    const thought = typeof message.reasoning_content === "string" ? el("details", { open: Boolean(find) && patternOf(find).test(message.reasoning_content) }, el("summary", { class: "soft" }, "reasoning"), el("div", { class: "text soft" }, marked(message.reasoning_content, find))) : null;
    const mine = role === "assistant" && turn ? el("a", { class: "soft", href: turn(turns) }, ` turn ${turns}`) : null;
    const copy = turn ? el("button", { type: "button", class: "plain", title: "copy this message", "aria-label": "copy this message", onclick: () => navigator.clipboard.writeText(text) }, "copy") : null;
    return el("div", { class: `message ${known}`, "data-turn": mine ? turns : null }, el("div", { class: "role" }, [role, message.name ?? called.get(message.tool_call_id)].filter(Boolean).join(" "), mine, copy), thought, text !== "" ? el("div", { class: "text" }, body) : null, messageCalls(message).map((call, n) => el("div", {}, el("span", { class: "call" }, at === undefined || call === known_calls[n] ? marked(call, find) : el("mark", {}, call)))));
  }).filter(Boolean);
}

export function judgeOf(parts) {
  return parts?.judge ? el("p", { class: "notice judge" }, `The judge gave ${number(parts.judge.score)}: ${parts.judge.reason}`) : null;
}

// The list that the rollout is in: that of the address' filters, otherwise its group.
async function listOf(name, row, query) {
  const filters = filtersOf(query), order = { sort: query.sort, descending: query.descending };
  const known = Object.fromEntries(Object.entries({ ...filters, ...order }).filter(([, v]) => v !== undefined));
  if (!Object.keys(known).length && query.place === undefined) return { rows: row.group, first: 0, total: row.group.length, title: "This group", of: () => ({ view: query.view, colour: query.colour }) };
  const first = Math.max(0, Number(query.place ?? 0) - NEIGHBOURS), found = await rowsOf(name, known, first, 2 * NEIGHBOURS + 1);
  return { rows: found.rows, first, total: found.total, title: "The filtered list", of: (n) => ({ ...known, place: first + n, view: query.view, colour: query.colour }) };
}

export async function rolloutPage(name, id, query, go) {
  const row = await rolloutOf(name, id), detail = row.detail ?? {}, view = query.view === "tokens" ? "tokens" : "dialogue";
  const list = await listOf(name, row, query), at = list.rows.findIndex((r) => r.id === row.id);
  const other = (by) => (at >= 0 && list.rows[at + by] ? link(name, `rollout/${list.rows[at + by].id}`, list.of(at + by)) : null);
  const here = (changed) => link(name, `rollout/${row.id}`, { ...query, least: "", ...changed });
  /** @type {any} */
  const middle = view === "tokens" ? tokenView(name, row, query, go) : [el("div", { class: "card", id: "dialogue" }, dialogueOf(row.dialogue, { find: query.find, turn: (n) => here({ turn: n }) }))];
  const find = el("input", { type: "search", name: "find", placeholder: "find", "aria-label": "find in this rollout", value: query.find ?? "" });
  onTyped(find, () => go(here({ find: find.value, token: "" }), true));
  const hits = el("span", { class: "soft", id: "hits" });
  const tabs = ["dialogue", "tokens"].map((v) => el("a", { class: "tab", href: here({ view: v, turn: "", token: "" }), "aria-current": v === view ? "page" : null, id: `view-${v}` }, v));
  const least = view === "dialogue" && row.logprob_min !== null ? el("a", { class: "tab", id: "least", href: here({ view: "tokens", least: "1" }) }, "least likely token") : null;
  const nodes = [
    el("h1", {}, `Rollout ${row.id}`),
    el("p", { class: "spaced" }, el("span", { class: outcomeClass(row) }, outcomeText(row)), el("span", {}, "reward ", el("b", {}, number(row.reward))), to(link(name, "rollouts", { phase: row.phase, number: row.number, sort: "reward" }), row.at), el("span", {}, "group ", el("a", { id: "group", href: link(name, `group/${row.id}`) }, row.grp)), soft(row.session_id), other(-1) ? el("a", { id: "previous", href: other(-1) }, "‹ previous") : null, other(1) ? el("a", { id: "next", href: other(1) }, "next ›") : null),
    el("div", { class: "three" },
      el("nav", { class: "card side", "aria-label": list.title }, el("b", {}, list.title), soft(` ${at >= 0 ? `${list.first + at + 1} of ` : ""}${list.total}`), list.rows.map((r, n) => el("a", { class: "item", href: link(name, `rollout/${r.id}`, list.of(n)), "aria-current": r.id === row.id ? "page" : null }, el("span", {}, `#${r.id}`), el("span", { class: outcomeClass(r) }, r.outcome === "ok" ? number(r.reward) : r.outcome)))),
      el("div", { class: "main" },
        row.error ? notice(row.stage ? `in stage ${row.stage}: ` : null, row.error, row.failure ? ` (policy failed at: ${row.failure})` : null) : null,
        judgeOf(detail.reward_parts), detail.traceback ? el("details", { class: "card", open: true }, el("summary", {}, "Traceback"), el("pre", {}, detail.traceback)) : null,
        el("div", { class: "tools" }, tabs, least, find, hits), middle),
      el("div", { class: "main late" }, waterfall(row, detail),
        detail.log ? fold("Log of the session", el("pre", {}, detail.log)) : null,
        el("h2", {}, "Raw"), [["input", detail.payload], ["record of the agent", detail.record], ["everything but tokens", { ...row, group: undefined, sequences: undefined, spans: undefined, texts: undefined }]].map(([what, value]) => fold(what, el("pre", {}, JSON.stringify(value, null, 2))))),
      el("aside", { class: "card side facts-of" }, factsOf(row, detail))),
  ];
  const shown = () => {
    middle.start?.();
    if (query.least && view === "tokens") document.getElementById("least")?.click();
    if (query.turn) document.querySelector(`[data-turn="${CSS.escape(query.turn)}"]`)?.scrollIntoView({ block: "start" });
    const found = document.querySelectorAll(".hit");
    if (query.find) hits.textContent = view === "tokens" ? many(document.querySelectorAll(".found").length, "token") : many(found.length, "place");
    if (query.find && !query.turn) found[0]?.scrollIntoView({ block: "center" });
  };
  const move = (by) => { const next = other(by); if (next) go(next); return true; };
  const keys = { j: () => move(1), k: () => move(-1), g: () => (go(link(name, `group/${row.id}`)), true), l: () => (document.getElementById("least")?.click(), true), t: () => (go(here({ view: view === "tokens" ? "dialogue" : "tokens", token: "" })), true), "/": () => (find.focus(), true) };
  return { nodes, shown, keys: (key) => keys[key]?.() ?? false };
}

function factsOf(row, detail) {
  const payload = detail.payload, expected = expectedOf(payload), last = (row.dialogue ?? []).findLast((m) => m.role === "assistant");
  const of = (kind) => { const found = row.spans.filter((s) => s.name.startsWith(kind)); return found.length ? covered(found) : null; };
  const model = of("chat "), tool = of("execute_tool "), stages = detail.stages ?? {}, run = stages.run ?? null;
  const agent = run === null || model === null ? null : Math.max(0, run - model - (tool ?? 0));
  const lines = (title, rows) => { const known = rows.filter(([, v]) => v !== "–" && v !== null && v !== undefined); return known.length ? [el("h3", {}, title), el("dl", {}, known.map(([n, v, c]) => [el("dt", {}, n), el("dd", { class: c ?? null }, v)]))] : null; };
  const parts = Object.entries(detail.reward_parts ?? {}).filter(([n]) => n !== "judge" && n !== "per_turn");
  const report = Object.entries(detail.fidelity ?? {}).filter(([, v]) => v !== null && !(typeof v === "object" && !Object.keys(v).length));
  const version = row.weight_min === null ? "–" : row.weight_min === row.weight_max ? number(row.weight_min) : `${row.weight_min} to ${row.weight_max}`;
  return [
    lines("Result", [["outcome", outcomeText(row), outcomeClass(row)], ["end", stopText(row.stop)], ["reward", number(row.reward) === "–" ? "none" : number(row.reward)], ["advantage", number(row.advantage)], ...Object.entries(detail.metrics ?? {}).map(([n, v]) => [n, number(v)]), ...parts.map(([n, v]) => [n, JSON.stringify(v)]), ["judge", number(detail.reward_parts?.judge?.score)], ["reward of turns", detail.reward_parts?.per_turn ? JSON.stringify(detail.reward_parts.per_turn) : null]]),
    lines("Answer", [["expected", expected], ["answered", last ? messageText(last).slice(-300) || "a tool call" : null]]),
    lines("Time", [["in all", seconds(row.elapsed_s)], ["model", seconds(model)], ["tools", seconds(tool)], ["agent", seconds(agent)], ["waiting", seconds((stages.queue ?? 0) + (stages.start ?? 0) || null)]]),
    lines("Tokens", [["turns", number(row.turns)], ["sampled", number(row.sampled_tokens)], ["usable", row.mask_reason ? `0 (${row.mask_reason})` : number(row.trained_tokens)], ["with gradient", row.phase === "train" ? number(row.mask_reason ? 0 : row.gradient_tokens) : null], ["least logprob", number(row.logprob_min)], ["largest gap", number(row.gap_max)], ["entropy", number(row.entropy_mean)], ["weight version", version], ["versions behind", number(row.staleness)]]),
    report.length ? el("details", { id: "fidelity" }, el("summary", {}, "Fidelity"), el("dl", {}, report.map(([n, v]) => [el("dt", {}, n.replaceAll("_", " ")), el("dd", {}, typeof v === "object" ? Object.entries(v).map(([a, b]) => `${a} ${b}`).join(", ") : typeof v === "string" ? v : number(v))]))) : null,
  ];
}

// The seconds in which at least one of these spans runs.
function covered(spans) {
  let total = 0, end = -Infinity;
  for (const s of [...spans].sort((a, b) => a.start_s - b.start_s)) { total += Math.max(0, s.end_s - Math.max(s.start_s, end)); end = Math.max(end, s.end_s); }
  return total;
}

// Where the time went, from the same spans that a collector gets.
function waterfall(row, detail) {
  const spans = row.spans.filter((s) => s.name !== "invoke_agent"), run = spans.find((s) => s.name === "stage run");
  const refused = new Map((detail.calls ?? []).map((c) => [c.turn_id, c.untrainable])), bars = [];
  let calls = 0, at = run?.start_s ?? Infinity;
  const agent = (until) => { if (until > at + 1e-9) bars.push(["agent-bar", "agent", at, until, "no call of a model or tool"]); };
  for (const s of spans) {
    const [kind, name] = [s.name.slice(0, s.name.indexOf(" ")), s.name.slice(s.name.indexOf(" ") + 1)], a = s.attributes;
    if (kind === "stage") { bars.push(["stage", name, s.start_s, s.end_s, STAGES[name] ?? ""]); continue; }
    agent(s.start_s);
    at = Math.max(at === Infinity ? s.start_s : at, s.end_s);
    if (kind === "execute_tool") { bars.push(["tool-bar", `tool ${name}`, s.start_s, s.end_s, "between two model calls"]); continue; }
    const first = a["gen_ai.server.time_to_first_token"], why = refused.get(a["agentcore_rl.turn_id"]);
    const said = [first && `first token after ${number(first, 3)} s`, why && `not trained: ${why}`,
      `${a["gen_ai.usage.input_tokens"] ?? "–"} tokens in, ${a["gen_ai.usage.output_tokens"] ?? "–"} sampled, ends with ${a["gen_ai.response.finish_reasons"]?.[0] ?? "–"}`];
    bars.push(["model", `model call ${++calls}`, s.start_s, s.end_s, said.filter(Boolean).join("\n")]);
  }
  if (run) agent(run.end_s);
  if (!bars.length) return null;
  bars.sort((a, b) => a[2] - b[2]);
  const start = bars[0][2], end = Math.max(...bars.map((b) => b[3])), wide = end - start || 1;
  const lanes = bars.slice(0, 400).flatMap(([kind, label, from, to, note]) => {
    const bar = el("div", { class: `bar ${kind}`, role: "img", "aria-label": `${label} ${number(to - from)} s` });
    [bar.style.left, bar.style.width] = [((from - start) / wide) * 100, ((to - from) / wide) * 100].map((share) => `${share}%`);
    const lane = hint(el("div", { class: "lane" }, bar), () => `${label}: ${number(to - from)} s, from ${number(from - start)} s\n${note}`);
    return [el("span", {}, label), lane, el("span", { class: "num soft" }, `${number(to - from, 3)} s`)];
  });
  return el("div", {}, el("h2", {}, "Where the time went"), el("div", { class: "card fall" }, lanes), bars.length > 400 ? el("p", { class: "soft" }, `The first 400 of ${bars.length} are shown.`) : null);
}
