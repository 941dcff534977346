// @ts-check
// One run: is it learning, and if not, why?
import { el, link, many, number, percent, seconds, section, small, table } from "./dom.js";
import { lineChart, sparkline, stackedChart } from "./charts.js";
import { inputsOf, overview } from "./source.js";
import { statusOf } from "./runs.js";

const numbersIn = (facts, prefix = "") => Object.entries(facts).flatMap(([key, value]) => (typeof value === "number" ? [[prefix + key, value]] : value && typeof value === "object" && !Array.isArray(value) ? numbersIn(value, `${prefix}${key}/`) : []));
const STOPS = { stop: "--good", tool_calls: "--cyan", length: "--warn", turns: "--violet", context: "--bad" };

// All numbers of the steps by their names in metrics.jsonl. The charts are drawn when the section is opened.
function everyNumber(run, mount) {
  const rows = run.trained.map((s) => [s.number, Object.fromEntries(numbersIn(run.events.get(s.step) ?? {}))]);
  const names = [...new Set(rows.flatMap(([, numbers]) => Object.keys(numbers)))].filter((name) => name !== "step").sort();
  if (!names.length) return null;
  const filter = el("input", { type: "search", placeholder: "filter by name", "aria-label": "filter the numbers by name" });
  const smooth = el("input", { type: "range", min: 1, max: 20, value: 1, "aria-label": "mean over steps" }), said = el("span", {}, "every step");
  const grid = el("div", { class: "grid" });
  const mean = (points, wide) => points.map((p, i) => { const near = points.slice(Math.max(0, i - wide + 1), i + 1).map((q) => q.y).filter((y) => y !== null); return p.y === null ? p : { ...p, y: near.reduce((a, b) => a + b, 0) / near.length }; });
  const draw = () => {
    const wide = Number(smooth.value);
    said.textContent = wide === 1 ? "every step" : `mean of ${wide} steps`;
    grid.replaceChildren(...names.filter((name) => name.includes(filter.value)).map((name) => lineChart(name, [{ name, points: mean(rows.map(([x, numbers]) => ({ x, y: numbers[name] ?? null })), wide) }])).filter(Boolean));
    mount(grid);
  };
  const made = el("details", { class: "card", id: "numbers" }, el("summary", {}, `All ${names.length} numbers of a step`), el("p", { class: "tools" }, filter, el("label", { class: "soft" }, "smoothing ", smooth), " ", said), grid);
  for (const input of [filter, smooth]) input.addEventListener("input", draw);
  made.addEventListener("toggle", () => made.open && draw());
  return made;
}

function findings(run) {
  const total = run.steps.reduce((n, s) => n + s.rollouts, 0);
  const rows = run.diagnosis.map((f) => el("div", { class: "finding", "data-name": f.name }, el("b", {}, f.text), " ", f.advice.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part)), " ", Object.keys(f.query).length ? el("a", { href: link(run.name, "rollouts", shownQuery(f.query)) }, "These rollouts →") : null));
  if (rows.length || !total) return rows;
  const scored = run.trained.filter((s) => s.reward !== null);
  const moved = scored.length > 1 ? ` The reward went from ${number(scored[0].reward)} to ${number(scored.at(-1).reward)} in ${many(scored.length, "step")}.` : "";
  return [el("p", { class: "fine" }, `Nothing in the last steps keeps this run from learning: groups differ, calls parse, few rollouts fail.${moved}`)];
}

// A query as it stands in an address.
const shownQuery = (query) => Object.fromEntries(Object.entries(query).map(([k, v]) => [k, v === true ? "1" : v === false ? "0" : v]));

export async function readRun(name) {
  const run = await overview(name);
  run.trained = run.steps.filter((s) => s.phase === "train" && s.step !== null);
  run.others = run.steps.filter((s) => !(s.phase === "train" && s.step !== null));
  run.events = new Map(run.metrics.filter((e) => e.event === "step" && Number.isInteger(e.step)).map((e) => [e.step, e]));
  run.evaluated = (s) => run.metrics.findLast((e) => e.event === "evaluated" && [undefined, s.phase, `version-${s.step}`, `step-${s.step}`].includes(e.when));
  run.listOf = (s, query = {}) => link(name, "rollouts", { phase: s.phase, number: s.number, sort: "reward", ...query });
  // The evaluation of version k lies after step k; those before and after the training at its ends.
  run.placeOf = (s) => (s.phase === "before" ? 0 : s.phase === "after" ? run.trained.at(-1)?.number ?? 1 : s.phase === "eval" && s.step !== null ? s.step : null);
  return run;
}

