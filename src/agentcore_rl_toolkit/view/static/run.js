// @ts-check
// One run: is it learning, and if not, why?
import { el, facts, fold, inputOf, link, many, notice, number, numbersIn, percent, seconds, section, stopText, table, to } from "./dom.js";
import { lineChart, sparkline, stackedChart, unmount } from "./charts.js";
import { inputsOf, overview } from "./source.js";
import { statusOf } from "./runs.js";

export const SHOWN = 1000; // rows of a table
const STOPS = { stop: "--good", tool_calls: "--cyan", length: "--warn", turns: "--violet", context: "--bad" };

// Each training step with all its numbers by name: those of its event in metrics.jsonl, and those of its rollouts.
export const valuesOf = (run) => run.trained.map((s) => [s, Object.fromEntries([...numbersIn(run.events.get(s.step) ?? {}), ...numbersIn(s)])]);
export const namesOf = (rows) => [...new Set(rows.flatMap(([, numbers]) => Object.keys(numbers)))].filter((name) => !["step", "number", "first"].includes(name)).sort();

// All numbers of the steps. The charts are drawn when the section is opened.
function everyNumber(run, mount) {
  const rows = valuesOf(run), names = namesOf(rows);
  if (!names.length) return null;
  const filter = el("input", { type: "search", placeholder: "filter by name", "aria-label": "filter the numbers by name" });
  const smooth = el("input", { type: "range", min: 1, max: 20, value: 1, "aria-label": "mean over steps" }), said = el("span", {}, "every step");
  const grid = el("div", { class: "grid" });
  const mean = (points, wide) => points.map((p, i) => { const near = points.slice(Math.max(0, i - wide + 1), i + 1).map((q) => q.y).filter((y) => y !== null); return p.y === null ? p : { ...p, y: near.reduce((a, b) => a + b, 0) / near.length }; });
  const draw = () => {
    const wide = Number(smooth.value);
    said.textContent = wide === 1 ? "every step" : `mean of ${wide} steps`;
    unmount(grid);
    grid.replaceChildren(...names.filter((name) => name.includes(filter.value)).map((name) => lineChart(name, [{ name, points: mean(rows.map(([s, numbers]) => ({ x: s.number, y: numbers[name] ?? null })), wide) }])).filter(Boolean));
    mount(grid);
  };
  const made = el("details", { class: "card", id: "numbers" }, el("summary", {}, `All ${names.length} numbers of a step`), el("p", { class: "tools" }, filter, el("label", { class: "soft" }, "smoothing ", smooth), " ", said), grid);
  for (const input of [filter, smooth]) input.addEventListener("input", draw);
  made.addEventListener("toggle", () => made.open && draw());
  return made;
}

function findings(run) {
  const total = run.steps.reduce((n, s) => n + s.rollouts, 0);
  const rows = run.diagnosis.map((f) => el("div", { class: "finding", "data-name": f.name }, el("b", {}, f.text), " ", f.advice.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part)), " ", Object.keys(f.query).length ? to(link(run.name, "rollouts", shownQuery(f.query)), "These rollouts →") : null));
  if (rows.length || !total) return rows;
  const scored = run.trained.filter((s) => s.reward !== null), groups = run.trained.length > 2 ? "The last steps show no problem: most groups have rewards that differ, " : "No problem is known yet: ";
  const [first, last] = [scored[0], scored.at(-1)].map((s) => number(s?.reward));
  return [el("p", { class: "fine" }, `${groups}most tool calls parse, and few rollouts fail.`, scored.length > 1 ? ` The reward went from ${first} to ${last} in ${many(scored.length, "step")}.` : null)];
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

// The curve of held-out rewards, each with the interval of the same rollouts.
export function heldOut(run) {
  return run.others.filter((s) => run.placeOf(s) !== null).map((s) => { const [low, high] = s.interval ?? [null, null]; return { x: run.placeOf(s), y: s.reward, low, high, href: link(run.name, "evaluation", { phase: s.phase, number: s.number }) }; }).sort((a, b) => a.x - b.x);
}

