// @ts-check
// The tokens of a rollout, as the trainer sees them: coloured by a number, reached by text, keys and address.
import { el, hint, link, many, number, patternOf, readdress, soft, table } from "./dom.js";
import { decoded } from "./source.js";

const LIMITS = { logprob: [0.105, 0.69, 2.3, 4.6, 6.9], gap: [0.001, 0.01, 0.05, 0.2, 1], entropy: [0.1, 0.5, 1, 2, 3], ratio: [0.01, 0.05, 0.2, 0.5, 1], advantage: [0.01, 0.5, 1] };
const WORDS = { advantage: "what the training makes likelier (green) or less likely (red)", ratio: "how the training changed its probability", logprob: "how unlikely the engine found it", entropy: "how uncertain the choice was", gap: "engine and trainer differ", mask: "trained or not" };
const MOST = 6000; // tokens shown at once; more on request

export function tokenView(name, row, query, go) {
  if (!row.sequences) return [el("p", { class: "soft" }, row.detail?.calls?.length ? "No tokens: they were not kept." : "No tokens: the rollout made no model call through the gateway.")];
  const sequences = row.sequences.map(decoded);
  const { texts } = row;
  const colour = query.colour ?? "logprob", here = (changed) => link(name, `rollout/${row.id}`, { ...query, view: "tokens", ...changed });
  const value = (s, i) => valueOf(s, i, colour, row);
  const buttons = Object.keys(WORDS).map((c) => el("button", { type: "button", "data-colour": c, "aria-pressed": c === colour ? "true" : "false", title: WORDS[c], onclick: () => go(here({ colour: c }), true) }, c));
  const known = sequences.some((s) => s.ids.some((_, i) => s.mask[i] && !Number.isNaN(value(s, i) ?? NaN)));
  const bounds = colour === "logprob" ? LIMITS.logprob.map((l) => `< ${Number((Math.exp(-l) * 100).toPrecision(1))} %`) : colour === "advantage" ? [] : (LIMITS[colour] ?? []).map((l) => `≥ ${l}`);
  const scale = colour === "mask" ? null : known ? el("span", { class: "scale" }, WORDS[colour], bounds.map((b, n) => el("i", { class: `c${n + 1}` }, b))) : el("span", { class: "soft", id: "unknown" }, absent(row, colour));
  const lowest = sequences.flatMap((s, n) => [...s.ids.keys()].filter((i) => s.mask[i] && s.logprobs && !Number.isNaN(s.logprobs[i])).map((i) => ({ n, i, lp: s.logprobs[i] }))).reduce((a, b) => (a && a.lp <= b.lp ? a : b), null);
  const said = el("span", { id: "picked", class: "soft", "aria-live": "polite" });
  const pick = (n, i, block) => {
    const found = document.querySelector(`[data-at="${n}:${i}"]`);
    if (!found) return;
    document.querySelectorAll(".picked").forEach((e) => e.classList.remove("picked"));
    found.classList.add("picked");
    found.scrollIntoView({ block });
    said.textContent = numbersOf(sequences[n], i, texts, row).replaceAll("\n", "   ");
    readdress(here({ token: `${n}:${i}`, least: "" })); // a link to this token
  };
  const least = lowest ? el("button", { type: "button", id: "least", onclick: () => pick(lowest.n, lowest.i, "center") }, "least likely token") : null;
  const copy = el("button", { type: "button", onclick: () => navigator.clipboard.writeText(JSON.stringify(sequences.map((s) => [...s.ids]))) }, "copy ids");
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
    const heat = (i) => (!s.mask[i] ? "" : colour === "mask" ? " m1" : colour === "advantage" ? sign(value(s, i)) : ` c${level(value(s, i), LIMITS[colour])}`);
    const add = (from) => {
      const end = Math.min(from + MOST, s.ids.length), marked = find(s, texts, query.find, from, end);
      for (let i = from; i < end; i++) {
        const span = document.createElement("span");
        span.className = (s.mask[i] ? "trained" : "context") + heat(i) + (marked.has(i) ? " found" : "");
        span.dataset.i = i;
        span.dataset.at = `${n}:${i}`;
        span.textContent = texts[s.ids[i]] ?? `[${s.ids[i]}]`;
        box.append(span);
      }
      if (end < s.ids.length) { const more = el("button", { type: "button", onclick: () => { more.remove(); add(end); } }, many(s.ids.length - end, "more token")); box.append(more); }
    };
    add(0);
    hint(box, ({ target }) => (target.dataset?.i === undefined ? null : numbersOf(s, Number(target.dataset.i), texts, row)));
    box.addEventListener("click", (event) => { if (event.target.dataset?.i) pick(n, Number(event.target.dataset.i), "nearest"); });
    const title = sequences.length > 1 ? `Sequence ${n + 1} of ${sequences.length}` : "One sequence";
    const updates = s.updates ? `; the trainer's numbers come after ${many(s.updates, "update")} of this step` : "";
    const counts = `  ${s.ids.length} tokens, ${trained} trained, ${many(s.turn_ids.length, "turn")}${shared}${updates}  `;
    return [el("p", {}, el("b", {}, title), soft(counts), why ? el("span", { class: "warn" }, `branch: ${why}  `) : null, s.side_call ? el("span", { class: "warn" }, `side call, not trained: ${s.side_call}`) : null), box];
  });
  /** @type {any} */
  const nodes = [branchesOf(sequences, row.detail?.calls), el("div", { class: "tools" }, buttons, scale, least, copy, said), shown];
  nodes.start = () => { if (query.token) { const [n, i] = query.token.split(":").map(Number); pick(n, i, "center"); } else document.querySelector(".found")?.scrollIntoView({ block: "center" }); };
  return nodes;
}

