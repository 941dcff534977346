import { el, link, many, number, outcomeClass, outcomeText, placeOf, small } from "./dom.js";
import { facetsOf, rowsOf } from "./source.js";

const HIGH = 30, CHUNK = 100, AROUND = 12, AT_ONCE = 2;
const COLUMNS = [["id", "#"], ["step", "step"], ["grp", "input"], ["outcome", "outcome"], ["reward", "reward"], ["advantage", "advantage"], ["turns", "turns"], ["sampled_tokens", "tokens"], ["logprob_min", "min logprob"], ["gap_max", "gap"], ["tool_calls", "tools"]];
const WORDY = new Set(["id", "step", "grp", "outcome", "tool_calls"]);
const FILTERS = ["phase", "step", "outcome", "tool", "reward_from", "reward_to", "tokens_from", "text"];

export async function rolloutsPage(name, query, go) {
  const list = new VirtualRows(name, query);
  const [facets] = await Promise.all([facetsOf(name), list.load(0)]);
  const options = (values, empty) => [el("option", { value: "" }, empty), ...values.map(([value, text]) => el("option", { value }, text))];
  const choice = (key, label, values) => { const made = el("select", { name: key }, options(values, "any")); made.value = query[key] ?? ""; return el("label", {}, label, made); };
  const input = (key, label, type = "number") => el("label", {}, label, el("input", { name: key, type, step: "any", value: query[key] ?? "" }));
  // The address has the file's number of a step, the form the one that people count from 1.
  const more = () => ((form?.elements.phase.value ?? query.phase ?? "") === "eval" ? 0 : facets.counted_from);
  let form = null;
  const step = input("step", "step");
  if (query.step) step.querySelector("input").value = Number(query.step) + more();
  const outcomes = [...Object.entries(facets.outcome).map(([o, n]) => [o, `${o} (${n})`]), ...Object.entries(facets.cause).map(([c, n]) => [`cause:${c}`, `cause: ${c} (${n})`])];
  form = el("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
    choice("phase", "phase", Object.entries(facets.phase).map(([p, n]) => [p, `${p} (${n})`])), step, choice("outcome", "outcome", outcomes), choice("tool", "tool", Object.entries(facets.tool).map(([t, n]) => [t, `${t} (${n})`])),
    input("reward_from", "reward from"), input("reward_to", "reward to"), input("tokens_from", "tokens from"), input("text", "text", "search"), el("span", { id: "count", class: "soft", "aria-live": "polite" }));
  const current = () => Object.fromEntries(FILTERS.map((key) => [key, form.elements[key].value]).filter(([, v]) => v !== "").map(([key, v]) => [key, key === "step" ? String(Number(v) - more()) : v]));
  let waiting = 0;
  form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => go(link(name, "rollouts", { ...current(), sort: query.sort, descending: query.descending }), true), 250); });
  const sorted = query.sort ?? "id";
  const head = el("div", { class: "head", role: "row" }, COLUMNS.map(([key, text]) => el("button", { type: "button", role: "columnheader", class: WORDY.has(key) ? "" : "right", "data-sort": key, "aria-sort": key === sorted ? (query.descending ? "descending" : "ascending") : "none",
    onclick: () => go(link(name, "rollouts", { ...current(), sort: key, descending: key === sorted && !query.descending ? "1" : "" })) }, text + (key === sorted ? (query.descending ? " ↓" : " ↑") : ""))));
  const space = el("div", { class: "space", role: "rowgroup" });
  const box = el("div", { class: "rows", tabindex: 0, role: "table", "aria-label": "rollouts" }, head, space);
  list.put(box, space);
  form.querySelector("#count").textContent = many(list.total, "rollout");
  const none = el("p", { class: "none soft", hidden: list.total > 0 }, Object.keys(current()).length ? ["No rollout fits these filters. ", el("a", { href: link(name, "rollouts") }, "Show all")] : "No rollout has ended yet.");
  box.append(none);
  return { nodes: [el("h1", {}, `${name}: rollouts`), form, box, el("p", { class: "soft" }, el("kbd", {}, "j"), " ", el("kbd", {}, "k"), " next, previous   ", el("kbd", {}, "Enter"), " open   ", el("kbd", {}, "/"), " search   ", el("kbd", {}, "?"), " all keys")],
    shown: () => list.draw(), keys: (key) => list.key(key, form), changed: () => list.renew().then(() => { const count = form.querySelector("#count"); if (count) count.textContent = many(list.total, "rollout"); none.hidden = list.total > 0; }) };
}

class VirtualRows {
  constructor(name, query) {
    Object.assign(this, { name, query, box: null, space: null, total: 0, at: -1, chunks: new Map(), made: new Map(), asked: 0, loading: 0 });
  }
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
  // Dragging the bar passes many pages: while some are loading no more are requested, and afterwards only those in sight.
  want(chunk) {
    if (this.loading >= AT_ONCE) return;
    this.loading++;
    const ended = () => { this.loading--; this.draw(); };
    this.load(chunk).then(ended, () => { this.loading--; });
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
    const tools = row.tools ? Object.entries(row.tools).map(([t, n]) => `${t} ${n}`).join(", ") : row.tool_calls === 0 ? "none" : "–";
    const cells = [`${row.id}`, placeOf(row), el("span", { title: `group ${row.grp}` }, row.input ?? row.grp), el("span", { class: outcomeClass(row) }, outcomeText(row)), number(row.reward), number(row.advantage), number(row.turns), number(row.sampled_tokens), number(row.logprob_min), small(row.gap_max), row.error ?? tools];
    const made = el("a", { class: `row${place === this.at ? " at" : ""}`, href: link(this.name, `rollout/${row.id}`), role: "row", tabindex: -1, "data-id": row.id }, cells.map((c, i) => (c instanceof Node ? c : el("span", { class: WORDY.has(COLUMNS[i][0]) ? "" : "num" }, c))));
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
