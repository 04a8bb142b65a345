// The page: it draws what /events tells. All text of members is set as textContent, never as HTML.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const URGENT = ["lost", "straggling", "draining", "unhealthy", "quarantined", "banned", "gave up"];
const SIGNS = { lost: "!", left: "←", restarted: "↻", drained: "↓", banned: "×", gave_up: "✕", growth: "+", retold: "?", success: "✓", closed: "■", unknown: "?" };
const WORDS = { lost: "lost", left: "left", restarted: "restarted", stalled: "stalled", drained: "drained", banned: "banned", gave_up: "gave up", growth: "growth",
  retold: "engine came back empty", success: "success", closed: "closed", unknown: "unknown cause" };
const RANGES = [["All", Infinity], ["24 h", 86400], ["1 h", 3600], ["10 min", 600], ["1 min", 60]];

function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "text") made.textContent = value;
    else if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function svg(tag, props = {}, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function seconds(s) {
  if (s <= 0) return "0 s";
  if (s < 0.0095) return `${(s * 1000).toFixed(s < 0.001 ? 1 : 0)} ms`;
  if (s < 10) return `${s.toFixed(s < 1 ? 2 : 1)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.round((s % 86400) / 3600)} h`;
}

const phaseWord = (g) => (g.gone && g.phase !== "closed" ? "gone" : g.phase === "none" ? "no round yet" : g.phase);
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const clock = () => performance.now() / 1000;
const badge = (word, kind = word) => el("span", { class: `badge s-${kind.replace(" ", "_")}`, text: word });

// ---- the state

let overview = null; // The last overview.
let shown = ""; // The run that is shown; empty: all runs.
let glance = null, members = new Map(), past = null, ages = {}, agesAt = 0, seenAt = 0;
let rows = new Map(); // Table rows by member key.
let range = Infinity;
let stream = null, retry = 0;
let secret = "", person = "";

const keyOf = (row) => `${row[0]}/${row[4]}`;

// ---- the connection

function link(word, kind) {
  setText($("link").lastElementChild, word);
  $("link").className = `link ${kind}`;
}

function listen() {
  clearTimeout(retry);
  if (stream) stream.close();
  const url = shown ? `/events?run=${encodeURIComponent(shown)}` : "/events";
  const mine = stream = new EventSource(url);
  const on = (name, handle) => mine.addEventListener(name, (event) => {
    if (mine !== stream) return;
    link("live", "live");
    handle(JSON.parse(event.data));
  });
  on("overview", (data) => { overview = data; seenAt = clock(); drawOverview(); });
  on("all", (data) => {
    members = new Map(data.members.map((row) => [keyOf(row), row]));
    past = data.history;
    setAges(data.ages);
    setGlance(data);
    drawPast();
    drawMembers();
  });
  on("change", (data) => {
    if (data.without || data.rows) {
      for (const [id, rank] of data.without || []) members.delete(`${id}/${rank}`);
      for (const row of data.rows || []) members.set(keyOf(row), row);
    }
    if (data.glance) setGlance(data.glance);
    if (data.history) { past = data.history; drawPast(); }
    if (data.ages) setAges(data.ages);
    if (data.without || data.rows || data.glance) drawMembers();
  });
  mine.onerror = () => {
    if (mine !== stream) return;
    link("connection lost, trying again", "off");
    if (mine.readyState === EventSource.CLOSED) {
      if (shown) checkRun();
      retry = setTimeout(listen, 3000);
    }
  };
}

async function checkRun() {
  const answer = await fetch(`/api/run?id=${encodeURIComponent(shown)}`).catch(() => null);
  if (answer && answer.status === 404) trouble(`There is no run ${shown} here. It will appear when somebody joins it.`);
}

function trouble(text) {
  $("trouble").hidden = !text;
  setText($("trouble"), text);
}

function setGlance(data) {
  glance = data;
  seenAt = clock();
  drawGlance();
}

function setAges(data) {
  ages = data;
  agesAt = clock();
}

// ---- all runs

function nodesOf(run) {
  const there = ["sealed", "closed"].includes(run.phase) ? run.size : run.ready;
  return `${there} of ${run.min === run.max ? run.min : `${run.min}–${run.max}`}`;
}

const restartsOf = (run) => Object.values(run.broken).reduce((sum, n) => sum + n, 0);

function drawOverview() {
  setText($("endpoint"), overview.endpoint);
  if (shown) return;
  trouble(overview.up ? "" : `The engine does not answer: ${overview.trouble}`);
  const rank = { broken: 0, none: 1, open: 1, sealed: 2, closed: 3 };
  const runs = [...overview.runs].sort((a, b) => a.gone - b.gone || rank[a.phase] - rank[b.phase] || a.run.localeCompare(b.run));
  const focused = document.activeElement && document.activeElement.getAttribute("href");
  $("runs-rows").replaceChildren(...runs.map((run) => el("tr", {},
    el("td", {}, el("a", { href: `#/run/${encodeURIComponent(run.run)}`, text: run.run })),
    el("td", {}, badge(phaseWord(run), run.gone ? "closed" : run.phase)),
    el("td", { class: "num", "data-label": "round", text: run.round }),
    el("td", { "data-label": "nodes", text: nodesOf(run) }),
    el("td", { class: "num", "data-label": "for", text: (run.since_exact ? "" : "> ") + seconds(run.since_s) }),
    el("td", { class: "num", "data-label": "restarts", text: restartsOf(run) }),
    el("td", { class: "num", "data-label": "lost", text: seconds(run.lost_s) }),
    el("td", { class: "c-reason", text: run.trouble || run.reason }))));
  if (focused) for (const one of $("runs-rows").querySelectorAll("a")) if (one.getAttribute("href") === focused) one.focus();
  $("runs-none").hidden = runs.length > 0;
  $("runs-more").hidden = !overview.unwatched;
  setText($("runs-more"), `${plural(overview.unwatched, "more run")} are not watched, because there are too many.`);
}

// ---- one run

function quorumText(g) {
  const limits = `${g.min} needed, ${g.max} at most`;
  if (g.phase === "closed") return `${g.size} in the last round; ${limits}`;
  if (g.phase === "sealed") {
    const spare = g.size - g.min;
    return `${g.size} in; ${limits}; ${spare > 0 ? `${plural(spare, "more loss").replace("losss", "losses")} can be borne` : "no loss can be borne"}`;
  }
  return g.missing ? `${g.ready} ready; ${g.missing} more needed for a quorum of ${g.min}` : `${g.ready} ready: a quorum; ${limits}`;
}

function drawGlance() {
  const g = glance;
  document.title = `${g.run}: ${phaseWord(g)} – rdzv`;
  setText($("run-title"), g.run);
  setText($("phase"), g.round && !g.gone ? `round ${g.round} ${g.phase}` : phaseWord(g));
  $("phase").className = `badge s-${g.gone ? "closed" : g.phase}`;
  setText($("reason"), g.reason);
  setText($("quorum"), quorumText(g));
  trouble(g.trouble);
  const there = ["sealed", "closed"].includes(g.phase) ? g.size : g.ready, most = Math.max(g.max, 1);
  const meter = $("meter");
  meter.className = `meter${there < g.min ? " short" : ""}`;
  meter.setAttribute("aria-label", quorumText(g));
  if (!meter.firstChild) meter.append(el("b"), el("i"));
  meter.firstChild.style.width = `${Math.min(100, (100 * there) / most)}%`;
  meter.lastChild.style.left = `calc(${Math.min(100, (100 * g.min) / most)}% - 2px)`;
  const facts = [["leader", g.leader || "none"], ["rounds sealed", g.sealed], ["restarts", restartsOf(g)], ["time lost to restarts", seconds(g.lost_s)],
    ["evictions", g.evictions], ["leader changes", g.leader_changes]];
  $("facts").replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value }))));
  setText($("states"), Object.entries(g.counts).sort().map(([state, n]) => `${n} ${state}`).join(", "));
  const may = Boolean(overview && overview.actions);
  $("close-run").hidden = !may || g.phase === "closed" || g.gone;
  $("act-head").hidden = !may;
  drawAges();
}

