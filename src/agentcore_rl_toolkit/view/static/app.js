import { el, link, tip } from "./dom.js";
import { exported, listen, runList } from "./source.js";
import { runPage, runsPage } from "./run.js";
import { rolloutsPage } from "./rollouts.js";
import { rolloutPage } from "./rollout.js";
import { groupPage } from "./group.js";
import { comparePage } from "./compare.js";

const page = document.getElementById("page"), bar = document.getElementById("bar");
const LIVE = "What is written to a run shows up here by itself.";
const live = el("span", { class: "live", title: LIVE });
const keys = el("dialog", { id: "keys", "aria-label": "Keys" }, el("h2", {}, "Keys"), el("table", {}, [["j, k", "next and previous rollout, in a list and in a group"], ["Enter", "open the rollout"], ["/", "search the text of the rollouts"], ["g", "the group of this rollout"], ["l", "the least likely token of this rollout"], ["r", "the rollouts of this run"], ["?", "these keys"], ["Esc", "close"]].map(([key, what]) => el("tr", {}, el("td", {}, el("kbd", {}, key)), el("td", {}, what)))), el("form", { method: "dialog" }, el("button", {}, "Close")));
document.body.append(keys);
let current = null, drawn = 0, connection = "";

function read() {
  const [path, words = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [kind, run, name, id] = path.split("/").map(decodeURIComponent);
  return { kind: kind ?? "", run, name: name ?? "", id, query: Object.fromEntries(new URLSearchParams(words)) };
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
    if (runs.length === 1 && runs[0].problem === null) { history.replaceState(null, "", link(runs[0].name)); return pageOf(read()); }
    return runsPage();
  }
  if (at.name === "rollouts") return rolloutsPage(at.run, at.query, go);
  if (at.name === "rollout") return rolloutPage(at.run, at.id, at.query, go);
  if (at.name === "group") return groupPage(at.run, at.id, at.query, go);
  return runPage(at.run);
}

// A run that has ended is not live, whatever the connection says.
async function sayState(run) {
  const status = run === undefined ? "running" : (await runList()).find((r) => r.name === run)?.status ?? "running";
  if (read().run === run) [live.textContent, live.title] = status === "running" ? [connection, LIVE] : [status.split(":")[0], status];
}

async function draw(keep = false) {
  const mine = ++drawn, focused = keep ? document.activeElement?.name : null, scrolled = keep ? scrollY : 0;
  const caret = focused && document.activeElement.selectionStart;
  let made;
  try { made = await pageOf(read()); } catch (error) { made = [el("h1", {}, "This cannot be shown"), el("p", { class: "notice" }, error.message)]; }
  if (mine !== drawn) return; // another address was asked for meanwhile
  tip(null);
  current = Array.isArray(made) ? { nodes: made } : made;
  const at = read();
  drawBar(at);
  page.replaceChildren(...current.nodes.flat(3).filter(Boolean));
  document.title = at.run ? `${at.run}: ${at.name || "run"}` : "Runs";
  current.shown?.();
  scrollTo(0, scrolled);
  if (focused) { const again = page.querySelector(`[name="${CSS.escape(focused)}"]`); again?.focus(); if (caret && again?.type === "search") again.setSelectionRange(caret, caret); }
  page.dataset.ready = String(mine);
  if (!exported) await sayState(at.run);
}

addEventListener("hashchange", () => draw());
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
  if (keys.open) return;
  const at = read();
  if (event.key === "?") keys.showModal();
  else if (event.key === "r" && at.kind === "run") go(link(at.run, "rollouts"));
  else if (!current?.keys?.(event.key)) return;
  event.preventDefault();
});
let due = 0;
listen((run) => {
  const at = read();
  if ((at.kind === "run" && at.run !== run) || (["rollout", "group"].includes(at.name)) || at.kind === "compare") return;
  clearTimeout(due);
  due = setTimeout(() => (current?.changed ? current.changed() : draw(true)), 200);
}, (state) => { connection = state; if (live.title === LIVE) live.textContent = state; });
draw();
