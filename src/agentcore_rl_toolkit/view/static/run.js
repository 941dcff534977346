import { el, link, many, number, placeOf, small } from "./dom.js";
import { lineChart, sparkline, stackedChart } from "./charts.js";
import { exported, overview, runList } from "./source.js";

export async function runsPage() {
  const runs = await runList();
  const when = (s) => (s === null || s === undefined ? "–" : new Date(s * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }));
  const rows = runs.map((run) => el("tr", {}, el("td", {}, el("a", { href: link(run.name) }, run.name)), el("td", { class: "num" }, number(run.rollouts)), el("td", { class: "num" }, number(run.steps)), el("td", { class: "num" }, number(run.rewards?.at(-1))),
    el("td", {}, sparkline(run.rewards ?? [], `reward of ${run.name} by step`)), el("td", {}, run.problem ? el("span", { class: "warn" }, run.problem) : when(run.last_s))));
  if (!rows.length) return [el("h1", {}, "Runs"), el("p", { class: "notice" }, "There is no run in this folder yet. ", el("code", {}, "agentcore-rl quickstart"), " makes one; it shows up here by itself.")];
  const compare = runs.length && !exported ? el("p", {}, el("a", { href: "#/compare" }, "Compare two runs or two steps")) : null;
  return [el("h1", {}, "Runs"), el("div", { class: "card" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "run"), ["rollouts", "steps", "reward, last step"].map((t) => el("th", { class: "num" }, t)), el("th", {}, "reward by step"), el("th", {}, "last rollout"))), el("tbody", {}, rows))), compare];
}

const numbersIn = (facts, prefix = "") => Object.entries(facts).flatMap(([key, value]) => typeof value === "number" ? [[prefix + key, value]] : value && typeof value === "object" && !Array.isArray(value) ? numbersIn(value, `${prefix}${key}/`) : []);

// All numbers of the steps by their names in metrics.jsonl. The charts are drawn when the section is opened.
function everyNumber(trained, events, shown) {
  const rows = trained.map((s) => [shown(s), Object.fromEntries(numbersIn(events.get(s.step) ?? {}))]);
  const names = [...new Set(rows.flatMap(([, numbers]) => Object.keys(numbers)))].filter((name) => name !== "step").sort();
  if (!names.length) return null;
  const filter = el("input", { type: "search", placeholder: "filter by name", "aria-label": "filter the numbers by name" }), grid = el("div", { class: "grid" });
  const draw = () => grid.replaceChildren(...names.filter((name) => name.includes(filter.value)).map((name) => lineChart(name, [{ name, points: rows.map(([x, numbers]) => ({ x, y: numbers[name] ?? null })) }])).filter(Boolean));
  const section = el("details", { class: "card", id: "numbers" }, el("summary", {}, `All ${names.length} numbers of a step`), el("p", {}, filter), grid);
  filter.addEventListener("input", draw);
  section.addEventListener("toggle", () => section.open && draw());
  return section;
}

