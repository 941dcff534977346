import { el, many, svg, small, tip } from "./dom.js";

const WIDTH = 360, HEIGHT = 182, LEFT = 44, RIGHT = 10, TOP = 10, BOTTOM = 36;
const axisName = () => svg("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "step");

function ticks(low, high) {
  const step = 10 ** Math.floor(Math.log10((high - low) / 3 || 1));
  const wide = [1, 2, 5, 10].map((n) => n * step).find((n) => (high - low) / n <= 4) ?? step * 10;
  const found = [];
  // By whole multiples: a sum of steps would end beside 0.
  for (let n = Math.ceil(low / wide - 1e-9); n * wide <= high + wide * 1e-9; n++) found.push(Number((n * wide).toPrecision(8)));
  return found;
}

// curves: [{name, points: [{x, y, low?, high?}], kind?: "other" or "held"}]. Points without a value are left out, not drawn as 0.
// The parts of a curve without a missing step. Evaluations lie where they were made.
function segments(curve) {
  const found = [];
  let before = null;
  for (const p of curve.points) {
    const missing = before === null || (curve.kind !== "held" && p.x - before.x > 1);
    missing ? found.push([p]) : found.at(-1).push(p);
    before = p;
  }
  return found;
}

export function lineChart(title, curves, options = {}) {
  const shown = curves.map((c) => ({ ...c, points: c.points.filter((p) => p.y !== null && p.y !== undefined) })).filter((c) => c.points.length);
  if (!shown.length) return null;
  const all = shown.flatMap((c) => c.points);
  const xs = all.map((p) => p.x);
  let low = Math.min(options.from ?? Infinity, ...all.map((p) => p.low ?? p.y)), high = Math.max(options.to ?? -Infinity, ...all.map((p) => p.high ?? p.y));
  if (low === high && options.from === undefined) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2]; // a constant is in the middle
  const left = Math.min(...xs), right = Math.max(...xs), tall = high - low || 1, wide = right - left || 1;
  const X = (x) => LEFT + ((x - left) / wide) * (WIDTH - LEFT - RIGHT) + (right === left ? (WIDTH - LEFT - RIGHT) / 2 : 0);
  const Y = (y) => TOP + (1 - (y - low) / tall) * (HEIGHT - TOP - BOTTOM);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  for (const at of ticks(low, low + tall)) picture.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: Y(at), y2: Y(at) }), svg("text", { x: LEFT - 6, y: Y(at) + 4, "text-anchor": "end" }, small(at)));
  for (const at of ticks(left, right).filter(Number.isInteger)) picture.append(svg("text", { x: X(at), y: HEIGHT - 20, "text-anchor": "middle" }, at));
  picture.append(axisName());
  for (const curve of shown) {
    const second = curve.kind ? ` ${curve.kind}` : "";
    const banded = curve.points.filter((p) => p.low !== undefined && p.low !== null);
    if (banded.length > 1) picture.append(svg("polygon", { class: "band", points: [...banded.map((p) => `${X(p.x)},${Y(p.high)}`), ...banded.toReversed().map((p) => `${X(p.x)},${Y(p.low)}`)].join(" ") }));
    for (const part of segments(curve)) picture.append(svg("polyline", { class: `curve${second}`, points: part.map((p) => `${X(p.x)},${Y(p.y)}`).join(" ") }));
    for (const p of curve.points) {
      const dot = svg("circle", { class: curve.kind ? `${curve.kind}-dot` : "dot", cx: X(p.x), cy: Y(p.y), r: curve.points.length > 80 ? 2 : 3.5 });
      dot.addEventListener("mousemove", (event) => tip(`step ${p.x}\n${curve.name} ${small(p.y)}${p.note ? `\n${p.note}` : ""}`, event));
      dot.addEventListener("mouseleave", () => tip(null));
      picture.append(p.href ? svg("a", { href: p.href, "aria-label": `step ${p.x}` }, dot) : dot);
    }
  }
  const named = shown.length > 1 ? el("div", { class: "soft" }, shown.map((c) => [el("i", { class: `key ${c.kind ?? "curve"}-key` }), c.name])) : null;
  return el("div", { class: "card" }, el("b", {}, title), picture, named);
}

const COLOURS = { ok: "var(--good)", policy: "var(--warn)", agent: "var(--bad)", infrastructure: "var(--soft)", other: "var(--main)" };

// One bar per step, parts from the bottom: what ended ok, then failures by cause.
export function stackedChart(title, steps, from = 0) {
  if (!steps.length) return null;
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  const most = Math.max(...steps.map((s) => s.rollouts)), wide = (WIDTH - LEFT - RIGHT) / steps.length, seen = new Set();
  for (const at of ticks(0, most)) {
    const y = TOP + (1 - at / most) * (HEIGHT - TOP - BOTTOM);
    picture.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }), svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, at));
  }
  const named = new Set(ticks(steps[0].step + from, steps.at(-1).step + from).filter(Number.isInteger));
  picture.append(axisName());
  steps.forEach((step, i) => {
    if (named.has(step.step + from) || steps.length === 1) picture.append(svg("text", { x: LEFT + (i + 0.5) * wide, y: HEIGHT - 20, "text-anchor": "middle" }, step.step + from));
    const failed = Object.values(step.causes).reduce((a, b) => a + b, 0);
    const parts = [["ok", step.rollouts - failed], ...Object.entries(step.causes)];
    let base = 0;
    for (const [name, count] of parts) {
      if (!count) continue;
      seen.add(name);
      const tall = (count / most) * (HEIGHT - TOP - BOTTOM), y = HEIGHT - BOTTOM - base - tall;
      const bar = svg("rect", { x: LEFT + i * wide + wide * 0.1, width: Math.max(1, wide * 0.8), y, height: tall });
      bar.style.fill = COLOURS[name] ?? COLOURS.other;
      bar.addEventListener("mousemove", (event) => tip(`step ${step.step + from}\n${name}: ${many(count, "rollout")}\n${Object.entries(step.outcomes).map(([o, n]) => `${n} ${o}`).join("\n")}`, event));
      bar.addEventListener("mouseleave", () => tip(null));
      picture.append(bar);
      base += tall;
    }
  });
  const keys = [...seen].map((name) => { const key = el("i", { class: "key" }); key.style.background = COLOURS[name] ?? COLOURS.other; return [key, name]; });
  return el("div", { class: "card" }, el("b", {}, title), picture, el("div", { class: "soft" }, keys));
}

// A small curve without axes, for lists.
export function sparkline(values, title) {
  const known = values.map((y, x) => ({ x, y })).filter((p) => p.y !== null && p.y !== undefined);
  if (known.length < 2) return null;
  const low = Math.min(0, ...known.map((p) => p.y)), high = Math.max(1, ...known.map((p) => p.y)), wide = known.at(-1).x - known[0].x;
  const points = known.map((p) => `${(2 + ((p.x - known[0].x) / wide) * 116).toFixed(1)},${(22 - ((p.y - low) / (high - low)) * 20).toFixed(1)}`).join(" ");
  return svg("svg", { class: "spark", viewBox: "0 0 120 24", width: 120, height: 24, role: "img", "aria-label": title }, svg("polyline", { class: "curve", points }));
}