// The curve of held-out rewards, with intervals where the evaluation gave one.
export function heldOut(run) {
  return run.others.filter((s) => run.placeOf(s) !== null).map((s) => { const [low, high] = run.evaluated(s)?.reward_interval ?? [null, null]; return { x: run.placeOf(s), y: s.reward, low, high, href: link(run.name, "evaluation", { phase: s.phase, number: s.number }) }; }).sort((a, b) => a.x - b.x);
}

function charts(run) {
  const { trained } = run, name = run.name;
  const point = (key, of = (s) => s[key]) => trained.map((s) => ({ x: s.number, y: of(s), href: run.listOf(s) }));
  const logged = (of) => trained.map((s) => { const e = run.events.get(s.step); return { x: s.number, y: e ? of(e) ?? null : null, href: run.listOf(s) }; });
  const hrefs = trained.map((s) => run.listOf(s)), xs = trained.map((s) => s.number);
  const waits = (e) => (e.rollout_s !== undefined && e.train_s !== undefined && e.rollout_s + e.train_s > 0 ? e.rollout_s / (e.rollout_s + e.train_s) : null);
  const reward = trained.map((s) => ({ x: s.number, y: s.reward, low: s.quantiles?.[0] ?? null, high: s.quantiles?.[2] ?? null, href: run.listOf(s) }));
  const own = [...new Set(run.metrics.filter((e) => e.event === "step").flatMap((e) => Object.keys(e.metrics ?? {})))].sort();
  const same = (s) => (s.groups ?? 0) - (s.groups_differ ?? 0) - (s.groups_failed ?? 0) - (s.groups_solved ?? 0);
  const stops = [...new Set(trained.flatMap((s) => Object.keys(s.stops)))].sort((a, b) => (a === "stop" ? -1 : b === "stop" ? 1 : a < b ? -1 : 1));
  const causes = [...new Set(trained.flatMap((s) => Object.keys(s.causes)))].sort();
  const kl = ["sampler", "start", "old", "reference", "teacher"];
  return [
    lineChart("Reward", [{ name: "mean", points: reward }, { name: "median", kind: "other", points: point("p50", (s) => s.quantiles?.[1] ?? null) }, { name: "held out", kind: "held", points: trained.length ? heldOut(run) : [] }], { from: 0, to: 1, note: "Means over inputs. Bands: 10 % to 90 % of rollouts; the 95 % interval of held-out inputs." }),
    stackedChart("Groups", xs, [{ name: "all fail", colour: "--bad", values: trained.map((s) => s.groups_failed) }, { name: "mixed", colour: "--main", values: trained.map((s) => s.groups_differ) }, { name: "same reward between", colour: "--warn", values: trained.map(same) }, { name: "all pass", colour: "--good", values: trained.map((s) => s.groups_solved) }], { hrefs, note: "Only mixed groups, whose rewards differ, teach." }),
    own.length ? lineChart("Numbers with the reward", own.map((key) => ({ name: key, points: logged((e) => e.metrics?.[key]) })), { note: "Means of what the agent returned: parts of the reward, or its own counts." }) : null,
    lineChart("KL divergence", kl.map((from) => ({ name: `from the ${from}`, points: logged((e) => e[`kl_${from}`]) })), { from: 0, note: "Of the policy in training, in nats per token. Above 0.1 from the sampler: updates too large, or rollouts too old." }),
    lineChart("Clip fraction", [{ name: "tokens held by the clip", points: logged((e) => e.clip_fraction) }], { from: 0, note: "Above 0.3: updates are too large." }),
    lineChart("Gradient norm", [{ name: "before clipping", points: logged((e) => e.grad_norm) }], { from: 0, note: "Spikes: lower the learning rate. 0: nothing was learned." }),
    lineChart("Entropy", [{ name: "mean, nats", points: point("entropy") }], { from: 0, note: "At trained tokens. A fast fall: the policy stops exploring." }),
    lineChart("Logprob gap", [{ name: "largest", points: point("gap_max") }, { name: "mean", points: point("gap_mean") }], { from: 0, note: "Between sampler and trainer, in nats. It should stay at the rounding of the dtype." }),
    stackedChart("Why rollouts stopped", xs, stops.map((stop) => ({ name: stop, colour: STOPS[stop], values: trained.map((s) => s.stops[stop] ?? 0) })), { hrefs, note: "length: cut by its limit of tokens; errors by their outcome." }),
    stackedChart("Failures by cause", xs, [{ name: "ok", colour: "--good", values: trained.map((s) => s.rollouts - Object.values(s.causes).reduce((a, b) => a + b, 0)) }, ...causes.map((c) => ({ name: c, colour: { policy: "--warn", agent: "--bad" }[c] ?? "--soft", values: trained.map((s) => s.causes[c] ?? 0) }))], { hrefs, note: "Whose failure it is: the policy's, the agent's code, or the infrastructure's." }),
    lineChart("Tokens sampled by a rollout", [{ name: "mean", points: point("tokens_mean") }, { name: "longest", points: point("tokens_max") }], { from: 0 }),
    lineChart("Turns and tool calls of a rollout", [{ name: "turns", points: point("turns") }, { name: "tool calls", points: point("tool_calls") }], { from: 0 }),
    lineChart("Weight versions behind", [{ name: "mean", points: point("staleness") }, { name: "most", points: point("staleness_max") }], { from: 0, to: 1 }),
    lineChart("Share of the time the trainer waits", [{ name: "for rollouts", points: logged(waits) }], { from: 0, to: 1 }),
    lineChart("Seconds of a rollout", [{ name: "mean", points: point("elapsed_s") }, { name: "longest", points: point("elapsed_max_s") }], { from: 0 }),
    lineChart("Loss", [{ name: "loss", points: logged((e) => e.loss) }], { note: "Its size says little: advantages sum to about 0." }),
  ].filter(Boolean);
}