export async function runPage(name) {
  const run = await overview(name);
  const trained = run.steps.filter((s) => s.phase === "train" && s.step !== null);
  const others = run.steps.filter((s) => !(s.phase === "train" && s.step !== null));
  const from = run.counted_from, shown = (s) => s.step + from; // people count training steps from 1
  const events = new Map(run.metrics.filter((e) => e.event === "step" && Number.isInteger(e.step)).map((e) => [e.step, e]));
  const last = trained.at(-1) ?? run.steps.at(-1);
  const total = run.steps.reduce((n, s) => n + s.rollouts, 0);
  const sum = (key) => run.steps.some((s) => s[key] !== null) ? run.steps.reduce((n, s) => n + (s[key] ?? 0), 0) : null;
  const facts = [["rollouts", number(total)], ["steps", number(trained.length)], ["reward, last step", number(last?.reward)], ["usable, last step", last ? `${last.usable} of ${last.rollouts}` : "–"], ["tokens sampled", number(sum("sampled_tokens"))], ["tokens that could be trained", number(sum("trained_tokens"))]];
  const point = (key, of = (s) => s[key]) => trained.map((s) => ({ x: shown(s), y: of(s), href: link(name, "rollouts", { phase: "train", step: s.step, sort: "reward" }) }));
  const fromEvent = (of) => trained.map((s) => { const e = events.get(s.step); return { x: shown(s), y: e ? of(e) : null }; });
  const own = [...new Set(run.metrics.flatMap((e) => Object.keys(e.metrics ?? {})))].sort();
  const eventOf = (s) => s.phase === "train" && s.step !== null ? events.get(s.step) : run.metrics.findLast((e) => e.event === "evaluated" && [undefined, s.phase, `version-${s.step}`, `step-${s.step}`].includes(e.when));
  // The evaluation of version k lies after step k; those before and after the training at its ends.
  const heldAt = (s) => (s.phase === "before" ? 0 : s.phase === "after" ? (trained.length ? shown(trained.at(-1)) : 1) : s.phase === "eval" && s.step !== null ? s.step : null);
  const held = others.filter((s) => heldAt(s) !== null).map((s) => ({ x: heldAt(s), y: s.reward, note: `${s.at}, ${s.scored} scored`, href: link(name, "rollouts", { phase: s.phase, step: s.step, sort: "reward" }) })).sort((a, b) => a.x - b.x);
  const banded = trained.map((s) => ({ x: shown(s), y: s.reward, low: s.reward === null ? null : Math.max(s.reward - s.reward_spread, Math.min(0, s.reward_min ?? 0)), high: s.reward === null ? null : Math.min(s.reward + s.reward_spread, Math.max(1, s.reward_max ?? 1)), note: `${s.scored} scored, spread ${number(s.reward_spread)}`, href: link(name, "rollouts", { phase: "train", step: s.step, sort: "reward" }) }));
  const same = trained.every((s) => s.reward === s.reward_ok);
  const waiting = (e) => e.rollout_s !== undefined && e.train_s !== undefined && e.rollout_s + e.train_s > 0 ? e.rollout_s / (e.rollout_s + e.train_s) : null;
  const charts = [
    lineChart("Reward, with its spread over rollouts", [{ name: "reward", points: banded }, ...(same ? [] : [{ name: "of those that ended ok", kind: "other", points: point("reward_ok") }]), { name: "held out", kind: "held", points: trained.length ? held : [] }], { from: 0, to: 1 }),
    stackedChart("Outcomes and causes", trained, from),
    ...own.map((key) => lineChart(`${key}, mean`, [{ name: key, points: fromEvent((e) => e.metrics?.[key] ?? null) }])),
    lineChart("Tokens sampled, a rollout", [{ name: "mean", points: point("tokens_mean") }, { name: "longest", kind: "other", points: point("tokens_max") }], { from: 0 }),
    lineChart("Gap of sampler's and trainer's logprobs, nats", [{ name: "largest", points: point("gap_max") }, { name: "mean", kind: "other", points: point("gap_mean") }], { from: 0 }),
    lineChart("Entropy at trained tokens, nats", [{ name: "mean", points: point("entropy") }], { from: 0 }),
    lineChart("Weight versions behind", [{ name: "mean", points: point("staleness") }, { name: "most", kind: "other", points: point("staleness_max") }], { from: 0, to: 1 }),
    lineChart("Share of the time the trainer waits", [{ name: "waiting for rollouts", points: fromEvent(waiting) }], { from: 0, to: 1 }),
    lineChart("Seconds a rollout", [{ name: "mean", points: point("elapsed_s") }, { name: "longest", kind: "other", points: point("elapsed_max_s") }], { from: 0 }),
    lineChart("Turns and tool calls a rollout", [{ name: "turns", points: point("turns") }, { name: "tool calls", kind: "other", points: point("tool_calls") }], { from: 0 }),
    lineChart("Loss", [{ name: "loss", points: fromEvent((e) => e.loss ?? null) }]),
    lineChart("KL divergence of the policy in training, nats", ["sampler", "start", "old", "reference", "teacher"].map((from) => ({ name: `from the ${from}`, kind: from === "sampler" ? undefined : "other", points: fromEvent((e) => e[`kl_${from}`] ?? null) }))),
    lineChart("Tokens that the clip holds", [{ name: "share", points: fromEvent((e) => e.clip_fraction ?? null) }], { from: 0 }),
  ].filter(Boolean);
  const table = el("table", {}, el("thead", {}, el("tr", {}, ["", "rollouts", "reward", "of ok", "usable", "tokens a rollout", "largest gap", ...own, "outcomes"].map((t, i) => el("th", { class: i && i < 7 + own.length ? "num" : "" }, t)))),
    el("tbody", {}, run.steps.map((s) => el("tr", {}, el("td", {}, el("a", { href: link(name, "rollouts", { phase: s.phase, step: s.step, sort: "reward" }) }, placeOf(s))), [number(s.rollouts), number(s.reward), number(s.reward_ok), number(s.usable), number(s.tokens_mean, 0), small(s.gap_max), ...own.map((key) => number(eventOf(s)?.metrics?.[key]))].map((v) => el("td", { class: "num" }, v)), el("td", {}, Object.entries(s.outcomes).map(([o, n]) => `${n} ${o}`).join(", "))))));
  const lost = Object.entries(run.not_kept).map(([why, n]) => el("p", { class: "notice" }, `${many(n, "rollout")} not in this run: ${why === "not_kept_full" ? "they came faster than they could be written" : "they could not be written"}.`));
  const jobs = [...new Map(run.metrics.filter((e) => e.event === "job").map((e) => [e.job, e])).values()].map((e) => el("tr", {}, el("td", {}, e.job), el("td", {}, e.status), el("td", {}, JSON.stringify({ ...e.ProgressInfo, ...e.RolloutInfo, ...e.BillableTokenUsage, ...e.EvaluationMetrics }))));
  if (!total && jobs.length) return [el("h1", {}, name), el("p", { class: "notice" }, "SageMaker's jobs, as they were last seen. Their rollouts are in MLflow."), el("div", { class: "card" }, el("table", {}, el("tbody", {}, jobs))), el("h2", {}, "Configuration"), el("details", { class: "card" }, el("summary", {}, "config.json"), el("pre", {}, JSON.stringify(run.config, null, 2)))];
  if (!total) return [el("h1", {}, name), lost, el("p", { class: "notice" }, "No rollout has ended yet. Each one shows up here when it has. Where they wait: ", el("code", {}, "agentcore-rl runs show --in-flight")), el("h2", {}, "Configuration"), el("details", { class: "card" }, el("summary", {}, "config.json"), el("pre", {}, JSON.stringify(run.config, null, 2)))];
  const change = run.summary.held_out_change ? el("p", { class: "notice" }, `Verdict: ${run.summary.held_out_change.text}`) : null;
  return [el("h1", {}, name), lost, change, el("div", { class: "facts" }, facts.map(([n, v]) => el("div", { class: "card fact" }, el("span", {}, n), el("b", {}, v)))),
    el("div", { class: "grid", id: "charts" }, charts), everyNumber(trained, events, shown), el("h2", {}, trained.length && others.length ? "Steps and evaluations" : "Steps"), el("div", { class: "card" }, table),
    el("h2", {}, "Configuration"), el("details", { class: "card" }, el("summary", {}, "config.json"), el("pre", {}, JSON.stringify(run.config, null, 2)))];
}
