// @ts-check
// One evaluation: the reward with its interval, pass@k, the rewards' histogram, failures, and its inputs.
import { el, facts, inputOf, link, many, notice, number, percent, table, to } from "./dom.js";
import { stackedChart } from "./charts.js";
import { evaluationOf } from "./source.js";
import { SHOWN, failuresOf } from "./run.js";

export async function evaluationPage(name, query) {
  const found = await evaluationOf(name, { phase: query.phase ?? "eval", number: query.number });
  const list = (more = {}) => link(name, "rollouts", { phase: found.phase, number: found.number, ...more });
  const [low, high] = found.interval ?? [null, null];
  const shown = [
    ["reward", number(found.reward), list({ sort: "reward" }), low === null ? null : `95 %: ${number(low)} to ${number(high)}`, "Mean over inputs, with its 95 % interval"],
    ["reward of those ok", number(found.reward_ok), list({ outcome: "ok" })],
    ["inputs", number(found.inputs.length)], ["rollouts", number(found.rollouts), list(), `${found.scored} scored`]];
  const k = Object.entries(found.pass_at);
  const rates = k.length ? table(["#k", "#pass@k: one of k solves it", "#pass^k: all k solve it"], k.map(([n, rate]) => [n, percent(rate), percent(found.pass_all[n])]), { id: "pass" }) : null;
  const bars = found.histogram.length ? stackedChart("Rewards of the rollouts", found.histogram.map((b) => b.at), [{ name: "rollouts", colour: "--main", values: found.histogram.map((b) => b.n) }], { x: "reward", hrefs: found.histogram.map((b) => list({ reward_from: b.from, reward_to: b.to })) }) : null;
  const rows = found.inputs.slice(0, SHOWN).map((i) => [inputOf(i, list({ input: i.input_key })), number(i.rollouts), percent(i.rate), number(i.reward), to(link(name, `group/${i.first}`), i.rollouts > 1 ? "rollouts side by side" : "its rollout")]);
  return [el("h1", {}, `${name}: evaluation ${found.at}`),
    facts(shown),
    el("div", { class: "grid" }, bars, rates), failuresOf(name, found.failures, { phase: found.phase, number: found.number }),
    el("h2", {}, `${many(found.inputs.length, "input")}, the least solved first`), found.inputs.length > SHOWN ? notice(`The first ${SHOWN} are shown.`) : null, table(["input", "#rollouts", "#solved", "#mean reward", ""], rows, { id: "inputs" })];
}