function charts(run) {
  const { trained } = run, hrefs = trained.map((s) => run.listOf(s)), xs = trained.map((s) => s.number);
  // Points of the steps: of what the run's rollouts give, and of what the trainer logged.
  const point = (key, of = (s) => s[key]) => trained.map((s, i) => ({ x: s.number, y: of(s), href: hrefs[i] }));
  const logged = (of) => point(null, (s) => { const e = run.events.get(s.step); return e ? of(e) ?? null : null; });
  const line = (title, note, options, ...curves) => lineChart(title, curves.map(([name, points, kind]) => ({ name, points, kind })), { note, ...options });
  const stack = (title, note, parts) => stackedChart(title, xs, parts.map(([name, colour, of]) => ({ name, colour, values: trained.map(of) })), { hrefs, note });
  const kinds = (key) => [...new Set(trained.flatMap((s) => Object.keys(s[key])))].sort((a, b) => (a === "stop" ? -1 : b === "stop" ? 1 : a < b ? -1 : 1));
  const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0), share = { from: 0, to: 1 }, zero = { from: 0 };
  const held = trained.length ? heldOut(run) : [];
  const reward = trained.map((s, i) => ({ x: s.number, y: s.reward, low: s.quantiles?.[0] ?? null, high: s.quantiles?.[2] ?? null, href: hrefs[i] }));
  const own = [...new Set(run.metrics.filter((e) => e.event === "step").flatMap((e) => Object.keys(e.metrics ?? {})))].sort();
  return [
    line("Reward", `Blue: middle 80 % of rollouts.${held.length ? " Green: 95 % interval of held-out inputs." : ""}`, share,
      ["median", point("p50", (s) => s.quantiles?.[1] ?? null), "other"], ["mean", reward, "main"], ["held out", held, "held"]),
    stack("Groups", "Only mixed groups teach: their rewards differ.",
      [["all scored 0", "--bad", (s) => s.groups_failed], ["mixed", "--main", (s) => s.groups_differ],
        ["all equal, between", "--warn", (s) => s.groups - s.groups_differ - s.groups_failed - s.groups_solved],
        ["all full reward", "--good", (s) => s.groups_solved]]),
    line("The agent's metrics", "Means of the numbers that the agent returned with its reward.", {},
      ...own.map((key) => [key, logged((e) => e.metrics?.[key])])),
    line("KL divergence", "In nats per token. Above 0.1 from the engine: updates too large, or rollouts too old.", zero,
      ...["sampler", "start", "old", "reference", "teacher"].map((from) => [`from the ${from}`, logged((e) => e[`kl_${from}`])])),
    line("Clip fraction", "Above 0.3: updates are too large.", zero, ["tokens limited by the clip", logged((e) => e.clip_fraction)]),
    line("Gradient norm", "Spikes: lower the learning rate. 0: nothing was learned.", zero, ["before clipping", logged((e) => e.grad_norm)]),
    line("Entropy", "At trained tokens. A fast fall: the policy stops exploring.", zero, ["mean, nats", point("entropy")]),
    line("Logprob gap", "Between engine and trainer, in nats. It should stay at the rounding of the dtype.", zero,
      ["largest", point("gap_max")], ["mean", point("gap_mean")]),
    stack("Why rollouts stopped", "length: the limit of tokens cut a reply. Errors have the name of their outcome.", kinds("stops").map((stop) => [stopText(stop), STOPS[stop], (s) => s.stops[stop] ?? 0])),
    stack("Failures by cause", "The cause of each failure: the policy, the agent's code, the scorer, or the infrastructure.",
      [["ok", "--good", (s) => s.rollouts - sum(s.causes)], ...kinds("causes").map((cause) => [cause, { policy: "--warn", agent: "--bad" }[cause] ?? "--soft", (s) => s.causes[cause] ?? 0])]),
    line("Tokens sampled by a rollout", null, zero, ["mean", point("tokens_mean")], ["longest", point("tokens_max")]),
    line("Share of the time the trainer waits", null, share, ["for rollouts", logged((e) => (e.rollout_s + e.train_s > 0 ? e.rollout_s / (e.rollout_s + e.train_s) : null))]),
    line("Loss", "Its size means little, because advantages sum to about 0.", {}, ["loss", logged((e) => e.loss)]),
  ].filter(Boolean);
}

