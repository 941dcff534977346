// @ts-check
// Where the data comes from: the server, or what an exported file holds. Both give the same values.
const held = document.getElementById("held");
const file = held ? JSON.parse(held.textContent) : null;
export const exported = file !== null;
// What an exported file leaves out, in a sentence.
export const leftOut = file?.left_out ?? null;

async function get(path) {
  const answer = await fetch(path);
  const value = await answer.json();
  if (!answer.ok) throw new Error(value?.error?.message ?? `the server answered ${answer.status}`);
  return value;
}

const at = (run, rest = "") => `api/runs/${encodeURIComponent(run)}${rest}`;

export async function runList() {
  return file ? [{ name: file.name, rollouts: file.rows.length, problem: null, status: file.overview.status }] : get("api/runs");
}

export async function overview(run) {
  return file ? file.overview : get(at(run));
}

export async function facetsOf(run) {
  return file ? file.overview.facets : get(at(run, "/facets"));
}

export async function inputsOf(run, phase) {
  return file ? file.inputs[phase] ?? [] : get(at(run, `/inputs?${new URLSearchParams({ phase })}`));
}

export async function evaluationOf(run, query) {
  if (!file) return get(at(run, `/evaluation?${new URLSearchParams(query)}`));
  const found = file.evaluations[`${query.phase}:${query.number ?? ""}`];
  if (!found) throw new Error("this evaluation is not in the file");
  return found;
}

export async function rowsOf(run, query, offset, limit) {
  if (!file) return get(at(run, `/rollouts?${new URLSearchParams({ ...query, offset, limit })}`));
  const rows = file.rows.filter((row) => fits(row, query));
  const by = query.sort || "id", sign = query.descending ? -1 : 1;
  rows.sort((a, b) => {
    const x = a[by] ?? null, y = b[by] ?? null;
    if (x === null || y === null) return Number(x === null) - Number(y === null) || (a.id - b.id) * sign;
    return (x < y ? -1 : x > y ? 1 : a.id - b.id) * sign;
  });
  return { total: rows.length, offset, rows: rows.slice(offset, offset + limit) };
}

const yes = (word) => ["1", "true"].includes(word);
const KEPT = {
  phase: (row, v) => row.phase === v,
  number: (row, v) => row.number === Number(v),
  number_from: (row, v) => row.number !== null && row.number >= Number(v),
  group: (row, v) => row.grp === v,
  input: (row, v) => row.input_key === v,
  outcome: (row, v) => (v.startsWith("cause:") ? row.cause === v.slice(6) : row.outcome === v),
  stop: (row, v) => row.stop === v,
  error: (row, v) => row.error === v,
  reward_from: (row, v) => row.reward !== null && row.reward >= Number(v),
  reward_to: (row, v) => row.reward !== null && row.reward <= Number(v),
  tokens_from: (row, v) => row.sampled_tokens !== null && row.sampled_tokens >= Number(v),
  tokens_to: (row, v) => row.sampled_tokens !== null && row.sampled_tokens <= Number(v),
  usable: (row, v) => (row.mask_reason === null) === yes(v),
  gradient: (row, v) => (row.mask_reason === null && (row.gradient_tokens ?? 0) > 0) === yes(v),
  failed: (row, v) => (row.outcome !== "ok") === yes(v),
  cut: (row, v) => (row.cut_calls ?? 0) > 0 === yes(v),
  unparsed: (row, v) => (row.unparsed_calls ?? 0) > 0 === yes(v),
  text: (row, v) => row.searched.includes(v.toLowerCase()),
};

// The same conditions as `runs.Query`.
function fits(row, query) {
  if (query.tool === "" && row.tool_calls !== 0) return false;
  if (query.tool && !(query.tool in row.tools)) return false;
  if (query.text && query.text.length < 2) throw new Error(`a text to look for has at least 2 characters, got '${query.text}'`);
  return Object.entries(KEPT).every(([name, keeps]) => query[name] === undefined || query[name] === "" || keeps(row, query[name]));
}

export async function rolloutOf(run, id) {
  if (!file) return get(at(run, `/rollouts/${id}`));
  if (!file.rollouts[id]) throw new Error(`rollout ${id} is not in this file`);
  return { ...file.rollouts[id], texts: file.texts };
}

export async function groupOf(run, id) {
  if (!file) return get(at(run, `/groups/${id}`));
  const row = await rolloutOf(run, id);
  return { members: row.group.map((r) => file.rollouts[r.id]), history: file.histories[row.input_key] };
}

export async function compareOf(first, second) {
  return file ? compareHeld(first, second) : get(`api/compare?${new URLSearchParams({ first, second })}`);
}

// A file compares the rollouts that it holds: all of evaluations.
function compareHeld(first, second) {
  const mean = (rows, key, known = rows.map((r) => r[key]).filter((v) => v !== null)) => (known.length ? known.reduce((a, b) => a + b, 0) / known.length : null);
  const [one, other] = [first, second].map((name) => name.slice(name.lastIndexOf("@") + 1));
  const [a, b] = [one, other].map((place) => {
    const [phase, step] = place.split(":"), found = new Map();
    for (const row of file.rows) if (row.phase === phase && (step === undefined || row.step === Number(step)) && row.input_key) found.set(row.input_key, [...(found.get(row.input_key) ?? []), row]);
    return new Map([...found].map(([key, rows]) => [key, { first: rows[0].id, rollouts: rows.length, text: rows[0].input, reward: mean(rows, "score"), tokens: mean(rows, "sampled_tokens") }]));
  });
  const rows = [...a].filter(([key]) => b.has(key)).map(([key, side]) => { const against = b.get(key); return { input_key: key, text: side.text, first: side, second: against, change: side.reward === null || against.reward === null ? null : against.reward - side.reward }; });
  rows.sort((x, y) => Math.abs(y.change ?? 0) - Math.abs(x.change ?? 0) || (x.input_key < y.input_key ? -1 : 1));
  return { rows, inputs: rows.length, only_first: a.size - rows.length, only_second: b.size - rows.length, change: file.changes[`${one} ${other}`] ?? null };
}

// Call `changed` when the run (or, without a name, any run) is written, and `say` with its status. Returns what ends it.
export function listen(run, changed, say) {
  if (file) { say("from a file", file.left_out); return () => {}; }
  const events = new EventSource(`api/events?${new URLSearchParams({ run: run ?? "" })}`);
  events.onerror = () => say("no connection");
  events.onmessage = (event) => {
    const now = JSON.parse(event.data);
    if (now.status === "running" || now.status === "") say("live", "New rollouts appear here without a reload.");
    else say(now.status.split(":")[0], now.status, true);
    if (now.changed) changed();
  };
  return () => events.close();
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
