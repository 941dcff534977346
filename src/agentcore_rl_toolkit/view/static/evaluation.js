// @ts-check
// One evaluation: the reward with its interval, pass@k, the rewards' histogram, failures, and its inputs.
import { el, link, many, number, percent, section, table } from "./dom.js";
import { stackedChart } from "./charts.js";
import { evaluationOf, leftOut } from "./source.js";

export async function evaluationPage(name, query) {
  const found = await evaluationOf(name, { phase: query.phase ?? "eval", ...(query.number ? { number: query.number } : {}) });
  const list = (more = {}) => link(name, "rollouts", { phase: found.phase, number: found.number, ...more });
  const [low, high] = found.interval ?? [null, null];
  const facts = [["reward, mean over inputs", number(found.reward), list({ sort: "reward" })], ["95 % interval", low === null ? "–" : `${number(low)} to ${number(high)}`, null], ["of those that ended ok", number(found.reward_ok), list({ outcome: "ok" })], ["inputs", number(found.inputs.length), null], ["rollouts", number(found.rollouts), list()], ["scored", number(found.scored), null]];
  const k = Object.entries(found.pass_at);
  const rates = k.length ? table(["#k", "#pass@k: one of k solves it", "#pass^k: all k solve it"], k.map(([n, rate]) => [n, percent(rate), percent(found.pass_all[n])]), { id: "pass" }) : null;
  const bars = found.histogram.length ? stackedChart("Rewards of the rollouts", found.histogram.map((b) => b.from), [{ name: "rollouts", colour: "--main", values: found.histogram.map((b) => b.n) }], { x: "reward", hrefs: found.histogram.map((b) => list({ reward_from: b.from, reward_to: b.to })) }) : null;
  const failed = found.failures.length ? table(["#rollouts", "error", "outcome", "example"], found.failures.map((f) => [el("a", { href: list(f.error ? { error: f.error } : { outcome: f.outcome }) }, f.rollouts), el("span", { class: "long" }, f.error ?? "–"), f.outcome + (f.cause ? ` (${f.cause})` : ""), el("a", { href: link(name, `rollout/${f.example}`) }, `#${f.example}`)])) : null;
  const rows = found.inputs.map((i) => [el("a", { class: "input", href: list({ input: i.input_key }), title: i.text ?? i.input_key }, i.text ?? i.input_key), number(i.rollouts), percent(i.rate), number(i.reward), el("a", { href: link(name, `group/${i.first}`) }, i.rollouts > 1 ? "rollouts side by side" : "its rollout")]);
  return [el("h1", {}, `${name}: evaluation ${found.at}`), leftOut ? el("p", { class: "notice" }, leftOut) : null,
    el("div", { class: "facts" }, facts.map(([n, v, href]) => el(href ? "a" : "div", { class: "card fact", href }, el("span", {}, n), el("b", {}, v)))),
    el("div", { class: "grid" }, bars, rates), section("Failures by message", null, failed),
    el("h2", {}, `${many(found.inputs.length, "input")}, the least solved first`), found.inputs.length >= 1000 ? el("p", { class: "notice" }, "The first 1,000 are shown.") : null, table(["input", "#rollouts", "#solved", "#mean reward", ""], rows, { id: "inputs" })];
}
