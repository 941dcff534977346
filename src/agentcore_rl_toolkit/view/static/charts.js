// @ts-check
// Charts of a run, drawn by uPlot. A plot is made when its card is shown, because a canvas needs a width.
import { el, number, svg } from "./dom.js";

const HEIGHT = 170, LABELLED = 60;
const COLOURS = { main: "--main", held: "--good", other: "--warn" };
export const RING = ["--main", "--warn", "--good", "--bad", "--violet", "--cyan", "--soft"];
const waiting = new WeakMap();

// The colour of a custom property, as a canvas takes it.
function colour(name, alpha = 1) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(${name})`;
  const [r, g, b] = getComputedStyle(probe).color.match(/[\d.]+/g);
  probe.remove();
  return `rgba(${r}, ${g}, ${b}, ${alpha})`;
}

// Steps in order. Between the first and the last none is left out, so that a curve stops at a missing one.
function stepsOf(curves) {
  const known = [...new Set(curves.flatMap((c) => c.points.map((p) => p.x)))].sort((a, b) => a - b);
  if (known.length < 2 || known.at(-1) - known[0] > 20000) return known;
  return [...new Set([...known, ...Array.from({ length: Math.floor(known.at(-1)) - Math.ceil(known[0]) + 1 }, (_, i) => Math.ceil(known[0]) + i)])].sort((a, b) => a - b);
}

/** @returns {any} */
const abscissa = (options) => ({ label: options.x ?? "step", value: (_, v) => (v === null ? "" : number(v)) });
const bandOf = (p) => (typeof p?.low === "number" ? ` (${number(p.low)} to ${number(p.high)})` : "");
// Labels of an axis, all in one notation.
const ticks = (values) => values.map((v) => (v === null ? "" : v !== 0 && Math.max(...values.map(Math.abs)) < 0.001 ? v.toExponential(0) : String(Number(v.toPrecision(4)))));

// curves: [{name, points: [{x, y, low?, high?, href?}], kind?}]. A missing value is a gap; `held` curves are joined.
export function lineChart(title, curves, options = {}) {
  const shown = curves.map((c) => ({ ...c, points: c.points.filter((p) => p.y !== null && p.y !== undefined) })).filter((c) => c.points.length);
  if (!shown.length) return null;
  const xs = stepsOf(shown), data = [xs], series = [abscissa(options)], bands = [], hrefs = [];
  for (const [n, curve] of shown.entries()) {
    const points = new Map(curve.points.map((p) => [p.x, p])), name = curve.colour ?? COLOURS[curve.kind] ?? RING[n % RING.length];
    hrefs.push(points);
    data.push(xs.map((x) => points.get(x)?.y ?? null));
    series.push({ label: curve.name, stroke: () => colour(name), width: 2, dash: curve.kind === "held" ? [4, 3] : undefined, spanGaps: curve.kind === "held" || options.join === true,
      points: { show: xs.length <= LABELLED || curve.kind === "held", size: 6 }, value: (_, v, __, i) => (i === null ? "" : number(v) + bandOf(points.get(xs[i]))) });
    if (curve.points.some((p) => p.low !== undefined && p.low !== null)) {
      for (const key of ["high", "low"]) {
        data.push(xs.map((x) => points.get(x)?.[key] ?? null));
        series.push({ label: `${curve.name}, ${key}`, class: "u-band", stroke: () => colour(name, 0.25), width: 1, spanGaps: curve.kind === "held", points: { show: false } });
      }
      bands.push({ series: [data.length - 2, data.length - 1], fill: () => colour(name, 0.13) });
    }
  }
  return plotted(title, data, { series, bands }, options, hrefs);
}

// One bar per step, its parts on top of each other: parts are [{name, colour, values}] over xs.
export function stackedChart(title, xs, parts, options = {}) {
  const known = parts.filter((p) => p.values.some((v) => v));
  if (!known.length) return null;
  const sums = xs.map(() => 0), data = [xs], series = [abscissa(options)];
  // The tallest first: each lower part is drawn over it.
  const stack = known.map((part) => part.values.map((v, i) => (sums[i] += v ?? 0)));
  for (let n = known.length - 1; n >= 0; n--) {
    const name = known[n].colour ?? RING[n % RING.length];
    data.push(stack[n]);
    series.push({ label: known[n].name, stroke: () => colour(name), fill: () => colour(name), width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.8, 60], gap: 0 }), value: (_, __, ___, i) => (i === null ? "" : number(known[n].values[i] ?? 0)) });
  }
  return plotted(title, data, { series, bands: [] }, { from: 0, bars: true, ...options }, options.hrefs ? [new Map(xs.map((x, i) => [x, { href: options.hrefs[i] }]))] : []);
}

function plotted(title, data, { series, bands }, options, hrefs) {
  const box = el("div", { class: "plot", role: "img", "aria-label": options.label ?? title });
  const card = el("div", { class: `card chart ${options.class ?? ""}`, "data-title": title }, el("b", { title: options.note }, title), options.note ? el("span", { class: "soft note" }, options.note) : null, box);
  const axis = { stroke: () => colour("--soft"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const range = (_, low, high) => {
    if (low === null) return [0, 1];
    let [from, to] = [Math.min(low, options.from ?? low), Math.max(high, options.to ?? high)];
    if (from === to && from === options.from) to = from + 1;
    if (from === to) [from, to] = [from - (Math.abs(from) || 1) / 2, to + (Math.abs(to) || 1) / 2]; // a constant is in the middle
    const room = (to - from) * 0.06;
    return [options.from !== undefined && from === options.from ? from : from - room, to + room];
  };
  const apart = options.bars ? Math.min(1, ...data[0].slice(1).map((x, i) => x - data[0][i])) : 0;
  const around = (_, low, high) => (options.bars ? [low - 0.6 * apart, high + 0.6 * apart] : low === high ? [low - 1, high + 1] : [low, high]);
  waiting.set(box, () => {
    const made = new uPlot({ width: Math.max(200, box.clientWidth), height: options.height ?? HEIGHT, series, bands, cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: around }, y: { range } },
      axes: [{ ...axis, size: 28, ...(options.x ? { values: (_, v) => ticks(v) } : { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000], values: (_, v) => v.map((x) => (Number.isInteger(x) ? String(x) : "")) }) }, { ...axis, size: 50, values: (_, v) => (options.bars ? v.map((y) => (Number.isInteger(y) ? String(y) : "")) : ticks(v)) }],
      legend: { live: true } }, data, box);
    const at = (i) => (i === null || i === undefined ? null : hrefs.map((points) => points.get(data[0][i])?.href).find(Boolean));
    made.over.addEventListener("mousemove", () => { made.over.style.cursor = at(made.cursor.idx) ? "pointer" : "default"; });
    made.over.addEventListener("click", () => { const href = at(made.cursor.idx); if (href && getSelection().isCollapsed) location.hash = href; });
    box.chart = made;
    new ResizeObserver(() => { if (box.clientWidth && Math.abs(box.clientWidth - made.width) > 1) made.setSize({ width: box.clientWidth, height: options.height ?? HEIGHT }); }).observe(box);
  });
  return card;
}

// Make the plots of what is on the page.
export function mount(root) {
  for (const box of root.querySelectorAll(".plot")) {
    const make = waiting.get(box);
    if (make && box.clientWidth) { waiting.delete(box); make(); }
  }
}

export const unmount = (root) => root.querySelectorAll(".plot").forEach((box) => box.chart?.destroy()); // uPlot keeps it

// A small curve without axes, for lists.
export function sparkline(values, title) {
  const known = values.map((y, x) => ({ x, y })).filter((p) => p.y !== null && p.y !== undefined);
  if (known.length < 2) return null;
  const low = Math.min(0, ...known.map((p) => p.y)), high = Math.max(1, ...known.map((p) => p.y)), wide = known.at(-1).x - known[0].x;
  const points = known.map((p) => `${(2 + ((p.x - known[0].x) / wide) * 116).toFixed(1)},${(22 - ((p.y - low) / (high - low)) * 20).toFixed(1)}`).join(" ");
  return svg("svg", { class: "spark", viewBox: "0 0 120 24", width: 120, height: 24, role: "img", "aria-label": title }, svg("polyline", { class: "curve", points }));
}
