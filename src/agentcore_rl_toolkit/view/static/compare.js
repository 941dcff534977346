import { lineChart } from "./charts.js";
import { el, link, many, number } from "./dom.js";
import { compareOf, overview, runList } from "./source.js";

export async function comparePage(query, go) {
  const runs = (await runList()).filter((r) => r.problem === null);
  const sides = [], labels = {}, curves = {};
  for (const run of runs.slice(0, 50)) {
    const whole = await overview(run.name);
    curves[run.name] = whole.steps.filter((s) => s.phase === "train" && s.step !== null).map((s) => ({ x: s.step + whole.counted_from, y: s.reward, href: link(run.name, "rollouts", { phase: "train", step: s.step, sort: "reward" }) }));
    for (const step of whole.steps) {
      sides.push(`${run.name}@${step.phase}${step.step === null ? "" : `:${step.step}`}`);
      labels[sides.at(-1)] = `${run.name}, ${step.at}`;
    }
  }
  const phases = sides.filter((s) => !s.includes(":"));
  const first = query.first ?? phases[0] ?? sides[0], second = query.second ?? phases[1] ?? sides.at(-1);
  const choice = (key, value) => { const made = el("select", { name: key, onchange: (event) => go(`#/compare?${new URLSearchParams({ first, second, [key]: event.target.value })}`) }, sides.map((s) => el("option", { value: s }, labels[s]))); made.value = value ?? ""; return el("label", {}, key, made); };
  const head = [el("h1", {}, "Compare"), el("form", { class: "filters" }, choice("first", first), choice("second", second))];
  if (!first || !second) return [...head, el("p", { class: "notice" }, "There is nothing to compare yet.")];
  const found = await compareOf(first, second);
  const better = found.rows.filter((r) => r.change > 0).length, worse = found.rows.filter((r) => r.change < 0).length;
  const known = found.rows.filter((r) => r.change !== null);
  const mean = known.length ? known.reduce((n, r) => n + r.change, 0) / known.length : null;
  const name = (side) => side.slice(0, side.lastIndexOf("@"));
  const table = el("table", { id: "compared" }, el("thead", {}, el("tr", {}, ["input", "reward, first", "reward, second", "change", "tokens, first", "tokens, second", "rollouts"].map((t, i) => el("th", { class: i && i < 6 ? "num" : "" }, t)))),
    el("tbody", {}, found.rows.map((r) => el("tr", {}, el("td", { class: "input", title: r.text ?? r.input_key }, r.text ?? r.input_key), [number(r.first.reward), number(r.second.reward)].map((v) => el("td", { class: "num" }, v)), el("td", { class: `num ${r.change > 0 ? "good" : r.change < 0 ? "bad" : ""}` }, r.change > 0 ? `+${number(r.change)}` : number(r.change)), [number(r.first.tokens, 0), number(r.second.tokens, 0)].map((v) => el("td", { class: "num" }, v)),
      el("td", {}, el("a", { href: link(name(first), `rollout/${r.first.first}`) }, "first"), "  ", el("a", { href: link(name(second), `rollout/${r.second.first}`) }, "second"))))));
  const two = [...new Set([name(first), name(second)])];
  const over = two.length === 2 ? lineChart("Reward by step", two.map((run, i) => ({ name: run, kind: i ? "other" : undefined, points: curves[run] ?? [] })), { from: 0, to: 1 }) : null;
  if (over) over.classList.add("over");
  return [...head, over, el("p", {}, `${many(found.inputs, "input")} in both: `, el("span", { class: "good" }, `${better} better`), ", ", el("span", { class: "bad" }, `${worse} worse`), `, mean change ${number(mean)}. Only in the first: ${found.only_first}, only in the second: ${found.only_second}.`), el("div", { class: "card" }, table)];
}