function drawAges() {
  if (!glance) return;
  const since = glance.since_s + clock() - seenAt;
  setText($("since"), `for ${glance.since_exact ? "" : "at least "}${seconds(since)}`);
  drawProgress();
  const passed = clock() - agesAt;
  for (const row of rows.values()) {
    const age = ages[row.id];
    setText(row.age, age === undefined ? "–" : `${Math.max(0, age + passed).toFixed(0)} s ago`);
  }
}

function drawProgress() {
  const told = glance.progress;
  $("progress").hidden = !told;
  if (!told) return;
  const step = told.step === told.furthest ? `Step ${told.step}` : `Steps ${told.step} to ${told.furthest}`;
  const age = glance.progress_age_s === null ? "" : `, ${seconds(glance.progress_age_s + clock() - seenAt)} ago`;
  const behind = told.furthest > told.step + 1 ? `; behind: rank ${told.behind.join(", ")}` : "";
  setText($("progress"), `${step}, ${Number(told.rate.toPrecision(3))} per second${age}, told by ${plural(told.workers, "worker")}${behind}`);
}

// ---- members

function makeRow(data) {
  const made = { data: null, id: data[0], age: el("td", { class: "num" }), rank: el("td", { class: "num" }), name: el("td"), state: el("td"),
    host: el("td", { class: "c-host" }), info: el("td", { class: "c-info quiet" }), act: null };
  made.row = el("tr", {}, made.rank, made.name, made.state, made.host, made.age, made.info);
  return made;
}