function countsOf(run) {
  const { trained, others, tokens } = run, rollouts = (steps) => steps.reduce((n, s) => n + s.rollouts, 0), last = trained.at(-1) ?? run.steps.at(-1), name = run.name;
  const planned = run.config.steps, left = planned && run.status === "running" ? planned - trained.length : 0;
  const took = trained.slice(-5).map((s) => run.events.get(s.step)).map((e) => e?.rollout_s + e?.train_s).filter((s) => s > 0);
  const count = (n) => (n === null ? "–" : n.toLocaleString("en")), share = (n) => (n !== null && tokens.sampled ? percent(n / tokens.sampled) : null);
  const rest = left > 0 && took.length ? `about ${seconds((left * took.reduce((a, b) => a + b, 0)) / took.length)} left` : null;
  return [
    ["steps", planned ? `${trained.length} of ${planned}` : number(trained.length), null, rest],
    ["rollouts", number(rollouts(trained.length ? trained : others)), link(name, "rollouts"), trained.length && others.length ? `+ ${rollouts(others)} held out` : null],
    ["reward", number(last?.reward), last && run.listOf(last), "last step"],
    ["usable rollouts", last ? `${last.usable} of ${last.rollouts}` : "–", last && run.listOf(last, { usable: "1" }), "last step"],
    ["mixed groups", last?.groups ? `${last.groups_differ} of ${last.groups}` : "–", last && run.listOf(last), "last step"],
    ["tokens sampled", count(tokens.sampled), link(name, "rollouts", { phase: "train", sort: "sampled_tokens", descending: "1" }), null, "in all rollouts of the training"],
    ["of these usable", count(tokens.usable), link(name, "rollouts", { phase: "train", usable: "1" }), share(tokens.usable), "in usable rollouts, and in conversations that are trained"],
    ["with gradient", count(tokens.gradient), link(name, "rollouts", { phase: "train", gradient: "1" }), share(tokens.gradient), "usable, with an advantage other than 0: the tokens that the run learned from"],
  ];
}

// Failures by message, with the steps in which they came.
export function failuresOf(name, failures, query = {}, byStep = false) {
  const steps = ({ first, last }) => (first === null ? "–" : first === last ? first : `${first} to ${last}`);
  const rows = failures.slice(0, 12).map((f) => {
    const which = { ...query, error: f.shape, outcome: f.outcome };
    return [to(link(name, "rollouts", which), f.rollouts), el("span", { class: "long" }, f.error ?? "–"), f.outcome + (f.cause ? ` (${f.cause})` : ""), ...(byStep ? [steps(f)] : []), to(link(name, `rollout/${f.example}`, which), `#${f.example}`)];
  });
  return section("Failures by message", null, rows.length ? table(["#rollouts", "error", "outcome", ...(byStep ? ["steps"] : []), "example"], rows) : null);
}

function tables(run) {
  const { name } = run, rollouts = (query) => link(name, "rollouts", query);
  const tools = run.tools.length ? table(["tool", "#calls", "#errors", "#seconds a call", "#reward with", "#reward without"], run.tools.map((t) => [to(rollouts({ tool: t.name }), t.name), number(t.calls), t.errors === null ? "–" : number(t.errors), t.seconds === null ? "–" : number(t.seconds / t.calls), number(t.reward_with), number(t.reward_without)])) : null;
  const { never, sometimes, always } = run.inputs, solved = [["never", never], ["sometimes", sometimes], ["always", always]];
  const inputs = never + sometimes + always ? el("p", { class: "card spaced", id: "solved" }, solved.map(([word, n]) => to(link(name, "inputs", { solved: word }), el("b", {}, n), ` ${word}`))) : null;
  const flights = run.in_flight?.rollouts ?? [], stages = {};
  for (const r of flights) stages[r.stage] = (stages[r.stage] ?? 0) + 1;
  const longest = flights.reduce((a, b) => (a && a.stage_s >= b.stage_s ? a : b), null);
  const flight = run.in_flight ? el("p", { class: "card", id: "in-flight" }, el("b", {}, `${run.in_flight.count} in flight`), `: ${Object.entries(stages).map(([s, n]) => `${n} in stage ${s}`).join(", ")}. `, longest ? `The longest is ${longest.session_id}, ${seconds(longest.stage_s)} in stage ${longest.stage}. ` : null, el("code", {}, "agentcore-rl runs show --in-flight"), " says what each waits for.") : null;
  return [
    failuresOf(name, run.failures, {}, true), section("Tools", "Rewards are means over rollouts that called the tool, and over those that did not.", tools),
    section("Inputs of the training, by how often a rollout solved them", "Solved: a reward of 1 or more. Inputs that are never or always solved teach nothing.", inputs), section("In flight", null, flight),
  ];
}

// The settings in which configurations differ.
export function settingsTable(names, configs) {
  const keys = [...new Set(configs.flatMap(Object.keys))].sort().filter((k) => new Set(configs.map((c) => JSON.stringify(c[k]))).size > 1);
  return keys.length ? table(["setting", ...names], keys.map((k) => [k, ...configs.map((c) => el("code", {}, JSON.stringify(c[k]) ?? "–"))]), { id: "changed" }) : el("p", { class: "soft" }, "None.");
}

