// Draws a run, of one of two sources: `umbra monitor --web` is asked for look.json again and again;
// report.html has what was recorded in itself. All text of the run goes in as text, never as markup.
"use strict";

const EVERY_MS = 1000, WINDOW_S = 20, TRACKS = 40, DOTS = 50;
const SVG = "http://www.w3.org/2000/svg";
const CHARTS = {  // title: label and column of each line
  "reward": [["mean", "reward/mean"], ["solved", "solved"]],
  "throughput, samples/s": [["samples/s", "samples_per_s"]],
  "loss": [["loss", "loss"]],
  "response length, tokens": [["mean", "response_length/mean"], ["p99", "response_length/p99"]],
  "staleness of a batch, steps": [["mean", "staleness/total/mean"], ["max", "staleness/total/max"]],
  "entropy": [["entropy", "entropy"]],
  "gradient norm": [["norm", "grad_norm"]],
  "mismatch k3": [["k3", "mismatch/k3"]],
  "effective share of samples": [["ess", "ess"]],
  "share of answers cut off": [["truncated", "truncated"]],
  "tokens/s while training": [["tokens/s", "train_tokens_per_s"]],
  "seconds of a step": [["wait for batch", "seconds/wait_batch"], ["train", "seconds/train_step"]],
};
const PHASES = ["snapshot", "wire", "stage", "commit", "total"];
const hover = { title: "", at: 0 };  // the chart under the pointer, and where; outlives a redrawing
let latest = null, chosen = "", picked = "", ended = false;  // look; step of the rollouts, and those shown; all steps are done
const $ = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function number(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return (value / 1e3).toPrecision(3) + "k";
  if (size >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return size && size < 1e-3 ? value.toExponential(1) : value.toPrecision(3);
}

function table(target, columns, rows) {
  const kept = columns.map((_, i) => i).filter((i) => rows.some((row) => row[i] !== ""));  // no empty columns
  if (columns.length) rows = rows.map((row) => kept.map((i) => row[i]));
  columns = kept.map((i) => columns[i]);
  const cell = (tag) => (value) => value instanceof Node ? element(tag, {}, value)
    : element(tag, typeof value === "number" ? { class: "n" } : {},
      typeof value === "number" ? number(value) : String(value));
  const right = (i) => rows.length && typeof rows[0][i] === "number" ? { class: "n" } : {};
  target.replaceChildren(
    ...(rows.length && columns.length ? [element("tr", {}, ...columns.map((column, i) => element("th", right(i), column)))] : []),
    ...rows.map((row) => element("tr", {}, ...row.map(cell("td")))));
}

const isIdle = (name) => name.startsWith("idle") || name.startsWith("wait");

// Strong colours for work, pale ones for idleness; the same for the same set of names.
function colours(names) {
  const found = {};
  let busy = 0, idle = 0;
  for (const name of [...names].sort()) {
    found[name] = isIdle(name) ? "i" + (idle++ % 4) : "f" + (busy++ % 8);
  }
  return found;
}

function bar(shares, classes) {
  const made = element("div", { class: "bar" });
  for (const [name, share] of Object.entries(shares)) {
    const part = element("span", { class: classes[name], title: `${name} ${(100 * share).toFixed(0)}%` });
    part.style.flexGrow = share;
    made.append(part);
  }
  const rest = 1 - Object.values(shares).reduce((a, b) => a + b, 0);
  if (rest > 0) {
    const part = element("span");
    part.style.flexGrow = rest;
    made.append(part);
  }
  return made;
}

// Lines over a common x, each a list of [x, y] by its name; null if there is nothing to draw.
function lineChart(title, axis, lines) {
  const drawn = Object.entries(lines).map(([name, points]) => [name, points.filter(([, y]) => y !== null && y !== undefined)])
    .filter(([, points]) => points.length);
  if (!drawn.length) return null;
  const all = drawn.flatMap(([, points]) => points);
  const range = (i) => all.reduce(([low, high], p) => [Math.min(low, p[i]), Math.max(high, p[i])], [Infinity, -Infinity]);
  let [first, last] = range(0), [low, high] = range(1);
  if (high - low < 1e-12) [low, high] = low < 0 ? [2 * low, 0] : [0, 2 * high || 1];
  last = Math.max(last, first + 1);
  const ticks = [low, (low + high) / 2, high], names = drawn.map(([name]) => drawn.length > 1 ? name : "");
  const longest = (texts) => Math.max(...texts.map((text) => text.length));
  const W = 340, H = 130, T = 8, B = 28, L = 8 + 6 * longest(ticks.map(number)), R = 10 + 6.5 * longest(names);
  const x = (v) => L + (W - L - R) * (v - first) / (last - first);
  const y = (v) => H - B - (H - B - T) * (v - low) / (high - low);
  const svg = shape("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
  for (const v of ticks) {
    svg.append(shape("line", { class: "grid", x1: L, x2: W - R, y1: y(v), y2: y(v) }),
      shape("text", { class: "end", x: L - 4, y: y(v) + 4 }, number(v)));
  }
  for (const v of [first, last]) svg.append(shape("text", { class: "mid", x: x(v), y: H - B + 13 }, number(v)));
  svg.append(shape("text", { class: "mid", x: x((first + last) / 2), y: H - 4 }, axis));
  [...drawn.entries()].reverse().forEach(([i, [, points]]) => {  // the first on top
    const places = points.map(([a, b]) => [x(a).toFixed(1), y(b).toFixed(1)]);
    svg.append(shape("polyline", { class: `line c${i % 8}`, points: places.join(" ") }));
    for (const [cx, cy] of places.length > DOTS ? places.slice(-1) : places) svg.append(shape("circle", { class: `f${i % 8}`, cx, cy, r: 2 }));
  });
  let above = T - 6;  // names stand beside the ends of their lines, below each other
  const ends = drawn.map(([, points], i) => [y(points[points.length - 1][1]) + 3, i]).sort((a, b) => a[0] - b[0]);
  for (const [at, i] of ends) {
    above = Math.max(at, above + 11);
    svg.append(shape("text", { class: `name c${i % 8}`, x: W - R + 5, y: above }, names[i]));
  }
  const mark = shape("line", { class: "mark", y1: T, y2: H - B }), values = element("span");
  svg.append(mark);
  const read = () => {  // the values where the pointer is, else the newest
    const wanted = hover.title === title ? first + (last - first) * (hover.at * W - L) / (W - L - R) : last;
    const near = (points) => points.reduce((a, b) => Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a);
    const at = near(all)[0];
    mark.setAttribute("visibility", hover.title === title ? "visible" : "hidden");
    for (const end of ["x1", "x2"]) mark.setAttribute(end, x(at));
    values.replaceChildren(...(hover.title === title ? [element("span", { class: "dim" }, `${axis} ${number(at)}: `)] : []),
      ...drawn.map(([, points], i) => element("span", { class: `c${i % 8}` }, `${names[i]} ${number(near(points)[1])} `)));
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    Object.assign(hover, { title, at: (event.clientX - box.left) / box.width });
    read();
  });
  svg.addEventListener("pointerleave", () => { hover.title = ""; read(); });
  read();
  return element("figure", {}, element("figcaption", {}, element("span", {}, title), values), svg);
}

function drawCurves(look) {
  const { steps, values } = look.curves;
  const charts = Object.entries(CHARTS).map(([title, columns]) => lineChart(title, "step", Object.fromEntries(
    columns.map(([label, column]) => [label, steps.map((step, i) => [step, (values[column] ?? [])[i]])]))));
  const names = [...new Set(look.evals.flatMap((one) => Object.keys(one.scores ?? {})))]
    .filter((name) => name.startsWith("pass@") && name !== "pass@1");
  const scores = Object.fromEntries(names.map((name) => [name, look.evals.map((one) => [one.version, one.scores?.[name]])]));
  charts.splice(1, 0, lineChart("accuracy on held-out prompts", "step",
    { accuracy: look.evals.filter((one) => one.answered).map((one) => [one.version, one.accuracy]), ...scores }));
  const receivers = [...new Set(look.pushes.map((p) => p.receiver))].sort().slice(0, 8);
  charts.push(lineChart("ms from the snapshot to the commit", "version", Object.fromEntries(receivers.map((name) =>
    [name, look.pushes.filter((p) => p.receiver === name).map((p) => [p.version, 1e3 * p.total_s])]))));
  charts.push(histogram(look.staleness_counts));
  $("curves").replaceChildren(...charts.filter(Boolean));
}

function histogram(counts) {
  const total = counts.reduce((a, b) => a + b, 0);
  if (!total) return null;
  const W = 340, H = 130, B = 28, T = 14, top = Math.max(...counts), width = W / counts.length;
  const svg = shape("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "staleness" });
  svg.append(shape("text", { class: "mid", x: W / 2, y: H - 4 }, "steps"));
  counts.forEach((count, i) => {
    const height = (H - B - T) * count / top;
    svg.append(
      shape("rect", { class: "f0", x: i * width + width * 0.1, y: H - B - height, width: width * 0.8, height }),
      shape("text", { class: "mid", x: (i + 0.5) * width, y: H - B + 13 }, String(i)),
      shape("text", { class: "mid", x: (i + 0.5) * width, y: H - B - height - 3 },
        (100 * count / total).toFixed(0) + "%"));
  });
  return element("figure", {}, element("figcaption", {}, "staleness of trained samples"), svg);
}

function drawLedger(look) {
  if (!look.ledger) return;
  const ledger = look.ledger, flight = ledger.in_flight;
  const inFlight = Object.values(flight).reduce((a, b) => a + b, 0);
  const ended = Object.entries(ledger.ended).filter(([, count]) => count);
  const words = [`${ledger.issued.toLocaleString()} issued = ${ledger.trained.toLocaleString()} trained`,
    ...ended.map(([reason, count]) => `${count.toLocaleString()} ${reason}`),
    `${inFlight.toLocaleString()} in flight`].join(" + ");
  const line = element("p", {}, words + (ledger.balance ? "" : ", balanced"));
  if (ledger.balance) line.append(element("span", { class: "bad" }, ` OFF BY ${ledger.balance}`));
  const parts = [line];
  if (look.rates) {
    const perSecond = (name) => number(look.rates[`${name}_per_s`]);
    parts.push(element("p", { class: "dim" }, `${perSecond("issued")}/s issued, ${perSecond("answers")}/s answered, ` +
      `${perSecond("samples")}/s trained, ${perSecond("ended")}/s ended`));
  }
  if (look.health) {
    const share = (name) => `${(100 * (look.health[name] ?? 0)).toFixed(1)}%`;
    parts.push(element("p", { class: "dim" }, `recent: ${share("equal_rewards")} of groups with equal rewards, ` +
      `${share("truncated")} of answers cut off, ${share("failed_samples")} of samples failed`));
  }
  const names = Object.keys(flight), classes = Object.fromEntries(names.map((n, i) => [n, "f" + i]));
  const keys = element("p", {}, "in flight:");
  for (const name of names) keys.append(element("span", { class: "swatch " + classes[name] }), `${name} ${flight[name]}`);
  if (inFlight) parts.push(bar(Object.fromEntries(names.map((n) => [n, flight[n] / inFlight])), classes), keys);
  for (const one of look.evals.slice(-3)) {
    parts.push(element("p", {}, `eval of version ${one.version}: ${one.answered}/${one.samples} answered, ` +
      `accuracy ${one.accuracy.toFixed(3)}${one.done === false ? " so far" : ""}`));
  }
  $("ledger").replaceChildren(...parts);
}

function drawServices(look) {
  const rows = [...look.members].sort((a, b) => `${a.role} ${a.name}`.localeCompare(`${b.role} ${b.name}`)).map((m) => {
    const stats = m.stats ?? {}, version = stats.version ?? stats.step;
    const idle = Object.entries(m.shares).filter(([name]) => isIdle(name)).sort((a, b) => b[1] - a[1]);
    const why = idle.length ? ` (${idle[0][0].replace(/^(idle: |wait_)/, "")})` : "";
    return [m.name, m.silent_s >= 10 ? `silent ${m.silent_s.toFixed(0)} s` : m.state ?? "", m.incarnation ?? "",
      version ?? "", version === undefined ? "" : Math.max(0, look.version - version),
      Math.round(stats.decoded_per_s ?? stats.train_tokens_per_s ?? 0) || "", bar(m.shares, colours(Object.keys(m.shares))),
      m.busy === null || m.busy === undefined ? "" : (100 * (1 - m.busy)).toFixed(0) + "%" + why, m.activity ?? "", m.host ?? ""];
  });
  for (const [name, why] of Object.entries(look.departed)) {
    rows.push([name, "gone", "", "", "", "", "", "", why, ""]);
  }
  table($("services"), ["service", "state", "incarnation", "version", "lag", "tokens/s",
    look.recorded ? "of the run" : "last 10 s", "idle", "activity", "host"], rows);
}

function drawTimeline(look) {
  const tracks = Object.entries(look.spans ?? {}).sort().slice(0, TRACKS);
  const latest = tracks.reduce((end, [, spans]) => Math.max(end, spans[spans.length - 1][2]), -Infinity);
  if (!Number.isFinite(latest)) return $("timeline").replaceChildren();
  const W = 1000, L = 130, ROW = 20, H = ROW * tracks.length + 18, since = latest - WINDOW_S;
  const svg = shape("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "timeline" });
  const x = (t) => L + (W - L) * Math.max(0, t - since) / WINDOW_S;
  const legend = element("p");
  tracks.forEach(([name, spans], i) => {
    svg.append(shape("text", { class: "end", x: L - 6, y: ROW * i + 14 }, name));
    const classes = colours(new Set(spans.map((s) => s[0])));
    for (const [what, start, end] of spans) {
      if (end < since) continue;
      const rect = shape("rect", { class: classes[what], x: x(start), y: ROW * i + 2,
        width: Math.max(0.4, x(end) - x(start)), height: ROW - 4 });
      rect.append(shape("title", {}, `${what}: ${(1e3 * (end - start)).toFixed(1)} ms`));
      svg.append(rect);
    }
    legend.append(element("b", {}, " " + name));
    for (const [what, colour] of Object.entries(classes)) legend.append(element("span", { class: "swatch " + colour }), what);
  });
  for (let s = 0; s <= WINDOW_S; s += 5) {
    svg.append(shape("text", { class: s === WINDOW_S ? "end" : "mid", x: L + (W - L) * s / WINDOW_S, y: H - 4 }, `${s - WINDOW_S} s`));
  }
  $("timeline").replaceChildren(svg, legend);
}

// Of each receiver its pushes, and the middle and the worst of each phase.
function drawPushes(look) {
  const rows = [...new Set(look.pushes.map((p) => p.receiver))].sort().map((receiver) => {
    const own = look.pushes.filter((p) => p.receiver === receiver), last = own[own.length - 1];
    const sorted = (phase) => own.map((p) => 1e3 * (p[`${phase}_s`] ?? 0)).sort((a, b) => a - b);
    const at = (list, share) => Number(list[Math.min(list.length - 1, Math.floor(share * list.length))].toFixed(1));
    const total = sorted("total");
    return [receiver, last.plane ?? "", last.version, own.length, ...PHASES.map((phase) => at(sorted(phase), 0.5)), at(total, 0.95), at(total, 1)];
  });
  table($("pushes"), ["receiver", "plane", "version", "pushes", ...PHASES.map((p) => `${p}, median`), "total, p95", "total, max"], rows);
}

function drawConfig(look) {
  const sections = Object.entries(look.config ?? {}).filter(([, values]) => values && typeof values === "object");
  $("config").replaceChildren(...sections.map(([section, values]) => {
    const own = element("table");
    table(own, ["key", "value"], Object.entries(values).map(([key, value]) =>
      [key, typeof value === "string" ? value : JSON.stringify(value)]));
    return element("details", {}, element("summary", {}, section), element("div", { class: "scroll" }, own));
  }));
}

// Rollouts of the chosen step, else of the newest; drawn again only if they changed.
function drawRollouts(look) {
  const steps = [...new Set(look.rollouts.map((one) => one.step))].sort((a, b) => b - a), pick = $("pick");
  const shown = look.rollouts.filter((one) => one.step === (steps.includes(Number(chosen)) ? Number(chosen) : steps[0]));
  const key = JSON.stringify([steps, shown.map((one) => one.sample)]);
  if (picked === key) return;
  picked = key;
  pick.replaceChildren(...steps.map((step) => element("option", step === shown[0].step ? { selected: "" } : {}, String(step))));
  $("rollouts").replaceChildren(...shown.reverse().flatMap(rollout));
}

// A rollout: its facts, its prompt and its response.
function rollout(one) {
  const parts = Object.entries(one.reward_parts).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const text = element("pre", {}, element("span", { class: "dim" }, one.prompt), one.response);
  return [element("div", {}, `step ${one.step}, ${one.sample}: reward ${number(one.reward)}${parts ? ` (${parts})` : ""}, ` +
    `${one.tokens} tokens, ${one.finish_reason}, staleness ${one.staleness}`), text];
}

function draw(look) {
  latest = look;
  ended = Boolean(look.finished) || look.version >= look.steps;
  document.title = `${look.version}/${look.steps} ${look.run_id}`;
  $("run").textContent = look.run_id;
  const state = ended && !look.recorded && (look.lost || look.finished) ? "finished" : look.state;
  $("state").textContent = `${state}, ${look.recorded ? "took" : "up"} ${Math.floor(look.uptime_s / 60)} min ${Math.floor(look.uptime_s % 60)} s`;
  $("progress").max = Math.max(1, look.steps);
  $("progress").value = look.version;
  $("step").textContent = `step ${look.version}/${look.steps}${look.rates && !ended ? `, ${number(look.rates.steps_per_s)}/s` : ""}`;
  const notice = look.recorded || ended ? "" : look.lost ? `the run has ended, or cannot be reached: seen at step ${look.version}/${look.steps}`
    : look.ending ? `ENDING: ${look.ending}` : "";
  $("notice").hidden = !notice;
  $("notice").textContent = notice;
  $("warnings").replaceChildren(...(look.warnings ?? []).filter((w) => w.until < 0).map((w) =>
    element("li", {}, `warning: ${w.name}: ${w.text}`)));
  $("stuck").replaceChildren(...(look.stuck ?? []).map((s) =>
    element("li", {}, `${s.what} at ${s.holder}${s.age_s ? ` for ${s.age_s.toFixed(0)} s` : ""}, ${s.action}`)));
  if (look.facts) table($("facts"), [], look.facts);
  drawCurves(look);
  drawLedger(look);
  drawServices(look);
  drawTimeline(look);
  drawPushes(look);
  drawRollouts(look);
  drawConfig(look);
  $("counters").textContent = Object.entries(look.counters ?? {}).filter(([, n]) => n).map(([k, n]) => `${k} ${n}`).join(", ");
  for (const id of ["facts", "curves", "ledger", "services", "timeline", "pushes", "rollouts", "counters", "config"]) {
    $(id).closest("section").hidden = !$(id).textContent;
  }
}

async function turn() {
  try {
    const answer = await fetch("look.json", { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.statusText);
    const look = await answer.json();
    draw(look);
    document.body.classList.toggle("lost", look.lost && !ended);
  } catch (error) {
    document.body.classList.toggle("lost", !ended);
    $("notice").hidden = false;
    $("notice").textContent = `no answer from the monitor: ${error.message}`;
  }
  setTimeout(turn, EVERY_MS);
}

$("pick").addEventListener("change", () => { chosen = $("pick").value; drawRollouts(latest); });
if ($("recorded")) draw(JSON.parse($("recorded").textContent));
else turn();
