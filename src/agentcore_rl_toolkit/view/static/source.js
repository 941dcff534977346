// Where the data comes from: the server.
async function get(path) {
  const answer = await fetch(path);
  const value = await answer.json();
  if (!answer.ok) throw new Error(value?.error?.message ?? `the server answered ${answer.status}`);
  return value;
}

export async function runList() {
  return get("api/runs");
}

export async function overview(run) {
  return get(`api/runs/${encodeURIComponent(run)}`);
}

export async function facetsOf(run) {
  return get(`api/runs/${encodeURIComponent(run)}/facets`);
}

export async function rowsOf(run, query, offset, limit) {
  return get(`api/runs/${encodeURIComponent(run)}/rollouts?${new URLSearchParams({ ...query, offset, limit })}`);
}

export async function rolloutOf(run, id) {
  return get(`api/runs/${encodeURIComponent(run)}/rollouts/${id}`);
}

export async function groupOf(run, id) {
  return get(`api/runs/${encodeURIComponent(run)}/groups/${id}`);
}

export async function textsOf(run, ids) {
  const wanted = [...new Set(ids)];
  const found = {};
  for (let at = 0; at < wanted.length; at += 10000) {
    const answer = await fetch(`api/runs/${encodeURIComponent(run)}/texts`, { method: "POST", body: JSON.stringify(wanted.slice(at, at + 10000)) });
    if (answer.ok) Object.assign(found, await answer.json());
  }
  return found;
}

export async function compareOf(first, second) {
  return get(`api/compare?${new URLSearchParams({ first, second })}`);
}

export function listen(changed, state) {
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
