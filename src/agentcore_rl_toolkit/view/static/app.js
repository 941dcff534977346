// @ts-check
import { el, link, notice, tip, to } from "./dom.js";
import { exported, leftOut, listen, runList, versionOf } from "./source.js";
import { mount, unmount } from "./charts.js";
import { runsPage } from "./runs.js";
import { inputsPage, runPage } from "./run.js";
import { rolloutsPage } from "./rollouts.js";
import { rolloutPage } from "./rollout.js";
import { groupPage } from "./group.js";
import { evaluationPage } from "./evaluation.js";
import { comparePage } from "./compare.js";

const page = document.getElementById("page"), bar = document.getElementById("bar");
const live = el("span", { class: "live", role: "status" });
const keys = el("dialog", { id: "keys", "aria-label": "Keys" }, el("h2", {}, "Keys"), el("table", {}, [["j, k", "next and previous rollout of the list"], ["Enter", "open the rollout"], ["/", "search the text of the rollouts, or find in one"], ["g", "the group of this rollout"], ["t", "dialogue or tokens"], ["l", "the least likely token of this rollout"], ["r", "the rollouts of this run"], ["?", "these keys"], ["Esc", "close"]].map(([key, what]) => el("tr", {}, el("td", {}, el("kbd", {}, key)), el("td", {}, what)))), el("form", { method: "dialog" }, el("button", {}, "Close")));
document.body.append(keys);
let current = null, drawn = 0, watched = null, stop = () => {};

function unescaped(word) {
  try { return decodeURIComponent(word); } catch { return word; } // a lone %
}

function read() {
  const address = location.hash, [path, words = ""] = address.replace(/^#\/?/, "").split("?");
  const [kind, run, name, id] = path.split("/").map(unescaped);
  return { address, kind: kind ?? "", run, name: name ?? "", id, query: Object.fromEntries(new URLSearchParams(words)) };
}

function go(address, replace = false) {
  if (!replace) { location.hash = address; return; }
  history.replaceState(null, "", address);
  draw(true);
}

function drawBar(at) {
  const here = (yes) => (yes ? "page" : null);
  const parts = [el("strong", {}, "AgentCore RL"), exported ? null : el("a", { href: "#/", "aria-current": here(!at.kind) }, "Runs")];
  if (at.kind === "run") parts.push(el("a", { href: link(at.run), "aria-current": here(!at.name) }, at.run), el("a", { href: link(at.run, "rollouts"), "aria-current": here(at.name === "rollouts") }, "Rollouts"));
  parts.push(el("a", { href: "#/compare", "aria-current": here(at.kind === "compare") }, "Compare"));
  bar.replaceChildren(...parts.filter(Boolean), live, el("button", { type: "button", id: "help", title: "Keys (?)", "aria-label": "Keys", onclick: () => keys.showModal() }, "?"));
}

async function pageOf(at) {
  if (at.kind === "compare") return comparePage(at.query, go);
  if (at.kind !== "run") {
    const runs = await runList();
    if (runs.length === 1 && runs[0].problem === null) { history.replaceState(null, "", link(runs[0].name)); return pageOf(Object.assign(at, read())); }
    return runsPage(at.query, go);
  }
  const pages = { rollouts: () => rolloutsPage(at.run, at.query, go), rollout: () => rolloutPage(at.run, at.id, at.query, go), group: () => groupPage(at.run, at.id, at.query, go), inputs: () => inputsPage(at.run, at.query), evaluation: () => evaluationPage(at.run, at.query) };
  return (pages[at.name] ?? (() => runPage(at.run, at.query, go, mount)))();
}

// `data-shown` is the address whose content is shown. Until another one's comes, the page is busy and takes no keys.
async function draw(keep = false) {
  const mine = ++drawn, at = read();
  if (page.dataset.shown !== at.address) { page.setAttribute("aria-busy", "true"); current = null; }
  let made, known; // the version is read before the data: a change meanwhile is not missed
  try { known = await versionOf(at.run ?? ""); made = await pageOf(at); } catch (error) { made = [el("h1", {}, "This cannot be shown"), notice(error.message)]; }
  if (mine !== drawn) return; // another address was asked for meanwhile
  tip(null);
  const active = /** @type {any} */ (document.activeElement), focused = keep ? active?.name : null, scrolled = keep ? scrollY : 0;
  const { value: typed, selectionStart: caret } = active ?? {};
  const named = (d) => d.id || d.querySelector("summary")?.textContent, opened = keep ? new Set([...page.querySelectorAll("details[open]")].map(named)) : null;
  current = Array.isArray(made) ? { nodes: made } : made;
  drawBar(at);
  const [head, ...nodes] = current.nodes.flat(3).filter(Boolean);
  unmount(page);
  page.replaceChildren(head, ...(leftOut ? [notice(leftOut)] : []), ...nodes);
  page.dataset.shown = at.address;
  document.title = at.run ? `${at.run}: ${at.name || "run"}` : "Runs";
  mount(page);
  scrollTo(0, scrolled);
  current.shown?.();
  if (opened) page.querySelectorAll("details").forEach((d) => { if (opened.has(named(d))) d.open = true; });
  if (focused) {
    const again = /** @type {any} */ (page.querySelector(`[name="${CSS.escape(focused)}"]`));
    again?.focus();
    if (again && again.value !== typed) { again.value = typed; again.dispatchEvent(new Event("input", { bubbles: true })); } // typed while the data came
    if (caret && again?.type === "search") again.setSelectionRange(caret, caret);
  }
  page.removeAttribute("aria-busy");
  watch(at, known);
}

addEventListener("hashchange", () => draw());
addEventListener("keydown", (event) => {
  const { tagName } = /** @type {HTMLElement} */ (event.target);
  if (keys.open || event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT", "TEXTAREA"].includes(tagName)) return;
  if (event.key === "Enter" && ["A", "BUTTON", "SUMMARY"].includes(tagName)) return; // it acts by itself
  const at = read();
  if (event.key === "?") keys.showModal();
  else if (event.key === "r" && at.kind === "run") go(link(at.run, "rollouts"));
  else if (!current?.keys?.(event.key)) return;
  event.preventDefault();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true)); // canvases keep their colours

// Follow what the page shows: its run, or the list of runs. A rollout, a group and a comparison stay as they are.
function watch(at, known) {
  const run = at.kind === "run" ? at.run : at.kind === "" ? "" : null;
  if (run === watched) return;
  stop();
  watched = run;
  if (run === null) { live.textContent = ""; return; }
  const say = (text, title = "", ended = false) => { [live.textContent, live.title] = [text, title]; live.classList.toggle("ended", ended); };
  stop = listen(run, known, () => (["rollout", "group"].includes(read().name) ? null : current?.changed ? current.changed() : draw(true)), say);
}
draw();
