// @ts-check
// Elements out of plain values. Text is always a text node: nothing that a model wrote is ever read as markup.
export function el(name, options = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "value") made.value = value;
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  return filled(made, children);
}

export function svg(name, options = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(options)) made.setAttribute(key, String(value));
  return filled(made, children);
}

function filled(made, children) {
  const known = children.flat(3).filter((child) => child !== null && child !== undefined && child !== false);
  made.append(...known.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

// Absent is not zero: it is a dash.
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const n = Number(value); // of true, too
  if (Number.isInteger(n) && Math.abs(n) < 1e15) return String(n);
  return Math.abs(n) < 0.001 ? n.toExponential(1) : n.toFixed(digits);
}

// Why a rollout ended, for a reader.
export const stopText = (stop) => (stop === "stop" ? "finished by itself" : stop);

export const to = (href, ...children) => el("a", { href }, ...children);
export const soft = (...children) => el("span", { class: "soft" }, ...children);
export const notice = (...children) => el("p", { class: "notice" }, ...children);
export const fold = (title, ...children) => el("details", { class: "card" }, el("summary", {}, title), ...children);
export const filters = (...children) => el("form", { class: "filters", onsubmit: (event) => event.preventDefault() }, ...children);

// Act when nothing was typed for a moment, unless another address is shown then.
export function onTyped(field, act) {
  const address = location.hash;
  let waiting = 0;
  field.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => location.hash === address && act(), 250); });
}

// All numbers in an object, by their path.
export const numbersIn = (given, prefix = "") => Object.entries(given).flatMap(([key, value]) => (typeof value === "number" ? [[prefix + key, value]] : value && typeof value === "object" && !Array.isArray(value) ? numbersIn(value, `${prefix}${key}/`) : []));

// The beginning of an input, as a link if there is an address.
export const inputOf = ({ text, input_key: key }, href) => el(href ? "a" : "span", { class: "input", href, title: text ?? key }, text ?? key);

// A choice with a label, of values with their texts.
export function choice(name, label, value, options, chosen) {
  const made = el("select", { name, onchange: chosen && ((event) => chosen(event.target.value)) }, options.map(([v, text]) => el("option", { value: v }, text)));
  made.value = String(value ?? "");
  return el("label", {}, label, made);
}

// Boxes with a label, a value and what is added in small letters: [label, value, address, small, title].
export const facts = (rows) => el("div", { class: "facts" }, rows.map(([label, value, href, small, title]) => el(href ? "a" : "div", { class: "card fact", href, title }, el("span", {}, label), el("b", {}, value), small ? el("small", {}, small) : null)));

export function many(count, one, several = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : several}`;
}

// A table from its heads and rows of cells. A head that begins with "#" is of numbers, which are on the right.
export function table(heads, rows, options = {}) {
  const right = heads.map((h) => h.startsWith("#"));
  const cell = (value, i) => el("td", { class: right[i] ? "num" : null }, value);
  return el("div", { class: "card wide" }, el("table", options,
    el("thead", {}, el("tr", {}, heads.map((h, i) => el("th", { class: right[i] ? "num" : null }, right[i] ? h.slice(1) : h)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell))))));
}

export function section(title, note, ...children) {
  return children.flat().some(Boolean) ? [el("h2", {}, title), note ? el("p", { class: "soft" }, note) : null, ...children] : [];
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  return `${(100 * share).toFixed(share > 0 && share < 0.01 ? 1 : 0)} %`;
}

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  const clock = (n) => String(Math.floor(n)).padStart(2, "0");
  return s < 120 ? `${number(s, s < 10 ? 2 : 0)} s` : `${Math.floor(s / 3600)}:${clock((s / 60) % 60)}:${clock(s % 60)}`;
}

export function outcomeClass(row) {
  if (row.outcome === "ok") return row.mask_reason ? "warn" : "good";
  return row.cause === "policy" ? "warn" : "bad";
}

export function outcomeText(row) {
  return row.outcome + (row.cause ? ` (${row.cause})` : "") + (row.mask_reason && row.outcome === "ok" ? `, ${row.mask_reason}` : "");
}

// Put rows in the order of a value. Rows without it come last.
export function sortBy(rows, value, descending, tie = (_a, _b) => 0) {
  const sign = descending ? -1 : 1;
  return rows.sort((a, b) => {
    const x = value(a) ?? null, y = value(b) ?? null;
    if (x === null || y === null) return Number(x === null) - Number(y === null) || tie(a, b) * sign;
    return (x < y ? -1 : x > y ? 1 : tie(a, b)) * sign;
  });
}

// A pattern of a text without regard to case, which is folded as in the server's index.
export const patternOf = (text) => new RegExp(`(${text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&")})`, "giu");

// The address of a page: #/run/NAME/page?filters
export function link(run, page = "", query = {}) {
  const words = new URLSearchParams(Object.entries(query).filter(([k, v]) => v !== null && v !== undefined && (v !== "" || k === "tool")));
  const tail = words.toString();
  return `#/run/${encodeURIComponent(run)}${page ? `/${page}` : ""}${tail ? `?${tail}` : ""}`;
}

export function messageText(message) {
  const content = message.content;
  if (typeof content === "string") return content;
  if (Array.isArray(content)) {
    return content.map((p) => (typeof p === "string" ? p : p.text ?? p.content ?? `[${p.type ?? "part"}]`)).map((text) => (typeof text === "string" ? text : JSON.stringify(text))).join("");
  }
  return content === null || content === undefined ? "" : JSON.stringify(content);
}

export const toolCalls = (message) => (Array.isArray(message.tool_calls) ? message.tool_calls : []);

export function messageCalls(message) {
  const words = (given) => (typeof given === "string" ? given : JSON.stringify(given ?? ""));
  return toolCalls(message).map((c) => `${c?.function?.name ?? "?"}(${words(c?.function?.arguments)})`);
}

export function tip(text, event) {
  const shown = document.getElementById("tip");
  shown.hidden = text === null;
  if (text === null) return;
  shown.textContent = text;
  const room = shown.getBoundingClientRect();
  shown.style.left = `${Math.min(event.clientX + 14, innerWidth - room.width - 8)}px`;
  shown.style.top = `${Math.min(event.clientY + 18, innerHeight - room.height - 8)}px`;
}

// Show a tip while the pointer is on an element. No text, no tip.
export function hint(element, textOf) {
  element.addEventListener("mousemove", (event) => tip(textOf(event), event));
  element.addEventListener("mouseleave", () => tip(null));
  return element;
}

// Give what is shown another address.
export function readdress(address) {
  history.replaceState(null, "", address);
  document.getElementById("page").dataset.shown = location.hash;
}