function facts(run) {
  const { trained, tokens } = run, last = trained.at(-1) ?? run.steps.at(-1), name = run.name;
  const planned = run.config.steps, left = planned && run.status === "running" ? planned - trained.length : 0;
  const took = [...run.events.values()].slice(-5).map((e) => (e.rollout_s ?? 0) + (e.train_s ?? 0));
  const of = (n) => (n === null ? "–" : [n.toLocaleString("en"), tokens.sampled ? el("small", {}, ` ${percent(n / tokens.sampled)}`) : null]);
  return [
    ["steps", planned ? `${trained.length} of ${planned}` : number(trained.length), null],
    ["rollouts", number(run.steps.reduce((n, s) => n + s.rollouts, 0)), link(name, "rollouts")],
    ["reward, last step", number(last?.reward), last && run.listOf(last)],
    ["usable, last step", last ? `${last.usable} of ${last.rollouts}` : "–", last && run.listOf(last, { usable: "1" })],
    ["groups that differ, last step", last?.groups ? `${last.groups_differ} of ${last.groups}` : "–", last && run.listOf(last)],
    ["tokens sampled", tokens.sampled === null ? "–" : tokens.sampled.toLocaleString("en"), link(name, "rollouts", { phase: "train", sort: "sampled_tokens", descending: "1" }), "in all rollouts of the training"],
    ["of these usable", of(tokens.usable), link(name, "rollouts", { phase: "train", usable: "1" }), "in usable rollouts, where the session's rule trains them"],
    ["with gradient", of(tokens.gradient), link(name, "rollouts", { phase: "train", gradient: "1" }), "usable, with an advantage other than 0: all that the run learned from"],
    left > 0 && took.length ? ["time left, about", seconds((left * took.reduce((a, b) => a + b, 0)) / took.length), null] : null,
  ].filter(Boolean).map(([n, v, href, why]) => el(href ? "a" : "div", { class: "card fact", href, title: why }, el("span", {}, n), el("b", {}, v)));
}