function fillRow(row, data, may) {
  const leads = Boolean(glance && data[0] === glance.leader_id);
  const stamp = JSON.stringify([data, leads, may]);
  if (row.data === stamp) return;
  row.data = stamp;
  const [id, name, host, state, rank, info, problem] = data;
  setText(row.rank, rank >= 0 ? String(rank) : "");
  row.name.replaceChildren(el("span", { text: name, title: `id ${id}` }));
  if (leads) row.name.append(el("span", { class: "leader", text: "leader" }));
  if (host !== name) row.name.append(el("span", { class: "under", text: host }));
  row.state.replaceChildren(badge(state));
  if (problem) row.state.append(el("span", { class: "problem", text: problem }));
  setText(row.host, host);
  setText(row.info, info);
  if (row.act) row.act.remove();
  row.act = null;
  if (may) {
    row.act = el("td", { class: "num" },
      el("button", { class: "act", type: "button", text: "Drain…", "aria-label": `Drain ${name}`, onclick: () => ask("drain", id, name) }),
      state === "banned" || state === "quarantined"
        ? el("button", { class: "act", type: "button", text: "Unban…", "aria-label": `Unban host ${host}`, onclick: () => ask("unban", host, host) })
        : el("button", { class: "act", type: "button", text: "Ban…", "aria-label": `Ban host ${host}`, onclick: () => ask("ban", host, host) }));
    row.row.append(row.act);
  }
}

function drawMembers() {
  const wanted = $("filter").value.trim().toLowerCase();
  const may = Boolean(overview && overview.actions);
  const order = [...members.values()].sort((a, b) =>
    URGENT.includes(b[3]) - URGENT.includes(a[3]) || (a[4] < 0) - (b[4] < 0) || a[4] - b[4] || (a[1] < b[1] ? -1 : 1));
  const kept = new Map();
  const list = [];
  for (const data of order) {
    const key = keyOf(data);
    const row = rows.get(key) || makeRow(data);
    fillRow(row, data, may);
    kept.set(key, row);
    if (!wanted || `${data[1]}\n${data[2]}\n${data[3]}\n${data[6]}\n${data[0]}`.toLowerCase().includes(wanted)) list.push(row.row);
  }
  rows = kept;
  const body = $("members");
  const same = body.children.length === list.length && list.every((row, index) => body.children[index] === row);
  if (!same) body.replaceChildren(...list);
  drawAges();
}

