// @ts-check
// The list of rollouts: filters, orders, and only the rows in sight.
import { choice, el, filters, link, many, number, onTyped, outcomeClass, outcomeText, stopText, to } from "./dom.js";
import { FILTERS, facetsOf, filtersOf, rowsOf } from "./source.js";

const HIGH = 30, CHUNK = 100, AROUND = 12, AT_ONCE = 2;
const COLUMNS = [["id", "#"], ["step", "step"], ["grp", "input"], ["outcome", "outcome"], ["reward", "reward"], ["advantage", "advantage"], ["turns", "turns"], ["sampled_tokens", "tokens"], ["logprob_min", "min logprob"], ["gap_max", "gap"], ["tool_calls", "tools or error"]];
const WORDY = new Set(["id", "step", "grp", "outcome", "tool_calls"]);
// Filters that only links set, in words.
const LINKED = {
  number_from: (v) => `from step ${v} on`, group: (v) => `group ${v}`, input: (v) => `input ${v}`, error: (v) => `error: ${v}`, usable: (v) => (v === "0" ? "not usable" : "usable"),
  gradient: (v) => (v === "0" ? "without gradient" : "with gradient"), failed: (v) => (v === "0" ? "not failed" : "failed"), cut: (v) => (v === "0" ? "no reply cut off" : "a reply cut off"), unparsed: (v) => (v === "0" ? "all calls parse" : "a call does not parse"), tokens_to: (v) => `at most ${v} tokens`,
};

export async function rolloutsPage(name, query, go) {
  const list = new VirtualRows(name, query);
  const [facets] = await Promise.all([facetsOf(name), list.load(0)]);
  const any = (key, label, values) => choice(key, label, query[key], [["", "any"], ...values]);
  const input = (key, label, type = "number", more = {}) => el("label", {}, label, el("input", { name: key, type, step: "any", value: query[key] ?? "", ...more }));
  const counted = (values, prefix = "") => Object.entries(values).map(([v, n]) => [prefix + v, `${prefix.replace(":", ": ")}${v} (${n})`]);
  const form = filters(
    any("phase", "phase", counted(facets.phase)), input("number", "step", "number", { step: 1 }), any("outcome", "outcome", [...counted(facets.outcome), ...counted(facets.cause, "cause:")]), any("stop", "end", counted(facets.stop).map(([value, text]) => [value, text.replace(value, stopText(value))])), any("tool", "tool", counted(facets.tool)),
    input("reward_from", "reward from"), input("reward_to", "reward to"), input("tokens_from", "tokens from", "number", { step: 1 }), input("text", "text", "search", { pattern: "..+", title: "at least 2 characters" }), el("span", { id: "count", class: "soft", "aria-live": "polite" }));
  const linked = Object.keys(LINKED).filter((key) => query[key] !== undefined && query[key] !== "");
  if (query.tool === "") linked.push("tool");
  const order = { sort: query.sort, descending: query.descending };
  const without = (key) => Object.fromEntries(Object.entries(filtersOf(query)).filter(([k]) => k !== key));
  const chips = linked.length ? el("p", { class: "chips" }, linked.map((key) => el("a", { class: "chip", href: link(name, "rollouts", { ...without(key), ...order }), title: "remove this filter" }, `${key === "tool" ? "no tool" : LINKED[key](query[key])} ×`))) : null;
  const current = () => ({ ...Object.fromEntries(linked.map((key) => [key, query[key]])), ...Object.fromEntries(FILTERS.filter((key) => form.elements[key]?.value).map((key) => [key, form.elements[key].value])) });
  // What a field does not take, such as a step of 1.5, stays in it with the browser's message, and filters nothing.
  onTyped(form, () => form.reportValidity() && go(link(name, "rollouts", { ...current(), ...order }), true));
  const sorted = query.sort ?? "id";
  const head = el("div", { class: "head", role: "row" }, COLUMNS.map(([key, text]) => el("button", { type: "button", role: "columnheader", class: WORDY.has(key) ? "" : "right", "data-sort": key, "aria-sort": key === sorted ? (query.descending ? "descending" : "ascending") : "none",
    onclick: () => go(link(name, "rollouts", { ...current(), sort: key, descending: key === sorted && !query.descending ? "1" : "" })) }, text + (key === sorted ? (query.descending ? " ↓" : " ↑") : ""))));
  const space = el("div", { class: "space", role: "rowgroup" });
  const box = el("div", { class: "rows", tabindex: 0, role: "table", "aria-label": "rollouts" }, head, space);
  list.put(box, space);
  const say = () => { form.querySelector("#count").textContent = many(list.total, "rollout"); none.hidden = list.total > 0; };
  const none = el("p", { class: "none soft", hidden: true }, Object.keys(current()).length ? ["No rollout fits these filters. ", to(link(name, "rollouts"), "Show all")] : "No rollout has ended yet.");
  box.append(none);
  say();
  return { nodes: [el("h1", {}, `${name}: rollouts`), form, chips, box, el("p", { class: "soft" }, el("kbd", {}, "j"), " ", el("kbd", {}, "k"), " next, previous   ", el("kbd", {}, "Enter"), " open   ", el("kbd", {}, "/"), " search   ", el("kbd", {}, "?"), " all keys")],
    shown: () => list.draw(), keys: (key) => list.key(key, form), changed: () => list.renew().then(say) };
}