function tables(run) {
  const { name } = run, rollouts = (query) => link(name, "rollouts", query);
  const shown = (step, phase) => (step === null ? "–" : step + (phase === "train" ? run.counted_from : 0));
  const failed = run.failures.length ? table(["#rollouts", "error", "outcome", "steps", "example"], run.failures.slice(0, 12).map((f) => [
    el("a", { href: rollouts(f.error ? { error: f.error } : { outcome: f.outcome }) }, f.rollouts), el("span", { class: "long" }, f.error ?? "–"), f.outcome + (f.cause ? ` (${f.cause})` : ""), f.first === f.last ? shown(f.first, "train") : `${shown(f.first, "train")} to ${shown(f.last, "train")}`, el("a", { href: link(name, `rollout/${f.example}`, f.error ? { error: f.error } : { outcome: f.outcome }) }, `#${f.example}`)])) : null;
  const tools = run.tools.length ? table(["tool", "#calls", "#errors", "#seconds a call", "#reward with", "#reward without"], run.tools.map((t) => [el("a", { href: rollouts({ tool: t.name }) }, t.name), number(t.calls), t.errors === null ? "–" : number(t.errors), t.seconds === null ? "–" : number(t.seconds / t.calls), number(t.reward_with), number(t.reward_without)])) : null;
  const { never, sometimes, always } = run.inputs, solved = [["never", never], ["sometimes", sometimes], ["always", always]];
  const inputs = never + sometimes + always ? el("p", { class: "card spaced", id: "solved" }, solved.map(([word, n]) => el("a", { href: link(name, "inputs", { solved: word }) }, el("b", {}, n), ` ${word}`))) : null;
  const f = run.in_flight && flightOf(run.in_flight), flight = f ? el("p", { class: "card", id: "in-flight" }, el("b", {}, `${f.count} in flight`), `: ${Object.entries(f.stages).map(([s, n]) => `${n} in stage ${s}`).join(", ")}.`, f.longest ? ` The longest is ${f.longest.session_id}, ${seconds(f.longest.stage_s)} in stage ${f.longest.stage}. ` : " ", el("code", {}, "agentcore-rl runs show --in-flight"), " says what each waits for.") : null;
  return [
    section("Failures by message", null, failed), section("Tools", "Rewards are means over rollouts that called the tool, and over those that did not.", tools),
    section("Inputs of the training, by how often a rollout solved them", "Solved: a reward of 1 or more. Inputs that are never or always solved teach nothing.", inputs), section("In flight", null, flight),
  ];
}

// The settings in which configurations differ.
export function settingsTable(names, configs) {
  const keys = [...new Set(configs.flatMap(Object.keys))].sort().filter((k) => new Set(configs.map((c) => JSON.stringify(c[k]))).size > 1);
  return keys.length ? table(["setting", ...names], keys.map((k) => [k, ...configs.map((c) => el("code", {}, JSON.stringify(c[k]) ?? "–"))]), { id: "changed" }) : el("p", { class: "soft" }, "None.");
}

// How many rollouts are in each stage, and the one that is there longest.
function flightOf({ count, rollouts }) {
  const stages = {};
  for (const r of rollouts) stages[r.stage] = (stages[r.stage] ?? 0) + 1;
  return { count, stages, longest: rollouts.reduce((a, b) => (a && a.stage_s >= b.stage_s ? a : b), null) };
}