// ---- the past

const nowS = () => (glance ? glance.now_s + (["closed"].includes(glance.phase) || glance.gone ? 0 : clock() - seenAt) : 0);

function drawLast() {
  const ended = past.rounds.filter((one) => one.cause && !["success", "closed"].includes(one.cause));
  const last = ended[ended.length - 1];
  const cost = last && (last.cost_s === null ? "; the next round is awaited" : `; the restart cost ${seconds(last.cost_s)}`);
  setText($("last"), last ? `Last restart: ${last.text}, after round ${last.number}, ${seconds(nowS() - last.end_s)} ago${cost}.` : "");
}

function drawPast() {
  drawLast();
  $("journal").replaceChildren(...past.lines.map((line) => el("li", { class: `p-${line.phase}` },
    el("span", { text: line.text }),
    el("small", { text: `${line.stamp}  ·  ${line.exact ? "+" : "> "}${seconds(line.at_s)}  ·  written by ${line.by}` }))));
  $("hosts").replaceChildren(...past.hosts.map((host) => el("tr", {},
    el("td", { text: host.host }), el("td", { class: "num", text: host.restarts }), el("td", { class: "num", text: seconds(host.lost_s) }),
    el("td", { class: "num", text: host.growths || "" }), el("td", {}, badge(WORDS[host.last] || host.last, host.last)))));
  $("hosts-none").hidden = past.hosts.length > 0;
  $("hosts").parentElement.hidden = past.hosts.length === 0;
  $("rounds").replaceChildren(...[...past.rounds].reverse().map((one) => el("tr", {},
    el("td", { class: "num", text: one.number }), el("td", { class: "num", text: one.size }),
    el("td", { class: "num", text: one.end_s === null ? "runs" : (one.is_exact ? "" : "> ") + seconds(one.end_s - one.begin_s) }),
    el("td", {}, ...(one.cause ? [badge(WORDS[one.cause] || one.cause, one.cause), ` ${one.text}`] : [])),
    el("td", { class: "num", text: one.cost_s === null ? "" : seconds(one.cost_s) }), el("td", { class: "mono", text: one.stamp }))));
  drawTimeline();
}

function ticksOf(span) {
  const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
  return steps.find((step) => span / step <= 7) || 2592000;
}

