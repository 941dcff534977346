// Where the data comes from: the server, or what an exported file holds. Both give the same values.
const held = document.getElementById("held");
const file = held ? JSON.parse(held.textContent) : null;
export const exported = file !== null;

async function get(path) {
  const answer = await fetch(path);
  const value = await answer.json();
  if (!answer.ok) throw new Error(value?.error?.message ?? `the server answered ${answer.status}`);
  return value;
}

export async function runList() {
  return file ? [{ name: file.name, rollouts: file.total, problem: null }] : get("api/runs");
}

export async function overview(run) {
  return file ? file.overview : get(`api/runs/${encodeURIComponent(run)}`);
}

export async function facetsOf(run) {
  return file ? file.overview.facets : get(`api/runs/${encodeURIComponent(run)}/facets`);
}

export async function rowsOf(run, query, offset, limit) {
  if (!file) return get(`api/runs/${encodeURIComponent(run)}/rollouts?${new URLSearchParams({ ...query, offset, limit })}`);
  const rows = file.rows.filter((row) => fits(row, query));
  const by = query.sort || "id", sign = query.descending ? -1 : 1;
  rows.sort((a, b) => {
    const x = a[by] ?? null, y = b[by] ?? null;
    if (x === null || y === null) return (x === null) - (y === null);
    return (x < y ? -1 : x > y ? 1 : a.id - b.id) * sign;
  });
  return { total: rows.length, offset, rows: rows.slice(offset, offset + limit) };
}

function fits(row, q) {
  if (q.phase && row.phase !== q.phase) return false;
  if (q.step !== undefined && q.step !== "" && row.step !== Number(q.step)) return false;
  if (q.outcome && (q.outcome.startsWith("cause:") ? row.cause !== q.outcome.slice(6) : row.outcome !== q.outcome)) return false;
  if (q.tool && !(row.tools && q.tool in row.tools)) return false;
  if (q.reward_from && !(row.reward !== null && row.reward >= Number(q.reward_from))) return false;
  if (q.reward_to && !(row.reward !== null && row.reward <= Number(q.reward_to))) return false;
  if (q.tokens_from && !(row.sampled_tokens !== null && row.sampled_tokens >= Number(q.tokens_from))) return false;
  if (!q.text) return true;
  return JSON.stringify([file.rollouts[row.id]?.dialogue, row.error]).toLowerCase().includes(q.text.toLowerCase());
}

export async function rolloutOf(run, id) {
  if (!file) return get(`api/runs/${encodeURIComponent(run)}/rollouts/${id}`);
  if (!file.rollouts[id]) throw new Error(`rollout ${id} is not in this file`);
  return file.rollouts[id];
}

export async function groupOf(run, id) {
  if (!file) return get(`api/runs/${encodeURIComponent(run)}/groups/${id}`);
  const first = file.rollouts[id]?.group[0].id;
  if (!file.groups[first]) throw new Error(`the group of rollout ${id} is not in this file`);
  return file.groups[first];
}

export async function textsOf(run, ids) {
  const wanted = [...new Set(ids)];
  if (file) return file.texts;
  const found = {};
  for (let at = 0; at < wanted.length; at += 10000) {
    const answer = await fetch(`api/runs/${encodeURIComponent(run)}/texts`, { method: "POST", body: JSON.stringify(wanted.slice(at, at + 10000)) });
    if (answer.ok) Object.assign(found, await answer.json());
  }
  return found;
}

// What stands for an input in a list: its prompt, else the whole of it.
function inputOf(rollout) {
  const payload = rollout?.detail?.payload;
  return payload && Object.keys(payload).length ? (typeof payload.prompt === "string" ? payload.prompt : JSON.stringify(payload)).slice(0, 300) : null;
}

// A file compares what it holds: inputs of its own rollouts.
function compareHeld(first, second) {
  const side = (name) => {
    const [phase, step] = name.slice(name.lastIndexOf("@") + 1).split(":"), found = new Map();
    for (const row of file.rows.filter((r) => r.phase === phase && (step === undefined || r.step === Number(step)) && r.input_key)) {
      const entry = found.get(row.input_key) ?? { scores: [], tokens: [], first: row.id, rollouts: 0 };
      if (row.score !== null) entry.scores.push(row.score);
      if (row.sampled_tokens !== null) entry.tokens.push(row.sampled_tokens);
      entry.first = Math.min(entry.first, row.id);
      entry.rollouts++;
      found.set(row.input_key, entry);
    }
    const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
    return new Map([...found].map(([key, e]) => [key, { reward: mean(e.scores), tokens: mean(e.tokens), first: e.first, rollouts: e.rollouts }]));
  };
  const a = side(first), b = side(second), rows = [];
  for (const [key, before] of a) {
    const after = b.get(key);
    if (after) rows.push({ input_key: key, text: inputOf(file.rollouts[before.first]), change: before.reward === null || after.reward === null ? null : after.reward - before.reward, first: before, second: after });
  }
  rows.sort((x, y) => Math.abs(y.change ?? 0) - Math.abs(x.change ?? 0) || (x.input_key < y.input_key ? -1 : 1));
  return { rows, inputs: rows.length, only_first: a.size - rows.length, only_second: b.size - rows.length };
}

export async function compareOf(first, second) {
  if (file) return compareHeld(first, second);
  return get(`api/compare?${new URLSearchParams({ first, second })}`);
}

export function listen(changed, state) {
  if (file) return state("from a file");
  const events = new EventSource("api/events");
  events.onopen = () => state("live");
  events.onerror = () => state("no connection");
  events.onmessage = (event) => changed(JSON.parse(event.data).run);
}

function bytes(text) {
  return Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
}

// A sequence as arrays; NaN in them is absent.
export function decoded(sequence) {
  const numbers = (text) => (text === null ? null : new Float32Array(bytes(text).buffer));
  return {
    ...sequence,
    ids: new Int32Array(bytes(sequence.ids).buffer),
    mask: bytes(sequence.mask),
    logprobs: numbers(sequence.logprobs),
    trainer_logprobs: numbers(sequence.trainer_logprobs),
    entropies: numbers(sequence.entropies),
    versions: sequence.versions === null ? null : sequence.versions.flatMap(([v, n]) => Array(n).fill(v)),
  };
}