export async function runPage(name, _query, _go, mount) {
  const run = await readRun(name), { trained, others } = run;
  const total = run.steps.reduce((n, s) => n + s.rollouts, 0);
  const lost = Object.entries(run.not_kept).map(([why, n]) => el("p", { class: "notice" }, `${many(n, "rollout")} not in this run: ${why === "not_kept_full" ? "they came faster than they could be written" : "they could not be written"}.`));
  const short = (path) => (typeof path === "string" && path ? path.split("/").at(-1) : null);
  const head = [el("h1", {}, name, " ", statusOf(run.status)), el("p", { class: "soft spaced" }, [["model", short(run.config.model)], ["data", short(run.config.data)], ["agent", short(run.config.agent)]].filter(([, v]) => v).map(([k, v]) => el("span", {}, `${k} ${v}`)), run.status.startsWith("failed") ? el("span", { class: "bad" }, run.status) : null), lost];
  const settings = [
    run.before ? section(`Settings that differ from ${run.before.name}`, null, settingsTable(["here", "before"], [run.config, run.before.config])) : null,
    run.log ? [el("h2", {}, `End of ${run.log.name}`), el("details", { class: "card" }, el("summary", {}, run.log.text.trimEnd().split("\n").at(-1)), el("pre", {}, run.log.text))] : null,
    el("h2", {}, "Configuration"), el("details", { class: "card" }, el("summary", {}, "config.json"), el("pre", {}, JSON.stringify(run.config, null, 2))),
  ];
  const jobs = [...new Map(run.metrics.filter((e) => e.event === "job").map((e) => [e.job, e])).values()].map((e) => [e.job, e.status, JSON.stringify({ ...e.ProgressInfo, ...e.RolloutInfo, ...e.BillableTokenUsage, ...e.EvaluationMetrics })]);
  if (!total && jobs.length) return [head, el("p", { class: "notice" }, "SageMaker's jobs, as they were last seen. Their rollouts are in MLflow."), table(["job", "status", "numbers"], jobs), settings];
  if (!total) return [head, el("p", { class: "notice" }, "No rollout has ended yet. Each one shows up here when it has. Where they wait: ", el("code", {}, "agentcore-rl runs show --in-flight")), tables(run), settings];
  const change = run.summary.held_out_change ? el("p", { class: "notice" }, `Verdict: ${run.summary.held_out_change.text}`) : null;
  const own = [...new Set(run.metrics.flatMap((e) => Object.keys(e.metrics ?? {})))].sort();
  const eventOf = (s) => (s.phase === "train" && s.step !== null ? run.events.get(s.step) : run.evaluated(s));
  const place = (s) => [el("a", { href: run.listOf(s) }, s.at), s.phase === "train" ? null : [" ", el("a", { href: link(name, "evaluation", { phase: s.phase, number: s.number }) }, "evaluation")]];
  const steps = table(["step", "#rollouts", "#reward", "#of ok", "#usable", "#groups that differ", "#tokens a rollout", "#largest gap", ...own.map((key) => `#${key}`), "outcomes"],
    run.steps.map((s) => [place(s), number(s.rollouts), number(s.reward), number(s.reward_ok), number(s.usable), s.rollouts > s.groups ? `${number(s.groups_differ)} of ${number(s.groups)}` : "–", number(s.tokens_mean, 0), small(s.gap_max), ...own.map((key) => number(eventOf(s)?.metrics?.[key])), Object.entries(s.outcomes).map(([o, n]) => `${n} ${o}`).join(", ")]), { id: "steps" });
  return [head, el("div", { id: "diagnosis" }, findings(run)), change, el("div", { class: "facts" }, facts(run)), el("div", { class: "grid", id: "charts" }, charts(run)), tables(run),
    everyNumber(run, mount), el("h2", {}, trained.length && others.length ? "Steps and evaluations" : trained.length ? "Steps" : "Evaluations"), steps, settings];
}

// The inputs of a phase, with how often their rollouts solved them.
export async function inputsPage(name, query) {
  const phase = query.phase ?? "train", inputs = await inputsOf(name, phase);
  const kinds = { never: (r) => r === 0, sometimes: (r) => r > 0 && r < 1, always: (r) => r === 1 };
  const shown = inputs.filter((i) => !query.solved || (i.rate !== null && kinds[query.solved]?.(i.rate)));
  const rows = shown.map((i) => [el("a", { class: "input", href: link(name, "rollouts", { phase, input: i.input_key }), title: i.text ?? i.input_key }, i.text ?? i.input_key), number(i.rollouts), percent(i.rate), number(i.reward), sparkline(i.rewards, "mean reward by step"), el("a", { href: link(name, `group/${i.first}`) }, "first group")]);
  const choice = ["", ...Object.keys(kinds)].map((word) => el("a", { href: link(name, "inputs", { ...query, solved: word }), "aria-current": (query.solved ?? "") === word ? "page" : null }, word || "all"));
  return [el("h1", {}, `${name}: inputs of ${phase}`), el("p", { class: "spaced" }, "solved", choice, el("span", { class: "soft", id: "count" }, many(shown.length, "input"))),
    inputs.length >= 1000 ? el("p", { class: "notice" }, "The 1,000 inputs that are solved least are shown.") : null, table(["input", "#rollouts", "#solved", "#mean reward", "reward by step", ""], rows, { id: "inputs" })];
}