class VirtualRows {
  /** @type {HTMLElement} */ box = null;
  /** @type {HTMLElement} */ space = null;
  /** @type {Map<number, any[] | null>} The rows of each page, null while they load. */ chunks = new Map();
  /** @type {Map<number, HTMLElement>} The rows that are drawn, by place. */ made = new Map();
  name = ""; query = {}; total = 0; at = -1; asked = 0; loading = 0;
  constructor(name, query) { Object.assign(this, { name, query }); }
  put(box, space) {
    Object.assign(this, { box, space });
    space.style.height = `${this.total * HIGH}px`;
    box.addEventListener("scroll", () => { if (!this.asked) this.asked = requestAnimationFrame(() => { this.asked = 0; this.draw(); }); }, { passive: true });
    box.addEventListener("keydown", (event) => { if (["ArrowDown", "ArrowUp"].includes(event.key)) { event.preventDefault(); this.key(event.key === "ArrowDown" ? "j" : "k"); } });
  }
  async load(chunk) {
    if (this.chunks.has(chunk)) return;
    this.chunks.set(chunk, null);
    try {
      const page = await rowsOf(this.name, this.query, chunk * CHUNK, CHUNK);
      this.total = page.total;
      this.chunks.set(chunk, page.rows);
      if (this.space) this.space.style.height = `${this.total * HIGH}px`;
    } catch (error) { this.chunks.delete(chunk); throw error; }
  }
  // Dragging the bar passes many pages. While some load, no more are requested, and then only those in sight.
  want(chunk) {
    if (this.loading >= AT_ONCE) return;
    this.loading++;
    this.load(chunk).finally(() => { this.loading--; }).then(() => this.draw(), () => {});
  }
  async renew() {
    this.chunks.clear();
    await this.load(Math.max(0, Math.floor(this.box.scrollTop / HIGH / CHUNK)));
    for (const row of this.made.values()) row.remove();
    this.made.clear();
    this.draw();
  }
  draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / HIGH) - AROUND), end = Math.min(this.total, Math.ceil((this.box.scrollTop + this.box.clientHeight) / HIGH) + AROUND);
    for (const [place, row] of this.made) if (place < first || place >= end) { row.remove(); this.made.delete(place); }
    const fresh = document.createDocumentFragment();
    for (let place = first; place < end; place++) {
      const rows = this.chunks.get(Math.floor(place / CHUNK));
      if (rows === undefined) { this.want(Math.floor(place / CHUNK)); continue; }
      const row = rows?.[place % CHUNK];
      if (!row || this.made.has(place)) continue;
      const made = this.row(row, place);
      this.made.set(place, made);
      fresh.append(made);
    }
    this.space.append(fresh);
  }
  row(row, place) {
    const tools = Object.entries(row.tools).map(([t, n]) => `${t} ${n}`).join(", ") || (row.tool_calls === 0 ? "none" : "–");
    const cells = [`${row.id}`, row.at, el("span", { title: `group ${row.grp}` }, row.input ?? row.grp), el("span", { class: outcomeClass(row) }, outcomeText(row)), number(row.reward), number(row.advantage), number(row.turns), number(row.sampled_tokens), number(row.logprob_min), number(row.gap_max), row.error ?? tools];
    const made = el("a", { class: `row${place === this.at ? " at" : ""}`, href: link(this.name, `rollout/${row.id}`, { ...this.query, place }), role: "row", tabindex: -1, "data-id": row.id }, cells.map((c, i) => (c instanceof Node ? c : el("span", { class: WORDY.has(COLUMNS[i][0]) ? "" : "num" }, c))));
    made.style.top = `${place * HIGH}px`;
    return made;
  }
  key(key, form) {
    if (key === "/") { form?.elements.text.focus(); return true; }
    if (key === "Enter" && this.at >= 0) { this.made.get(this.at)?.click(); return true; }
    if (key !== "j" && key !== "k") return false;
    this.made.get(this.at)?.classList.remove("at");
    this.at = Math.max(0, Math.min(this.total - 1, this.at + (key === "j" ? 1 : -1)));
    const top = this.at * HIGH, room = this.box.clientHeight - HIGH;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top > this.box.scrollTop + room - HIGH) this.box.scrollTop = top - room + HIGH;
    this.draw();
    this.made.get(this.at)?.classList.add("at");
    return true;
  }
}
