// Charts and the diagram, as SVG made by hand. Every text is set as text, never as markup.
const NS = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, text = null) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  return element;
}

export function compact(number) {
  if (number === null || number === undefined) return "–";
  const size = Math.abs(number);
  if (size >= 1e9) return (number / 1e9).toFixed(1) + "G";
  if (size >= 1e6) return (number / 1e6).toFixed(size >= 1e7 ? 1 : 2) + "M";
  if (size >= 1e4) return (number / 1e3).toFixed(size >= 1e5 ? 0 : 1) + "k";
  return size >= 100 || Number.isInteger(number) ? Math.round(number).toLocaleString("en") : number.toFixed(1);
}

export function bytes(size) {
  if (size === null || size === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (Math.abs(size) >= 999.5 && power < units.length - 1) { size /= 1000; power += 1; }
  return (size >= 99.95 || power === 0 ? size.toFixed(0) : size.toFixed(1)) + " " + units[power];
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return Math.round(ms) + " ms";
  const seconds = ms / 1000;
  if (seconds < 120) return seconds.toFixed(seconds < 10 ? 1 : 0) + " s";
  if (seconds < 7200) return Math.round(seconds / 60) + " min";
  if (seconds < 172800) return Math.round(seconds / 3600) + " h";
  return Math.round(seconds / 86400) + " days";
}

export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

function roundUp(value) {
  if (value <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 7.5, 10].find((step) => step * unit >= value) * unit;
}

// A line chart: lines = [{values, label}], one or two. With the mouse or the arrow keys a point is read out below it.
export class Chart {
  constructor(parent, title, format, names) {
    this.format = format; this.names = names; this.at = null; this.title = title;
    const card = document.createElement("section");
    card.className = "card";
    const heading = document.createElement("h2");
    heading.append(title);
    if (names.length > 1) names.forEach((name, number) => {
      const legend = document.createElement("span");
      legend.className = `legend c${number + 1}`;
      legend.textContent = name;
      heading.append(legend);
    });
    this.limitLegend = document.createElement("span");
    this.limitLegend.className = "legend c3";
    this.limitLegend.hidden = true;
    heading.append(this.limitLegend);
    this.svg = svg("svg", { class: "chart", role: "img", tabindex: "0" });
    this.reading = document.createElement("div");
    this.reading.className = "reading";
    this.reading.setAttribute("aria-live", "polite");
    card.append(heading, this.svg, this.reading);
    parent.append(card);
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => { this.at = null; this.draw(); });
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => { this.at = null; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  update(times, lines, limit = null, limitName = "") {
    this.times = times; this.lines = lines; this.limit = limit;
    this.limitLegend.hidden = limit === null;
    this.limitLegend.textContent = limitName;
    this.draw();
  }

  point(x) {
    if (!this.times || this.times.length < 2) return;
    const share = (x - this.left) / (this.width - this.left - 6);
    this.at = Math.min(this.times.length - 1, Math.max(0, Math.round(share * (this.times.length - 1))));
    this.draw();
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (step === undefined || !this.times || !this.times.length) return;
    event.preventDefault();
    const last = this.times.length - 1;
    this.at = Math.min(last, Math.max(0, (this.at === null ? last : this.at) + step));
    this.draw();
  }

  draw() {
    const width = this.width = this.svg.clientWidth, height = this.svg.clientHeight;
    if (!width || !this.times) return;
    const left = this.left = 52, bottom = height - 18, top = 8, right = width - 6, count = this.times.length;
    const known = this.lines.flat().filter((value) => value !== null);
    const most = roundUp(Math.max(...known, this.limit ?? 0, 0));
    const x = (number) => left + (count < 2 ? (right - left) / 2 : ((right - left) * number) / (count - 1));
    const y = (value) => bottom - ((bottom - top) * value) / most;
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      parts.push(svg("line", { class: "gridline", x1: left, x2: right, y1: y(most * share), y2: y(most * share) }));
      parts.push(svg("text", { x: left - 7, y: y(most * share) + 4, "text-anchor": "end" }, this.format(most * share)));
    }
    if (count) {
      parts.push(svg("text", { x: left, y: height - 3 }, clock(this.times[0])));
      if (count > 1) parts.push(svg("text", { x: right, y: height - 3, "text-anchor": "end" }, clock(this.times[count - 1])));
    }
    this.lines.forEach((values, number) => {
      let path = "", area = "", before = null;
      values.forEach((value, place) => {
        if (value === null) { before = null; return; }
        const here = `${x(place).toFixed(1)} ${y(value).toFixed(1)}`;
        path += `${before === null ? "M" : "L"}${here}`;
        if (before !== null) area += `M${before}L${here}L${x(place).toFixed(1)} ${bottom}L${x(place - 1).toFixed(1)} ${bottom}Z`;
        before = here;
      });
      if (!path) return;
      if (number === 0) parts.push(svg("path", { class: "area1", d: area, "shape-rendering": "crispEdges" }));
      parts.push(svg("path", { class: `line${number + 1}`, d: path }));
      if (count === 1) parts.push(svg("circle", { cx: x(0), cy: y(values[0]), r: 3, class: `line${number + 1}` }));
    });
    if (this.limit !== null) parts.push(svg("line", { class: "limit", x1: left, x2: right, y1: y(this.limit), y2: y(this.limit) }));
    if (this.at !== null && this.at < count) parts.push(svg("line", { class: "cross", x1: x(this.at), x2: x(this.at), y1: top, y2: bottom }));
    this.svg.replaceChildren(...parts);
    const place = this.at ?? count - 1;
    const words = this.names.map((name, number) => `${name} ${count ? this.format(this.lines[number][place]) : "–"}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}: ${words}. Use the arrow keys to read points.`);
    this.reading.textContent = this.at === null || !count ? "" : `${clock(this.times[place])}  ${words}`;
  }
}

// The pipeline from left to right, or from top to bottom on a narrow screen; relations on one side, side outputs on the other.
export function diagram(parent, picture, labelOf, noteOf) {
  const isTall = parent.clientWidth < 620, boxH = isTall ? 72 : 58, gapSide = isTall ? 22 : 34;
  const nodes = new Map(picture.nodes.map((node) => [node.id, { ...node, layer: 0, lane: 0 }]));
  const isAside = (node) => node.kind === "relation" || node.kind === "side";
  const edges = picture.edges.filter(([a, b]) => nodes.has(a) && nodes.has(b)).map(([a, b]) => [nodes.get(a), nodes.get(b)]);
  for (let round = 0; round < nodes.size; round += 1)
    for (const [a, b] of edges) if (!isAside(a) && !isAside(b)) b.layer = Math.max(b.layer, a.layer + 1);
  const lanes = new Map();
  const onLayer = new Map();
  for (const node of nodes.values()) if (!isAside(node)) onLayer.set(node.layer, [...(onLayer.get(node.layer) ?? []), node]);
  const widest = Math.max(1, ...[...onLayer.values()].map((list) => list.length));
  for (const list of onLayer.values()) list.forEach((node, number) => { node.lane = number - (list.length - 1) / 2; });
  for (const [a, b] of edges) {
    if (a.kind !== "relation" && b.kind !== "side") continue;
    // A narrow screen has room for one column beside the flow.
    const [outer, inner, side] = a.kind === "relation" ? [a, b, isTall ? 1 : -1] : [b, a, 1];
    const taken = (lanes.get(`${inner.layer}/${side}`) ?? 0) + 1;
    lanes.set(`${inner.layer}/${side}`, taken);
    outer.layer = inner.layer;
    outer.lane = side * (taken + (widest - 1) / 2);
  }
  const all = [...nodes.values()];
  const lowest = Math.min(0, ...all.map((node) => node.lane)), highest = Math.max(0, ...all.map((node) => node.lane));
  const layers = Math.max(0, ...all.map((node) => node.layer)) + 1;
  const fitting = isTall ? (parent.clientWidth - gapSide - 8) / 2 : Math.min(168, (parent.clientWidth - 6 - 62 * (layers - 1)) / layers);
  const boxW = Math.max(120, Math.floor(fitting));
  const mainSize = isTall ? boxH : boxW, sideSize = isTall ? boxW : boxH;
  const gapMain = isTall ? 40 : Math.min(170, Math.max(62, (parent.clientWidth - 6 - layers * boxW) / Math.max(1, layers - 1)));
  const along = layers * mainSize + (layers - 1) * gapMain + 4, across = (highest - lowest) * (sideSize + gapSide) + sideSize + 4;
  const place = (node) => {
    const main = 2 + node.layer * (mainSize + gapMain), cross = 2 + (node.lane - lowest) * (sideSize + gapSide);
    return isTall ? { x: cross, y: main } : { x: main, y: cross };
  };
  const width = isTall ? across : along, height = isTall ? along : across;
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  root.setAttribute("aria-label", "Pipeline: " + edges.map(([a, b]) => `${a.title} to ${b.title}`).join(", "));
  const labels = [];
  for (const [a, b] of edges) {
    const from = place(a), to = place(b), aside = isAside(a) || isAside(b);
    const crosswise = isTall !== aside;
    let x1, y1, x2, y2;
    if (!crosswise) { const ahead = to.x >= from.x; x1 = from.x + (ahead ? boxW : 0); y1 = from.y + boxH / 2; x2 = to.x + (ahead ? 0 : boxW); y2 = to.y + boxH / 2; }
    else { const down = to.y >= from.y; x1 = from.x + boxW / 2; y1 = from.y + (down ? boxH : 0); x2 = to.x + boxW / 2; y2 = to.y + (down ? 0 : boxH); }
    const [mx, my] = [(x1 + x2) / 2, (y1 + y2) / 2];
    const curve = crosswise ? `M${x1} ${y1}C${x1} ${my} ${x2} ${my} ${x2} ${y2}` : `M${x1} ${y1}C${mx} ${y1} ${mx} ${y2} ${x2} ${y2}`;
    root.append(svg("path", { class: aside ? "edge aside" : "edge", d: curve }));
    const [dx, dy] = crosswise ? [0, Math.sign(y2 - y1) || 1] : [Math.sign(x2 - x1) || 1, 0];
    root.append(svg("path", { class: "arrow", d: `M${x2} ${y2}L${x2 - 7 * dx - 4 * dy} ${y2 - 7 * dy - 4 * dx}L${x2 - 7 * dx + 4 * dy} ${y2 - 7 * dy + 4 * dx}Z` }));
    const label = labelOf(a, b);
    if (label && !(isTall && aside)) {
      const spot = crosswise ? { x: mx + 9, y: my + 4, "text-anchor": "start" } : { x: mx, y: my - 7, "text-anchor": "middle" };
      labels.push(svg("text", { class: "edge-label back", ...spot }, label), svg("text", { class: "edge-label", ...spot }, label));
    }
  }
  root.append(...labels);
  for (const node of all) {
    const { x, y } = place(node), group = svg("g", { class: `node ${node.kind}` });
    group.append(svg("rect", { x, y, width: boxW, height: boxH, rx: 9 }));
    const most = Math.floor((boxW - 22) / 7.4), short = (text, size) => (text.length > size ? text.slice(0, size - 1) + "…" : text);
    group.append(svg("text", { class: "title", x: x + 12, y: y + 20 }, short(node.title, most)));
    const notes = [...noteOf(node)];
    if (isTall && isAside(node)) notes.unshift(...edges.filter((edge) => edge.includes(node)).slice(0, 1).map(([a, b]) => labelOf(a, b)).filter(Boolean));
    notes.slice(0, isTall ? 3 : 2).forEach((note, number) => group.append(svg("text", { x: x + 12, y: y + 35 + 14 * number }, short(note, Math.floor((boxW - 20) / 6.4)))));
    group.append(svg("title", {}, [node.kind, node.title, node.detail, ...notes].filter(Boolean).join(" · ")));
    root.append(group);
  }
  parent.replaceChildren(root);
}