export async function runPage(name, _query, _go, mount) {
  const run = await readRun(name), { trained, others } = run;
  const total = run.steps.reduce((n, s) => n + s.rollouts, 0);
  const lost = run.not_kept ? [notice(`${many(run.not_kept, "rollout")} not in this run: they could not be written, or came too fast.`)] : [];
  const short = (path) => (typeof path === "string" && path ? path.split("/").at(-1) : null);
  const head = [el("h1", {}, name, " ", statusOf(run.status)), el("p", { class: "soft spaced" }, [["model", short(run.config.model)], ["data", short(run.config.data)], ["agent", short(run.config.agent)]].filter(([, v]) => v).map(([k, v]) => el("span", {}, `${k} ${v}`)), run.status.startsWith("failed") ? el("span", { class: "bad" }, run.status) : null), lost];
  const settings = [
    run.before ? section(`Settings that differ from ${run.before.name}`, null, settingsTable(["here", "before"], [run.config, run.before.config])) : null,
    run.log ? [el("h2", {}, `End of ${run.log.name}`), fold(run.log.text.trimEnd().split("\n").at(-1), el("pre", {}, run.log.text))] : null,
    el("h2", {}, "Configuration"), fold("config.json", el("pre", {}, JSON.stringify(run.config, null, 2))),
  ];
  const jobs = [...new Map(run.metrics.filter((e) => e.event === "job").map((e) => [e.job, e])).values()].map((e) => [e.job, e.status, JSON.stringify({ ...e.ProgressInfo, ...e.RolloutInfo, ...e.BillableTokenUsage, ...e.EvaluationMetrics })]);
  if (!total && jobs.length) return [head, notice("SageMaker's jobs, as they were last seen. Their rollouts are in MLflow."), table(["job", "status", "numbers"], jobs), settings];
  if (!total) return [head, notice("No rollout has ended yet. This page shows each rollout when it ends. To see what they wait for: ", el("code", {}, "agentcore-rl runs show --in-flight")), tables(run), settings];
  const change = run.summary.held_out_change ? notice(`Verdict: ${run.summary.held_out_change.text}`) : null;
  const own = [...new Set(run.metrics.flatMap((e) => Object.keys(e.metrics ?? {})))].sort();
  const eventOf = (s) => (s.phase === "train" && s.step !== null ? run.events.get(s.step) : run.evaluated(s));
  const place = (s) => [to(run.listOf(s), s.at), s.phase === "train" ? null : [" ", to(link(name, "evaluation", { phase: s.phase, number: s.number }), "evaluation")]];
  const steps = table(["step", "#rollouts", "#reward", "#of ok", "#usable", "#mixed groups", "#tokens a rollout", "#largest gap", ...own.map((key) => `#${key}`), "outcomes"],
    run.steps.map((s) => [place(s), number(s.rollouts), number(s.reward), number(s.reward_ok), number(s.usable), s.rollouts > s.groups ? `${number(s.groups_differ)} of ${number(s.groups)}` : "–", number(s.tokens_mean, 0), number(s.gap_max), ...own.map((key) => number(eventOf(s)?.metrics?.[key])), Object.entries(s.outcomes).map(([o, n]) => `${n} ${o}`).join(", ")]), { id: "steps" });
  return [head, el("div", { id: "diagnosis" }, findings(run)), change, facts(countsOf(run)), el("div", { class: "grid", id: "charts" }, charts(run)), tables(run),
    everyNumber(run, mount), el("h2", {}, trained.length && others.length ? "Steps and evaluations" : trained.length ? "Steps" : "Evaluations"), steps, settings];
}

// The inputs of a phase, with how often their rollouts solved them.
export async function inputsPage(name, query) {
  const phase = query.phase ?? "train", inputs = await inputsOf(name, { phase });
  const kinds = { never: (r) => r === 0, sometimes: (r) => r > 0 && r < 1, always: (r) => r === 1 };
  const shown = inputs.filter((i) => !query.solved || (i.rate !== null && kinds[query.solved]?.(i.rate)));
  const rows = shown.slice(0, SHOWN).map((i) => [inputOf(i, link(name, "rollouts", { phase, input: i.input_key })), number(i.rollouts), percent(i.rate), number(i.reward), sparkline(i.rewards, "mean reward by step"), to(link(name, `group/${i.first}`), "first group")]);
  const choice = ["", ...Object.keys(kinds)].map((word) => el("a", { href: link(name, "inputs", { ...query, solved: word }), "aria-current": (query.solved ?? "") === word ? "page" : null }, word || "all"));
  return [el("h1", {}, `${name}: inputs of ${phase}`), el("p", { class: "spaced" }, "solved", choice, el("span", { class: "soft", id: "count" }, many(shown.length, "input"))),
    shown.length > SHOWN ? notice(`The ${SHOWN} inputs that are solved least are shown.`) : null, table(["input", "#rollouts", "#solved", "#mean reward", "reward by step", ""], rows, { id: "inputs" })];
}