// The tokens that hold a text, also one that lies over several of them.
function find(s, texts, wanted, from, end) {
  const found = new Set(), starts = [];
  if (!wanted) return found;
  let text = "";
  for (let i = from; i < end; i++) { starts.push(text.length); text += texts[s.ids[i]] ?? ""; }
  for (const { index: at, 0: part } of text.matchAll(patternOf(wanted))) starts.forEach((start, i) => { if (start < at + part.length && (starts[i + 1] ?? text.length) > at) found.add(from + i); });
  return found;
}

// Why there is nothing to colour by.
function absent(row, colour) {
  if (!row.detail?.calls?.length) return "The agent made no model call in this rollout.";
  if (colour === "logprob") return "The engine gave no logprobs for this rollout.";
  const what = { gap: "The trainer's logprobs are not known", ratio: "The trainer's logprobs are not known", advantage: "The advantage is not known" }[colour] ?? "The entropy is not known";
  if (row.phase !== "train") return `${what}: this rollout was not for training.`;
  if (row.mask_reason) return `${what}: this rollout was not trained (${row.mask_reason}).`;
  if (row.advantage === 0) return `${what}: its advantage is 0, and trainers leave such rollouts out.`;
  return `${what}: this trainer gives none, or not yet.`;
}

const level = (value, limits) => (value === null || value === undefined || Number.isNaN(value) ? 0 : limits.filter((l) => value >= l).length);
const sign = (value) => (value === null || Number.isNaN(value) || value === 0 ? "" : ` ${value > 0 ? "p" : "n"}${level(Math.abs(value), LIMITS.advantage)}`);

function valueOf(s, i, colour, row) {
  if (colour === "logprob") return s.logprobs ? -s.logprobs[i] : null;
  if (colour === "entropy") return s.entropies ? s.entropies[i] : null;
  if (colour === "advantage") return s.advantages ? s.advantages[i] : row.advantage;
  if (!s.logprobs || !s.trainer_logprobs) return null;
  const apart = s.trainer_logprobs[i] - s.logprobs[i];
  return colour === "ratio" ? Math.abs(Math.exp(apart) - 1) : Math.abs(apart);
}

function numbersOf(s, i, texts, row) {
  const lp = s.logprobs?.[i] ?? NaN, again = s.trainer_logprobs?.[i] ?? NaN;
  const lines = [`${JSON.stringify(texts[s.ids[i]] ?? null)}  id ${s.ids[i]}  at ${i}`, s.mask[i] ? "trained" : "context, not trained"];
  if (s.mask[i]) lines.push(`advantage ${number(s.advantages?.[i] ?? row.advantage)}`, `sampler ${number(lp, 4)}${Number.isNaN(lp) ? "" : ` (${(Math.exp(lp) * 100).toPrecision(3)} %)`}`, `trainer ${number(again, 4)}`, `gap ${number(Math.abs(again - lp))}`, `ratio ${number(Math.exp(again - lp), 4)}`, `entropy ${number(s.entropies?.[i] ?? NaN, 3)}`, `weights ${number(s.versions?.[i])}`);
  return lines.join("\n");
}

// The sequences: their turns, the turn that each continues, and why it left the sequence before.
function branchesOf(sequences, calls) {
  if (sequences.length < 2) return null;
  const began = new Map((calls ?? []).map((c) => [c.turn_id, c.started_s ?? 0]));
  const turns = [...new Set(sequences.flatMap((s) => [...s.context_turn_ids, ...s.turn_ids]))].sort((a, b) => (began.get(a) ?? 0) - (began.get(b) ?? 0));
  const places = (ids) => ids.map((t) => turns.indexOf(t) + 1).join(", ");
  const why = (s, n) => s.side_call ?? (n === 0 ? "the first" : s.branch_reason ?? "separate").replaceAll("_", " ");
  const rows = sequences.map((s, n) => [n + 1, places(s.turn_ids), places(s.context_turn_ids.slice(-1)) || "–", s.mask.reduce((a, b) => a + b, 0), why(s, n)]);
  return el("div", { id: "branches" }, el("h2", {}, "Branches"), table(["sequence", "turns", "continues turn", "#tokens trained", "why"], rows));
}
