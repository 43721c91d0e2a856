// The live page of a flow: it asks for the list of flows once in a while, and follows one of them by server-sent events.
import { Chart, bytes, clock, compact, diagram, duration } from "/assets/charts.js";

const find = (id) => document.getElementById(id);
const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`);
let view = null, stream = null, skewMs = 0;

function make(tag, text = null, attributes = {}) {
  const element = document.createElement(tag);
  if (text !== null) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function table(headings, rows, textColumns = [0]) {
  const head = make("tr"), body = make("tbody");
  headings.forEach((name, number) => head.append(make("th", name, { scope: "col", class: textColumns.includes(number) ? "text" : "" })));
  for (const row of rows) {
    const line = make("tr");
    row.forEach((cell, number) => line.append(make("td", cell, { class: textColumns.includes(number) ? "text wrap" : "" })));
    body.append(line);
  }
  const element = make("table"), top = make("thead");
  top.append(head);
  element.append(top, body);
  return element;
}

// ------------------------------------------------------------------ light and dark

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}
const wish = window.matchMedia("(prefers-color-scheme: dark)");
const kept = () => { try { return localStorage.getItem("dovetail-theme"); } catch { return null; } };
setTheme(kept() ?? (wish.matches ? "dark" : "light"));
wish.addEventListener("change", () => { if (!kept()) setTheme(wish.matches ? "dark" : "light"); });
find("theme").addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("dovetail-theme", next); } catch { /* a private window keeps nothing */ }
  setTheme(next);
});

// ------------------------------------------------------------------ pieces of the page

const charts = {
  rate: new Chart(find("charts"), "Rows per second", compact, ["in", "out"]),
  took: new Chart(find("charts"), "Duration of micro-batches", duration, ["duration"]),
  pending: new Chart(find("charts"), "Waiting rows", compact, ["waiting"]),
  hit: new Chart(find("charts"), "Answered by the cache", percent, ["hits"]),
  memory: new Chart(find("charts"), "Memory", bytes, ["held"]),
  behind: new Chart(find("charts"), "Records behind", compact, ["behind"]),
};

function tile(label, value, unit, note, share = null) {
  const element = make("div", null, { class: "tile" });
  const number = make("div", value, { class: "value" });
  if (unit) number.append(make("span", unit, { class: "unit" }));
  element.append(make("div", label, { class: "label" }), number, make("div", note, { class: "note" }));
  if (share !== null) {
    const meter = make("div", null, { class: "meter", role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * share) });
    const fill = make("span", null, { "data-is": share > 0.9 ? "high" : "normal" });
    fill.style.width = `${Math.min(100, 100 * share)}%`;
    meter.append(fill);
    element.append(meter);
  }
  return element;
}

function showTiles() {
  const share = view.budget_bytes ? view.memory_bytes / view.budget_bytes : null;
  const took = view.series.took_ms, worst = took.length ? Math.max(...took) : null;
  find("tiles").replaceChildren(
    tile("In", compact(view.rates.in), "rows/s", "last 5 micro-batches"),
    tile("Out", compact(view.rates.out), "rows/s", `${view.batch === null ? "no" : compact(view.batch + 1)} micro-batches`),
    tile("Latency", duration(view.took_ms), "", worst === null ? "" : `at most ${duration(worst)}`),
    tile("Waiting", compact(view.pending), "rows", view.oldest_wait_ms === null ? "nothing waits" : `the oldest ${duration(view.oldest_wait_ms)}`),
    tile("Cache hits", percent(view.hit_ratio), "", "of the last micro-batch"),
    tile("Memory", bytes(view.memory_bytes), "", share === null ? "no budget declared" : `${percent(share)} of ${bytes(view.budget_bytes)}`, share),
  );
}

function showHead() {
  const WORDS = { killed: "ended without a word", new: "has not run", unreadable: "cannot be read" };
  document.title = `${view.flow}: ${view.state} – Dovetail`;
  find("name").textContent = view.flow;
  if (find("state").textContent !== (WORDS[view.state] ?? view.state)) find("state").textContent = WORDS[view.state] ?? view.state;
  find("state").dataset.is = view.state;
  const runner = view.running;
  find("stop").disabled = find("drain").disabled = !runner || view.state === "stopping";
  const parts = [
    runner ? `process ${runner.pid} on ${runner.host}, for ${duration(Date.now() + skewMs - runner.since_ms)}` : null,
    view.trigger ? `trigger ${view.trigger}` : null,
    view.time_ms ? `fresh as of ${duration(Math.max(0, Date.now() + skewMs - view.time_ms))} ago` : null,
    view.checkpoint,
  ];
  find("about").textContent = parts.filter(Boolean).join("  ·  ");
}

function showAlert() {
  const ended = view.events.find((event) => ["failed", "started", "stopped", "drain failed"].includes(event.kind));
  const error = view.problem ?? (ended && ended.error) ?? null;
  const box = find("alert");
  const text = error ? `${error.class}: ` : "";
  if (error) {
    if (box.dataset.text !== error.message) {
      box.replaceChildren(make("strong", text), error.message);
      if (error.hint) box.append(" ", make("span", error.hint, { class: "hint" }));
      box.dataset.text = error.message;
    }
  } else if (view.state === "killed") {
    const words = "The process that ran this flow has ended without a word: it was killed, or its machine went down. Nothing is lost; start the flow again.";
    if (box.dataset.text !== words) { box.replaceChildren(words); box.dataset.text = words; }
  } else { delete box.dataset.text; }
  box.hidden = !error && view.state !== "killed";
}

function showPicture() {
  const operators = new Map(view.operators.map((operator) => [operator.name, operator]));
  const labelOf = (from, to) => {
    if (to.kind === "side") return `${compact(view.side_rows[to.id.split(":")[1]] ?? 0)} rows`;
    if (from.kind === "relation") return from.version ? `version ${from.version.version}` : "";
    if (to.kind === "sink") return `${compact(view.rates.out)}/s`;
    const first = view.operators.length ? view.operators[0].name : null;
    const isAhead = !operators.has(from.id) && !(from.kind === "source" && view.picture.nodes.filter((node) => node.kind === "source").length > 1);
    if (isAhead && (to.id === first || to.kind === "divert" || to.kind === "transform")) return `${compact(view.rates.in)}/s`;
    if (operators.has(from.id)) return `${compact(operators.get(from.id).out_per_s)}/s`;
    return "";
  };
  const noteOf = (node) => {
    const operator = operators.get(node.id);
    if (operator) return [node.detail || "", `${bytes(operator.memory_bytes)}${operator.budget_bytes ? ` of ${bytes(operator.budget_bytes)}` : ""}`].filter(Boolean);
    if (node.version && node.version.rows !== undefined)
      return [`${compact(node.version.rows)} rows, ${bytes(node.version.bytes)}`, `${duration(Date.now() + skewMs - Date.parse(node.version.created_at))} old`];
    return node.detail ? [node.detail.length > 23 ? "…" + node.detail.slice(-22) : node.detail] : [];
  };
  if (view.picture.nodes.length) diagram(find("picture"), view.picture, labelOf, noteOf);
  else find("picture").replaceChildren(make("p", "The flow has not told yet what it consists of: it was last run by an older version, or never.", { class: "dim" }));
}

function showCharts() {
  const series = view.series, times = series.time_ms;
  charts.rate.update(times, [series.in, series.out]);
  charts.took.update(times, [series.took_ms]);
  charts.pending.update(times, [series.pending]);
  charts.hit.update(times, [series.hit]);
  charts.memory.update(times, [series.memory], view.budget_bytes, view.budget_bytes ? `budget ${bytes(view.budget_bytes)}` : "");
  const hasBehind = series.behind.some((value) => value !== null);
  charts.behind.svg.parentElement.hidden = !hasBehind;
  if (hasBehind) charts.behind.update(times, [series.behind]);
}

function showOperators() {
  const rows = view.operators.map((one) => [
    one.name, compact(one.totals.stream_tuples_in), compact(one.totals.output_rows), compact(one.totals.unmatched_tuples),
    percent(one.hit_ratio + one.negative_ratio), compact(one.pending), bytes(one.memory_bytes), one.budget_bytes ? percent(one.memory_bytes / one.budget_bytes) : "–",
    bytes(one.state_bytes), one.details.spilled_bytes === undefined ? "–" : bytes(one.details.spilled_bytes), compact(Object.values(one.totals.shed).reduce((sum, number) => sum + number, 0)),
  ]);
  find("operators").replaceChildren(rows.length
    ? table(["operator", "tuples in", "rows out", "unmatched", "hits", "waiting", "memory", "of budget", "state", "spilled", "shed"], rows)
    : make("p", "No operator has reported yet.", { class: "dim" }));
}

function showBatches() {
  const rows = view.batches.slice(0, 12).map((one) => [
    String(one.batch), clock(one.wall_ms), duration(one.took_ms), one.operators.length ? compact(one.operators[0].in) : "–", compact(one.rows),
    compact(one.side.reduce((sum, count) => sum + (count ?? 0), 0)), compact(one.operators.reduce((sum, operator) => sum + operator.pending, 0)),
  ]);
  find("batches").replaceChildren(rows.length ? table(["batch", "began", "took", "in", "rows out", "aside", "waiting"], rows) : make("p", "None yet.", { class: "dim" }));
  find("h-batches").textContent = `Latest commits (of ${view.history.toLocaleString("en")} in the history)`;
}

function showEvents() {
  const list = make("ol", null, { class: "events" });
  for (const event of view.events.slice(0, 25)) {
    const item = make("li", null, { "data-is": event.kind });
    item.append(make("time", new Date(event.at_ms).toLocaleString("en-GB")), make("b", event.kind));
    if (event.error) item.append(` ${event.error.class}: ${event.error.message}${event.error.hint ? ` ${event.error.hint}` : ""}`);
    else if (event.kind === "started") item.append(` by process ${event.pid} on ${event.host}, dovetail ${event.dovetail}`);
    else if (event.kind === "stop requested") item.append(event.drain ? " with a drain" : "");
    list.append(item);
  }
  find("events").replaceChildren(view.events.length ? list : make("p", "None yet.", { class: "dim" }));
}

function showPlan() {
  if (view.plan) { find("plan").replaceChildren(make("pre", view.plan)); return; }
  const steps = view.picture.nodes.filter((node) => node.kind === "step");
  const rows = steps.map((node) => {
    const measured = view.operators.find((one) => one.name === node.id);
    const facts = Object.entries(node.facts).map(([name, value]) => `${name}: ${Array.isArray(value) ? value.join(", ") : value}`).join("; ");
    return [node.id, `${node.title} ${node.detail}`.trim(), facts, measured ? `${compact(measured.in_per_s)} rows/s` : "–"];
  });
  const note = make("p", "Predicted rates and the reasons for the plan: dovetail explain, or dovetail run --ui, which keeps them here.", { class: "dim" });
  find("plan").replaceChildren(rows.length ? table(["step", "kind", "settings", "measured"], rows, [0, 1, 2]) : make("p", "No steps with state.", { class: "dim" }), note);
}

let examplesOf = null;
async function showSide() {
  const sides = view.picture.nodes.filter((node) => node.kind === "side");
  find("side-card").hidden = !sides.length;
  if (!sides.length) return;
  const count = JSON.stringify(view.side_rows);
  if (examplesOf === `${view.id}${count}`) return;
  examplesOf = `${view.id}${count}`;
  const parts = [table(["output", "target", "rows in the history"], sides.map((node) => [node.title, node.detail, compact(view.side_rows[node.id.split(":")[1]] ?? 0)]), [0, 1])];
  if (!view.shows_examples) parts.push(make("p", "Rows are shown if the page was started with --examples.", { class: "dim" }));
  else {
    const answer = await fetch(`/api/flows/${view.id}/examples`);
    if (answer.ok) for (const side of (await answer.json()).side) {
      if (side.problem) parts.push(make("p", side.problem, { class: "dim" }));
      if (!side.rows.length) continue;
      const names = Object.keys(side.rows[0]);
      const scroll = make("div", null, { class: "scroll", tabindex: "0", role: "group", "aria-label": `Examples of ${side.target}` });
      scroll.append(table(names, side.rows.map((row) => names.map((name) => row[name] ?? "NULL")), names.map((_, number) => number)));
      parts.push(make("p", `Latest rows of ${side.target}`, { class: "dim" }), scroll);
    }
  }
  find("side").replaceChildren(...parts);
}

function show() {
  showHead(); showAlert(); showTiles(); showPicture(); showCharts(); showOperators(); showBatches(); showEvents(); showPlan(); showSide();
}

// ------------------------------------------------------------------ following

function setLink(is, text) {
  const link = find("link");
  link.dataset.is = is;
  if (link.textContent !== text) link.textContent = text;
}

function follow(id) {
  if (stream) stream.close();
  examplesOf = null;
  stream = new EventSource(`/api/flows/${encodeURIComponent(id)}/changes`);
  stream.addEventListener("view", (event) => {
    const began = performance.now();
    view = JSON.parse(event.data);
    skewMs = view.now_ms - Date.now();
    setLink("live", "live");
    show();
    document.body.dataset.tookMs = (performance.now() - began).toFixed(1);
    document.body.dataset.change = event.lastEventId;
  });
  stream.addEventListener("error", () => setLink("lost", "connection lost, trying again"));
}

async function list() {
  const answer = await fetch("/api/flows");
  if (!answer.ok) { setLink("lost", await answer.text()); return; }
  const { flows } = await answer.json();
  const chosen = decodeURIComponent(location.hash.slice(1)) || (flows[0] && flows[0].id);
  find("picker").hidden = flows.length < 2;
  const options = flows.map((flow) => {
    const option = make("option", `${flow.flow} (${flow.state})`, { value: flow.id });
    option.selected = flow.id === (view ? view.id : chosen);
    return option;
  });
  if (document.activeElement !== find("flows")) find("flows").replaceChildren(...options);
  if (!stream && chosen) follow(chosen);
}

find("flows").addEventListener("change", (event) => { location.hash = event.target.value; });
window.addEventListener("hashchange", () => follow(decodeURIComponent(location.hash.slice(1))));
window.addEventListener("resize", () => { if (view) showPicture(); });
setInterval(() => { if (view) showHead(); }, 1000);
setInterval(() => list().catch(() => setLink("lost", "connection lost, trying again")), 5000);
list().catch(() => setLink("lost", "connection lost"));

// ------------------------------------------------------------------ stop and drain

function ask(drain) {
  const dialog = find("confirm");
  find("confirm-title").textContent = drain ? `Drain and stop ${view.flow}?` : `Stop ${view.flow} now?`;
  find("confirm-text").textContent = drain
    ? "One more micro-batch runs, which leaves nothing waiting. Then the flow ends."
    : "The current micro-batch is abandoned and repeated at the next start. Waiting rows stay in the checkpoint; nothing is lost.";
  find("confirm-yes").textContent = drain ? "Drain and stop" : "Stop now";
  dialog.returnValue = "no";
  dialog.showModal();
  dialog.onclose = async () => {
    if (dialog.returnValue !== "yes") return;
    const answer = await fetch(`/api/flows/${view.id}/stop`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ drain }) });
    if (!answer.ok) {
      const { error } = await answer.json();
      find("alert").replaceChildren(make("strong", `${error.class}: `), error.message);
      find("alert").hidden = false;
    }
  };
}
find("stop").addEventListener("click", () => ask(false));
find("drain").addEventListener("click", () => ask(true));