function drawTimeline() {
  const box = $("timeline");
  if (!past || !past.rounds.length) {
    box.replaceChildren(el("p", { class: "quiet legend", text: "No round has been sealed yet." }));
    $("legend").hidden = true;
    return;
  }
  const width = Math.max(300, box.clientWidth || 900), now = nowS(), rounds = past.rounds;
  const nameWidth = width < 560 ? 84 : 150, left = nameWidth + 6, right = width - 10;
  const from = Math.max(rounds[0].begin_s, now - range), to = Math.max(now, from + 0.5);
  const x = (t) => left + ((Math.min(Math.max(t, from), to) - from) / (to - from)) * (right - left);
  const top = 26, high = 44, laneHigh = 15, lanesTop = top + high + 12;
  const height = lanesTop + past.lanes.length * laneHigh + (past.more ? 16 : 0) + 22;
  const made = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
  const restarts = rounds.filter((one) => one.cost_s !== null || (one.end_s !== null && one.cause)).length;
  made.setAttribute("aria-label", `Timeline of ${plural(rounds.length, "round")} with ${plural(restarts, "ending")}. The table below says the same.`);
  const step = ticksOf(to - from);
  for (let back = 0; back <= to - from + 1e-9; back += step) {
    const at = x(to - back);
    made.append(svg("line", { class: "grid-line", x1: at, x2: at, y1: top, y2: height - 20 }));
    const label = back === 0 ? (glance && (glance.phase === "closed" || glance.gone) ? "end" : "now") : `−${seconds(back)}`;
    if (at > left + 14) made.append(svg("text", { x: at, y: height - 7, "text-anchor": back === 0 ? "end" : "middle" }, label));
  }
  made.append(svg("text", { x: 8, y: top + high / 2 + 4, class: "name" }, "round, nodes"));
  const most = Math.max(...rounds.map((one) => one.size), 1);
  const endOf = (one) => (one.end_s === null ? to : one.end_s);
  for (const [index, one] of rounds.entries()) {
    if (endOf(one) < from) continue;
    const a = x(one.begin_s), b = Math.max(x(endOf(one)), a + 1), tall = Math.max(4, (high * one.size) / most);
    const block = svg("rect", { class: "round", x: a, y: top + high - tall, width: b - a, height: tall, rx: 1 });
    block.append(svg("title", {}, `round ${one.number} with ${plural(one.size, "node")}, sealed ${one.stamp}: ${one.reason}`));
    made.append(block);
    if (b - a > 26) made.append(svg("text", { class: "label", x: a + 4, y: top + high - 5 }, b - a > 64 ? `#${one.number} · ${one.size}` : `#${one.number}`));
    if (!one.is_exact) made.append(svg("line", { class: "dashed", x1: a, x2: b, y1: top + high - tall, y2: top + high - tall }));
    const next = rounds[index + 1];
    if (one.end_s !== null && one.cause && !["success", "closed"].includes(one.cause)) {
      const until = next && next.run === one.run ? next.begin_s : one.cost_s !== null ? one.end_s + one.cost_s : to;
      made.append(svg("rect", { class: "gap", x: b, y: top, width: Math.max(0.5, x(until) - b), height: height - top - 20 }));
    }
  }
  past.lanes.forEach((lane, index) => {
    const y = lanesTop + index * laneHigh;
    const name = svg("text", { class: "name", x: 8, y: y + 10 }, clipped(lane.name, nameWidth));
    name.append(svg("title", {}, `${lane.name} on ${lane.host}`));
    made.append(name);
    for (const [first, last] of lane.stays) {
      for (let at = first; at <= last && at < rounds.length; at++) {
        if (endOf(rounds[at]) < from) continue;
        const a = x(rounds[at].begin_s), b = Math.max(x(endOf(rounds[at])), a + 1);
        made.append(svg("rect", { class: `lane${lane.is_there ? "" : " old"}`, x: a, y: y + 2, width: b - a, height: laneHigh - 5, rx: 1 }));
      }
    }
  });
  if (past.more) made.append(svg("text", { x: 8, y: height - 24 }, `and ${past.more} more that changed less`));
  const lanes = new Map(past.lanes.map((lane, index) => [lane.name, index]));
  for (const one of rounds) {
    if (one.end_s === null || !one.cause || one.end_s < from) continue;
    const at = x(one.end_s), group = svg("g", { class: `k-${one.cause}` });
    const cost = one.cost_s === null ? "" : `, cost ${seconds(one.cost_s)}`;
    group.append(svg("title", {}, `round ${one.number} ended: ${one.text}${cost}`));
    group.append(svg("line", { class: "rule", x1: at, x2: at, y1: 18, y2: height - 20 }));
    group.append(svg("circle", { class: "mark", cx: at, cy: 12, r: 8 }), svg("text", { class: "sign", x: at, y: 15.5 }, SIGNS[one.cause] || "?"));
    for (const name of one.caused_by) {
      if (lanes.has(name)) group.append(svg("circle", { class: "mark", cx: at, cy: lanesTop + lanes.get(name) * laneHigh + laneHigh / 2, r: 4.5 }));
    }
    made.append(group);
  }
  box.replaceChildren(made);
  $("legend").hidden = false;
  const kinds = [...new Set(rounds.filter((one) => one.cause).map((one) => one.cause))];
  const unsure = rounds.some((one) => !one.is_exact) ? " A dashed top: part of the round's time is unknown, so it lasted longer." : "";
  setText($("legend"), `Bars: the rounds that each member was in. Marks: why a round ended${kinds.length
    ? ` (${kinds.map((kind) => `${SIGNS[kind]} ${WORDS[kind]}`).join(", ")})` : ""}. Red: no round.${unsure}`);
}

