// @ts-check
// Runs over each other on any number of a step, their settings, and two sides input by input.
import { choice, el, filters, inputOf, link, many, notice, number, table, to } from "./dom.js";
import { RING, lineChart } from "./charts.js";
import { changeOf, inputsOf, isHeld, runList, sideOf } from "./source.js";
import { SHOWN, heldOut, namesOf, readRun, settingsTable, valuesOf } from "./run.js";

const OVERLAID = 8; // runs that are chosen at first at most two, and in all

// The inputs that both sides have, the ones that changed most first.
function paired(one, other) {
  const others = new Map(other.map((i) => [i.input_key, i]));
  const rows = one.filter((i) => others.has(i.input_key)).map((i) => { const second = others.get(i.input_key); return { input_key: i.input_key, text: i.text, first: i, second, change: i.reward === null || second.reward === null ? null : second.reward - i.reward }; });
  return rows.sort((x, y) => Math.abs(y.change ?? 0) - Math.abs(x.change ?? 0) || (x.input_key < y.input_key ? -1 : 1));
}

export async function comparePage(query, go) {
  const known = (await runList()).filter((r) => r.problem === null), named = (side) => side && sideOf(side).run;
  const asked = [...new Set([...(query.runs ? query.runs.split("/") : []), named(query.first), named(query.second)].filter(Boolean))];
  const chosen = (asked.length ? asked : known.slice(0, 2).map((r) => r.name)).filter((n) => known.some((r) => r.name === n)).slice(0, OVERLAID);
  const runs = await Promise.all(chosen.map(readRun));
  const sides = runs.flatMap((run) => [...new Set(run.steps.map((s) => s.phase))].map((p) => [`${run.name}@${p}`, `${run.name}, ${p}`]).concat(run.steps.filter((s) => s.step !== null).map((s) => [`${run.name}@${s.phase}:${s.step}`, `${run.name}, ${s.at}`]))).filter(([s]) => isHeld("inputs", sideOf(s).query));
  const whole = sides.map(([s]) => s).filter((s) => !s.includes(":", s.lastIndexOf("@")));
  const first = query.first || whole[0] || sides[0]?.[0], second = query.second || whole.findLast((s) => named(s) === named(first) && s !== first) || whole.at(-1);
  const here = (changed) => { const all = { runs: chosen.join("/"), first, second, metric: query.metric, flipped: query.flipped, ...changed }; return `#/compare?${new URLSearchParams(Object.entries(all).filter(([, v]) => v))}`; };
  const boxes = known.length > 1 ? el("details", { class: "card over", open: known.length <= 12 }, el("summary", {}, `${many(chosen.length, "run")} chosen of ${known.length}, at most ${OVERLAID}`), el("div", { class: "spaced" }, known.map((r) => el("label", { class: "box" }, el("input", { type: "checkbox", name: `run-${r.name}`, checked: chosen.includes(r.name), disabled: !chosen.includes(r.name) && chosen.length >= OVERLAID, onchange: (event) => go(here({ runs: (event.target.checked ? [...chosen, r.name] : chosen.filter((n) => n !== r.name)).join("/"), first: "", second: "" })) }), ` ${r.name}`)))) : null;
  const all = new Map(runs.map((run) => [run.name, valuesOf(run)]));
  const metrics = namesOf([...all.values()].flat());
  const metric = metrics.includes(query.metric) ? query.metric : "reward";
  const curves = runs.map((run, n) => ({ name: run.name, colour: RING[n % RING.length], points: all.get(run.name).map(([s, v]) => ({ x: s.number, y: v[metric] ?? null, href: run.listOf(s) })) }));
  const held = metric === "reward" && runs.length <= 3 ? runs.map((run, n) => ({ name: `${run.name}, held out`, kind: "held", colour: RING[n % RING.length], points: runs.length > 1 ? heldOut(run).map(({ x, y, href }) => ({ x, y, href })) : heldOut(run) })) : [];
  const over = metrics.length ? [filters(choice("metric", "number", metric, metrics.map((m) => [m, m]), (value) => go(here({ metric: value })))), lineChart(metric, [...curves, ...held], { height: 240, class: "over", join: true })] : null;
  const settings = runs.length > 1 ? [el("h2", {}, "Settings that differ"), settingsTable(chosen, runs.map((run) => run.config))] : null;
  const head = [el("h1", {}, "Compare"), boxes, over, settings];
  if (!first || !second) return [...head, notice("There is nothing to compare yet.")];
  const side = (key, value) => choice(key, key, value, sides, (chosen) => go(here({ [key]: chosen })));
  const [all_first, all_second, change] = await Promise.all([...[first, second].map((s) => inputsOf(sideOf(s).run, sideOf(s).query)), changeOf(first, second)]);
  const found = paired(all_first, all_second), solved = (r) => (r === null ? null : r >= 1);
  const better = found.filter((r) => r.change > 0).length, worse = found.filter((r) => r.change < 0).length;
  const turned = found.filter((r) => r.change !== null && solved(r.first.reward) !== solved(r.second.reward));
  const rows = (query.flipped ? turned : found).slice(0, SHOWN).map((r) => [inputOf(r), number(r.first.reward), number(r.second.reward), el("span", { class: r.change > 0 ? "good" : r.change < 0 ? "bad" : null }, r.change > 0 ? `+${number(r.change)}` : number(r.change)), number(r.first.tokens, 0), number(r.second.tokens, 0),
    [to(link(named(first), `rollout/${r.first.first}`), "first"), "  ", to(link(named(second), `rollout/${r.second.first}`), "second")]]);
  return [...head, el("h2", {}, "Input by input"), filters(side("first", first), side("second", second)),
    el("p", { id: "compared-counts" }, `${many(found.length, "input")} in both: `, el("span", { class: "good" }, `${better} better`), ", ", el("span", { class: "bad" }, `${worse} worse`), `. Only in the first: ${all_first.length - found.length}, only in the second: ${all_second.length - found.length}.`),
    notice(`Paired by input: ${change.text}`),
    el("p", {}, el("a", { href: here({ flipped: query.flipped ? "" : "1" }), id: "flipped" }, query.flipped ? "Show all inputs" : `Only the ${many(turned.length, "input")} that flipped between solved and not`)),
    table(["input", "#reward, first", "#reward, second", "#change", "#tokens, first", "#tokens, second", "rollouts"], rows, { id: "compared" })];
}
