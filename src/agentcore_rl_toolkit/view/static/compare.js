// @ts-check
// Runs over each other on any number of a step, their settings, and two sides input by input.
import { el, link, many, number, table } from "./dom.js";
import { lineChart } from "./charts.js";
import { compareOf, leftOut, runList } from "./source.js";
import { heldOut, readRun, settingsTable } from "./run.js";

const OVERLAID = 8; // runs that are chosen at first at most two, and in all
const plain = (facts, prefix = "") => Object.entries(facts).flatMap(([k, v]) => (typeof v === "number" ? [[prefix + k, v]] : v && typeof v === "object" && !Array.isArray(v) ? plain(v, `${prefix}${k}/`) : []));

export async function comparePage(query, go) {
  const known = (await runList()).filter((r) => r.problem === null), named = (side) => side?.slice(0, side.lastIndexOf("@"));
  const asked = [...new Set([...(query.runs ? query.runs.split(",") : []), named(query.first), named(query.second)].filter(Boolean))];
  const chosen = (asked.length ? asked : known.slice(0, 2).map((r) => r.name)).filter((n) => known.some((r) => r.name === n)).slice(0, OVERLAID);
  const runs = await Promise.all(chosen.map(readRun));
  const sides = runs.flatMap((run) => [...new Set(run.steps.map((s) => s.phase))].map((p) => [`${run.name}@${p}`, `${run.name}, ${p}`]).concat(run.steps.filter((s) => s.step !== null).map((s) => [`${run.name}@${s.phase}:${s.step}`, `${run.name}, ${s.at}`])));
  const whole = sides.map(([s]) => s).filter((s) => !s.includes(":", s.lastIndexOf("@")));
  const first = query.first || whole[0] || sides[0]?.[0], second = query.second || whole.findLast((s) => named(s) === named(first) && s !== first) || whole.at(-1);
  const here = (changed) => { const all = { runs: chosen.join(","), first, second, metric: query.metric, flipped: query.flipped, ...changed }; return `#/compare?${new URLSearchParams(Object.entries(all).filter(([, v]) => v))}`; };
  const boxes = known.length > 1 ? el("details", { class: "card", open: known.length <= 12 }, el("summary", {}, `${many(chosen.length, "run")} chosen of ${known.length}, at most ${OVERLAID}`), el("div", { class: "spaced" }, known.map((r) => el("label", {}, el("input", { type: "checkbox", name: `run-${r.name}`, checked: chosen.includes(r.name), disabled: !chosen.includes(r.name) && chosen.length >= OVERLAID, onchange: (event) => go(here({ runs: (event.target.checked ? [...chosen, r.name] : chosen.filter((n) => n !== r.name)).join(","), first: "", second: "" })) }), ` ${r.name}`)))) : null;
  const valuesOf = (run) => run.trained.map((s) => [s, Object.fromEntries([...plain(run.events.get(s.step) ?? {}), ...plain(s)])]);
  const all = new Map(runs.map((run) => [run.name, valuesOf(run)]));
  const metrics = [...new Set([...all.values()].flat().flatMap(([, v]) => Object.keys(v)))].filter((m) => !["step", "number"].includes(m)).sort();
  const metric = metrics.includes(query.metric) ? query.metric : "reward";
  const chooser = el("select", { name: "metric", onchange: (event) => go(here({ metric: event.target.value })) }, metrics.map((m) => el("option", { value: m }, m)));
  chooser.value = metric;
  const curves = runs.map((run) => ({ name: run.name, points: all.get(run.name).map(([s, v]) => ({ x: s.number, y: v[metric] ?? null, href: run.listOf(s) })) }));
  const held = metric === "reward" && runs.length <= 3 ? runs.map((run) => ({ name: `${run.name}, held out`, kind: runs.length === 1 ? "held" : undefined, points: heldOut(run) })) : [];
  const over = metrics.length ? [el("form", { class: "filters", onsubmit: (event) => event.preventDefault() }, el("label", {}, "number of a step", chooser)), lineChart(metric, [...curves, ...held], { height: 240, class: "over", join: true })] : null;
  const settings = runs.length > 1 ? [el("h2", {}, "Settings that differ"), settingsTable(chosen, runs.map((run) => run.config))] : null;
  const head = [el("h1", {}, "Compare"), leftOut ? el("p", { class: "notice" }, leftOut) : null, boxes, over, settings];
  if (!first || !second) return [...head, el("p", { class: "notice" }, "There is nothing to compare yet.")];
  const choice = (key, value) => { const made = el("select", { name: key, onchange: (event) => go(here({ [key]: event.target.value })) }, sides.map(([s, label]) => el("option", { value: s }, label))); made.value = value; return el("label", {}, key, made); };
  const found = await compareOf(first, second), solved = (r) => (r === null ? null : r >= 1);
  const better = found.rows.filter((r) => r.change > 0).length, worse = found.rows.filter((r) => r.change < 0).length;
  const turned = found.rows.filter((r) => r.change !== null && solved(r.first.reward) !== solved(r.second.reward));
  const rows = (query.flipped ? turned : found.rows).map((r) => [el("span", { class: "input", title: r.text ?? r.input_key }, r.text ?? r.input_key), number(r.first.reward), number(r.second.reward), el("span", { class: r.change > 0 ? "good" : r.change < 0 ? "bad" : null }, r.change > 0 ? `+${number(r.change)}` : number(r.change)), number(r.first.tokens, 0), number(r.second.tokens, 0),
    [el("a", { href: link(named(first), `rollout/${r.first.first}`) }, "first"), "  ", el("a", { href: link(named(second), `rollout/${r.second.first}`) }, "second")]]);
  return [...head, el("h2", {}, "Input by input"), el("form", { class: "filters", onsubmit: (event) => event.preventDefault() }, choice("first", first), choice("second", second)),
    el("p", { id: "compared-counts" }, `${many(found.inputs, "input")} in both: `, el("span", { class: "good" }, `${better} better`), ", ", el("span", { class: "bad" }, `${worse} worse`), `. Only in the first: ${found.only_first}, only in the second: ${found.only_second}.`),
    found.change ? el("p", { class: "notice" }, `Paired by input: ${found.change.text}`) : null,
    el("p", {}, el("a", { href: here({ flipped: query.flipped ? "" : "1" }), id: "flipped" }, query.flipped ? "Show all inputs" : `Only the ${many(turned.length, "input")} that flipped between solved and not`)),
    table(["input", "#reward, first", "#reward, second", "#change", "#tokens, first", "#tokens, second", "rollouts"], rows, { id: "compared" })];
}