function clipped(text, width) {
  const most = Math.floor(width / 6.3);
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

// ---- actions

function ask(act, target, name) {
  const words = {
    drain: [`Drain ${name}?`, "The member is asked to leave. The others re-form without it, if they are enough.", "Drain"],
    ban: [`Ban host ${name}?`, "Its members are evicted at once, and new ones are refused until it is unbanned.", "Ban"],
    unban: [`Let host ${name} in again?`, "Its members may join again.", "Unban"],
    close: [`Close run ${name}?`, "The run ends for all members. This cannot be undone.", "Close the run"],
  }[act];
  setText($("dialog-title"), words[0]);
  setText($("dialog-text"), words[1]);
  setText($("d-do"), words[2]);
  $("d-error").hidden = true;
  $("d-reason").value = "";
  $("d-by").value = person;
  $("d-secret").value = secret;
  $("form").onsubmit = (event) => { event.preventDefault(); send(act, target); };
  $("dialog").showModal();
}

async function send(act, target) {
  person = $("d-by").value;
  const given = $("d-secret").value;
  $("d-do").disabled = true;
  let said;
  try {
    const answer = await fetch("/api/act", { method: "POST", headers: { "content-type": "application/json" },
      body: JSON.stringify({ run: shown, act, target, reason: $("d-reason").value, by: person, secret: given }) });
    said = await answer.json();
  } catch (error) {
    said = { error: "the server cannot be reached" };
  }
  $("d-do").disabled = false;
  if (said.error) {
    $("d-error").hidden = false;
    setText($("d-error"), said.error);
    return;
  }
  secret = given; // Kept in this page's memory only.
  $("dialog").close();
  toast(said.done);
}

function toast(text) {
  $("toast").hidden = false;
  setText($("toast"), text);
  setTimeout(() => { $("toast").hidden = true; }, 6000);
}

// ---- begin

async function route() {
  const found = /^#\/run\/(.+)$/.exec(location.hash);
  try {
    shown = found ? decodeURIComponent(found[1]) : "";
  } catch (error) {
    shown = ""; // The address was cut off within a letter.
  }
  $("runs").hidden = Boolean(shown);
  $("run").hidden = !shown;
  document.title = "rdzv";
  trouble("");
  members = new Map(); rows = new Map(); past = null; glance = null; ages = {};
  for (const id of ["members", "journal", "hosts", "rounds", "timeline", "facts"]) $(id).replaceChildren();
  for (const id of ["run-title", "reason", "last", "quorum", "phase", "since", "states"]) setText($(id), id === "run-title" ? shown : "");
  $("main").focus({ preventScroll: true });
  if (shown && !overview) {
    const answer = await fetch("/api/runs").catch(() => null);
    if (answer && answer.ok) { overview = await answer.json(); drawOverview(); }
  }
  listen();
}

for (const [word, span] of RANGES) {
  $("ranges").append(el("button", { type: "button", text: word, "aria-pressed": String(span === range), onclick: (event) => {
    range = span;
    for (const one of $("ranges").children) one.setAttribute("aria-pressed", String(one === event.currentTarget));
    drawTimeline();
  } }));
}
$("filter").addEventListener("input", drawMembers);
$("close-run").addEventListener("click", () => ask("close", "", shown));
$("d-cancel").addEventListener("click", () => $("dialog").close());
window.addEventListener("hashchange", route);
window.addEventListener("resize", () => { if (shown && past) drawTimeline(); });
let beat = 0;
setInterval(() => {
  if (!shown) {
    if (overview) { for (const run of overview.runs) run.since_s += 1; drawOverview(); }
    return;
  }
  drawAges();
  if (past) drawLast();
  beat += 1;
  if (past && glance && !glance.gone && glance.phase !== "closed" && (past.rounds.length * past.lanes.length < 2000 || beat % 5 === 0)) drawTimeline();
}, 1000);
route();
