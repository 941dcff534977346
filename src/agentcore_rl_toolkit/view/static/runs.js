// @ts-check
// The list of runs: status, model, data, time, reward with its interval; sorted and searched here.
import { el, filters, link, notice, number, onTyped, seconds, sortBy, table, to } from "./dom.js";
import { sparkline } from "./charts.js";
import { exported, runList } from "./source.js";

const when = (s) => (s === null || s === undefined ? "–" : new Date(s * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }));
export const statusOf = (status) => el("span", { class: `status ${String(status).split(/[: ]/)[0]}`, title: status }, String(status).split(":")[0]);
const rewardOf = ({ reward, interval }) => el("span", { title: interval ? `95 % interval over inputs: ${interval.map((v) => number(v)).join(" to ")}` : null }, number(reward), interval ? el("span", { class: "soft width" }, ` ± ${number((interval[1] - interval[0]) / 2, 2)}`) : null);
// Head, the value to sort by, and the cell.
/** @type {[string, ((run: any) => any) | null, (run: any) => any][]} */
const RUN_COLUMNS = [
  ["run", (r) => r.name, (r) => el("a", { href: link(r.name), title: r.path }, r.name)],
  ["status", (r) => r.status, (r) => statusOf(r.status)],
  ["#reward", (r) => r.reward, rewardOf],
  ["by step", null, (r) => (r.problem ? el("span", { class: "warn" }, r.problem) : sparkline(r.rewards ?? [], `reward of ${r.name} by step`))],
  ["model", (r) => r.model, (r) => r.model ?? "–"],
  ["data", (r) => r.data, (r) => r.data ?? "–"],
  ["#steps", (r) => r.steps, (r) => number(r.steps)],
  ["#rollouts", (r) => r.rollouts, (r) => number(r.rollouts)],
  ["#time", (r) => (r.last_s ?? 0) - (r.first_s ?? 0), (r) => (r.first_s ? seconds(r.last_s - r.first_s) : "–")],
  ["last rollout", (r) => r.last_s, (r) => when(r.last_s)],
];

export async function runsPage(query, go) {
  const runs = await runList();
  if (!runs.length) return [el("h1", {}, "Runs"), notice("There is no run in this folder yet. ", el("code", {}, "agentcore-rl quickstart"), " makes one; it shows up here by itself.")];
  const words = (query.text ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const fit = (r) => words.every((w) => [r.name, r.model, r.data, r.status, r.problem].some((v) => String(v ?? "").toLowerCase().includes(w)));
  const shown = runs.filter(fit), by = RUN_COLUMNS.find(([name]) => name.replace("#", "") === query.sort);
  if (by?.[1]) sortBy(shown, by[1], query.descending);
  const address = (changed) => `#/?${new URLSearchParams(Object.entries({ ...query, ...changed }).filter(([, v]) => v))}`;
  const search = el("input", { type: "search", name: "text", value: query.text ?? "", placeholder: "name, model, data, status", "aria-label": "search the runs" });
  onTyped(search, () => go(address({ text: search.value }), true));
  const made = table(RUN_COLUMNS.map(([name]) => name), shown.map((r) => RUN_COLUMNS.map(([, , cell]) => cell(r))), { id: "runs" });
  made.querySelectorAll("th").forEach((head, i) => {
    const [name, value] = RUN_COLUMNS[i], plain = name.replace("#", "");
    if (!value) return;
    const on = query.sort === plain, next = on && !query.descending ? "1" : "";
    head.setAttribute("aria-sort", on ? (query.descending ? "descending" : "ascending") : "none");
    head.replaceChildren(to(address({ sort: plain, descending: next }), plain + (on ? (query.descending ? " ↓" : " ↑") : "")));
  });
  return [el("h1", {}, "Runs"), filters(el("label", {}, "search", search), el("span", { id: "count", class: "soft" }, `${shown.length} of ${runs.length}`), exported ? null : to("#/compare", "Compare runs, steps and evaluations")), made,
    el("p", { class: "soft" }, "Rewards are means over inputs of the last training step or evaluation, ± half the 95 % interval.")];
}
