// @ts-check
// Where the data comes from: the server, or what an exported file holds. Both give the same values.
import { patternOf, sortBy } from "./dom.js";

const held = document.getElementById("held");
const file = held ? JSON.parse(held.textContent) : null;
export const exported = file !== null;
// What an exported file leaves out, in a sentence.
export const leftOut = file?.left_out ?? null;

async function get(path, query = {}) {
  const answer = await fetch(`api/${path}?${new URLSearchParams(query)}`);
  const value = await answer.json();
  if (!answer.ok) throw new Error(value?.error?.message ?? `the server answered ${answer.status}`);
  return value;
}

// What an exported file holds of the server's answers, by the words of the request.
const words = (what, query) => [what, ...Object.values(query)].filter((word) => word !== undefined).join(" ").trim();
export const isHeld = (what, query) => file === null || Object.hasOwn(file.answers, words(what, query));
async function of(run, what, query = {}) {
  if (!file) return get(`runs/${encodeURIComponent(run)}${what && `/${what}`}`, query);
  if (!isHeld(what, query)) throw new Error("this is not in the file");
  return file.answers[words(what, query)];
}

export async function runList() {
  return file ? [{ name: file.name, rollouts: file.rows.length, problem: null, status: file.answers[""].status }] : get("runs");
}
export const overview = (run) => of(run, "");
export const facetsOf = async (run) => (file ? file.answers[""].facets : of(run, "facets"));
export const inputsOf = (run, query) => of(run, "inputs", query);
export const evaluationOf = (run, { phase, number }) => of(run, "evaluation", number === undefined ? { phase } : { phase, number });
// RUN@PHASE or RUN@PHASE:STEP as the run and a query.
export function sideOf(name) {
  const [phase, step] = name.slice(name.lastIndexOf("@") + 1).split(":");
  return { run: name.slice(0, name.lastIndexOf("@")), query: step === undefined ? { phase } : { phase, step } };
}
export async function changeOf(first, second) {
  if (!file) return get("change", { first, second });
  return of("", "change", Object.values({ ...sideOf(first).query }).concat(Object.values(sideOf(second).query)));
}

export async function rowsOf(run, query, offset, limit) {
  if (!file) return of(run, "rollouts", { ...query, offset, limit });
  const rows = sortBy(file.rows.filter((row) => fits(row, query)), (row) => row[query.sort || "id"], query.descending, (a, b) => a.id - b.id);
  return { total: rows.length, rows: rows.slice(offset, offset + limit) };
}

const yes = (word) => ["1", "true"].includes(word);
// The same conditions as `runs.Query`.
const KEPT = {
  phase: (row, v) => row.phase === v,
  number: (row, v) => row.number === Number(v),
  number_from: (row, v) => row.number !== null && row.number >= Number(v),
  group: (row, v) => row.grp === v,
  input: (row, v) => (row.input_key ?? row.grp) === v,
  outcome: (row, v) => (v.startsWith("cause:") ? row.cause === v.slice(6) : row.outcome === v),
  stop: (row, v) => row.stop === v,
  error: (row, v) => [row.shape, row.error].includes(v),
  reward_from: (row, v) => (row.reward ?? row.score) !== null && (row.reward ?? row.score) >= Number(v),
  reward_to: (row, v) => (row.reward ?? row.score) !== null && (row.reward ?? row.score) <= Number(v),
  tokens_from: (row, v) => row.sampled_tokens !== null && row.sampled_tokens >= Number(v),
  tokens_to: (row, v) => row.sampled_tokens !== null && row.sampled_tokens <= Number(v),
  usable: (row, v) => (row.mask_reason === null) === yes(v),
  gradient: (row, v) => (row.mask_reason === null && (row.gradient_tokens ?? 0) > 0) === yes(v),
  failed: (row, v) => (row.outcome !== "ok" || row.cause !== null) === yes(v),
  cut: (row, v) => (row.cut_calls ?? 0) > 0 === yes(v),
  unparsed: (row, v) => (row.unparsed_calls ?? 0) > 0 === yes(v),
  tool: (row, v) => (v === "" ? row.tool_calls === 0 : Object.hasOwn(row.tools, v)),
  text: (row, v) => patternOf(v).test(row.searched),
};
export const FILTERS = Object.keys(KEPT);
// The filters of an address. An empty one is none, but for a tool: no tool.
export const filtersOf = (query) => Object.fromEntries(FILTERS.filter((f) => query[f] !== undefined && (query[f] !== "" || f === "tool")).map((f) => [f, query[f]]));

function fits(row, query) {
  if (query.text && [...query.text].length < 2) throw new Error(`a text to look for has at least 2 characters, got '${query.text}'`);
  return Object.entries(filtersOf(query)).every(([name, value]) => KEPT[name](row, value));
}

export async function rolloutOf(run, id) {
  if (!file) return of(run, `rollouts/${id}`);
  if (!file.rollouts[id]) throw new Error(`rollout ${id} is not in this file`);
  return { ...file.rollouts[id], texts: file.texts };
}

export async function groupOf(run, id) {
  if (!file) return of(run, `groups/${id}`);
  const row = await rolloutOf(run, id);
  return { members: row.group.map((r) => file.rollouts[r.id]), history: file.histories[row.input_key] };
}

export const versionOf = async (run) => (file ? null : get("version", { run }));
// Call `changed` when the version is no longer that of `known`, and `say` with the status. Return what ends it.
// Each look is a short request: a browser has six connections to a host, for all of its tabs.
export function listen(run, known, changed, say) {
  if (file) { say("from a file", file.left_out); return () => {}; }
  let ended = false;
  const look = async () => {
    try {
      const { status, version } = await versionOf(run), live = ["running", ""].includes(status);
      if (ended) return;
      say(...(live ? ["live", "New rollouts appear here without a reload."] : [status.split(":")[0], status, true]));
      if (known?.version !== version && !document.hidden) { await changed(); known = { version }; }
    } catch (error) { if (!ended) say("no connection", error.message); }
    if (!ended) setTimeout(look, run ? 1000 : 5000); // many runs are looked at less often
  };
  look();
  return () => { ended = true; };
}

function bytes(text) {
  return Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
}

// A sequence as arrays; NaN in them is absent.
export function decoded(sequence) {
  const numbers = (text) => (text === null || text === undefined ? null : new Float32Array(bytes(text).buffer));
  return {
    ...sequence,
    ids: new Int32Array(bytes(sequence.ids).buffer),
    mask: bytes(sequence.mask),
    ...Object.fromEntries(["logprobs", "trainer_logprobs", "entropies", "advantages"].map((name) => [name, numbers(sequence[name])])),
    versions: sequence.versions ? Array.from(new Int32Array(bytes(sequence.versions).buffer), (v) => (v < 0 ? null : v)) : null,
  };
}
