"use strict";
const EVERY_MS = 2000, PATIENCE_MS = 8000, ROWS_A_FRAME = 20, SHOWN_EVENTS = 20;

const CLOCK = new Intl.DateTimeFormat(undefined, {hour: "2-digit", minute: "2-digit", second: "2-digit"});
const DAY = new Intl.DateTimeFormat(undefined, {month: "short", day: "numeric", hour: "2-digit", minute: "2-digit"});
const WHEN = new Intl.DateTimeFormat(undefined, {dateStyle: "medium", timeStyle: "short"});
function time(seconds) {
  const date = new Date(seconds * 1000);
  return Number.isNaN(date.getTime()) ? "an invalid time" : WHEN.format(date);
}
const PROVEN = "Counted are contributions to the model for which another peer of the stage has signed a receipt, as far"
  + " as this page saw them. * Tokens and time are what peers say of themselves: nothing proves them.";
const quoted = reason => reason ? `“${reason}”` : "no reason given";

// What the run does now. A run that is paused on purpose must not look like a broken one.
function now(swarm) {
  const order = swarm.ordered, ago = at => `${time(at)} (${duration(swarm.at - at)} ago)`;
  mark($("now"), swarm.does.code);
  put($("does"), swarm.does.text);
  $("held").hidden = !order.held || swarm.does.code === "ended";
  const since = order.held_since !== null;
  if (order.held) {
    put($("held-since"), since ? `Paused since ${ago(order.held_since)}` : "");
    put($("held-why"), since ? `Reason: ${quoted(order.held_reason)}.`
      : `Newest order, of ${ago(order.given_at)}: ${quoted(order.reason)}.`);
  }
  const known = swarm.last !== null && swarm.planned !== null;
  $("bar").hidden = !known;
  if (known) $("bar").value = Math.min(1, swarm.last.round / swarm.planned);
  put($("progress"), known ? progress(swarm) : "");
  $("stuck").hidden = !swarm.obstacles.length;
  fill($("obstacles"), swarm.obstacles, () => {
    const item = make("li");
    item.append(make("b"), make("span"), make("div", "soft"));
    return item;
  }, (item, obstacle) => [obstacle.where, obstacle.why, obstacle.help].forEach((text, n) => put(item.children[n], text)));
}
// How many rounds are done, how many per cent that is, and when they end at this pace.
function progress(swarm) {
  const {round, at} = swarm.last, done = round >= swarm.planned;
  return `round ${whole(round)} of ${whole(swarm.planned)} planned` + (done ? "" : ` (${percent(round / swarm.planned)})`)
    + (swarm.seconds_left === null ? "" : `, about ${duration(swarm.seconds_left)} left at this pace`)
    + (swarm.round === null ? `, seen ${duration(swarm.at - at)} ago` : "");
}
function ordered(swarm) {
  const order = swarm.ordered;
  if (order.given_at === null) return order.asked_at ? "none" : "not known yet";
  const counts = [[order.banned, "peer", "banned"], [order.withdrawn, "document", "withdrawn"],
    [order.revoked, "invite", "revoked"]].filter(([count]) => count)
    .map(([count, word, done]) => plural(count, word) + " " + done);
  return [`newest of ${time(order.given_at)}: ${quoted(order.reason)}`, order.held ? "the run is paused" : "",
    ...counts].filter(Boolean).join("; ");
}
function access(run) {
  if (run.access === "open") return "Open: every peer may join.";
  return "By invite only: add --invite and your invite to this command. Ask the run's owner for one: "
    + (run.contact || "the run names no contact");
}
function sources(run) {
  const shown = run.sources.map(source => source.licence && source.licence !== "unknown"
    ? `${source.name} (${source.licence})` : `${source.name} (licence not stated)`);
  return shown.join(", ") + (run.more_sources ? ` and ${whole(run.more_sources)} more` : "");
}

function tiles(swarm) {
  const checkpoint = swarm.checkpoint, last = swarm.last || {}, old = swarm.round === null && swarm.last ? ", when last seen" : "";
  const held_out = swarm.eval_loss ?? last.eval_loss ?? null, tokens = swarm.finalized_tokens ?? last.tokens ?? null;
  fillTiles([
    ["workers", whole(swarm.peers)],
    ["round" + old, whole(swarm.round ?? last.round)],
    ["loss, nats per token" + old, nats(swarm.loss ?? last.loss)],
    ...(held_out === null ? [] : [["loss on held-out text" + old, nats(held_out)]]),
    ["tokens per second", swarm.does.code === "training" ? whole(swarm.tokens_per_second) : "–"],
    tokens === null ? ["tokens since start", short(swarm.tokens)] : ["tokens in total" + old, short(tokens)],
    ["sent per second", bytes(swarm.sent_bytes_per_second)],
    ["received per second", bytes(swarm.received_bytes_per_second)],
    ["last checkpoint of all stages", checkpoint ? duration(swarm.at - checkpoint.at) + " ago" : "none yet"],
  ]);
}

function stages(swarm) {
  const held = stage => STATES.reduce((sum, state) => sum + stage.states[state], 0);
  const most = Math.max(1, ...swarm.stages.map(held));
  fill($("stages"), swarm.stages, () => {
    const line = make("div", "stage"), bar = make("div", "bar"), right = make("span");
    for (const state of STATES) bar.append(make("i", state));
    right.append(make("span", "count"), make("span", "speed soft"));
    line.append(make("span"), bar, right);
    return line;
  }, (line, stage) => {
    const [label, bar, right] = line.children;
    put(label, "stage " + stage.stage);
    STATES.forEach((state, index) => {
      const width = (100 * stage.states[state] / most).toFixed(2) + "%";
      if (bar.children[index].style.width !== width) bar.children[index].style.width = width;
    });
    line.title = STATES.filter(state => stage.states[state]).map(state => stage.states[state] + " " + state).join(", ");
    line.dataset.peers = stage.peers;
    put(right.children[0], stage.peers ? plural(stage.peers, "peer") : "no peer");
    mark(right.children[0], stage.peers < 2 ? "count bad" : "count");
    put(right.children[1], stage.tokens_per_second ? "  " + short(stage.tokens_per_second) + " tok/s" : "");
  });
  const weakest = swarm.weakest === null ? null : swarm.stages[swarm.weakest];
  put($("weak"), weakest === null || swarm.does.code === "stuck" ? "" : `Most needed now: stage ${weakest.stage} (${weakest.peers
    ? plural(weakest.peers, "peer") : "no peer"}, ${short(weakest.tokens_per_second)} tok/s). A newcomer goes there.`);
  $("join-in").hidden = swarm.does.code === "ended";
  put($("join"), swarm.run.join);
  $("code").hidden = !swarm.run.has_code;
  const image = $("code").firstElementChild;
  if (swarm.run.has_code && !image.src) image.src = "join.svg"; // Before, the observer may not have it yet.
  put($("access"), access(swarm.run));
}

// Return the SVG path of a curve in a box of 400 by 100, with gaps where no value is known.
function path(times, values, low, high) {
  const from = times[0], span = Math.max(1, times[times.length - 1] - from);
  let text = "", pen = "M";
  for (let n = 0; n < times.length; n++) {
    if (values[n] === null) { pen = "M"; continue; }
    const x = 400 * (times[n] - from) / span, y = 96 - 92 * (values[n] - low) / Math.max(1e-9, high - low);
    text += pen + x.toFixed(1) + " " + y.toFixed(1);
    pen = "L";
  }
  return text;
}
const known = values => values.filter(value => value !== null);
function curves(swarm) {
  const curve = swarm.curve, times = curve.at;
  const line = (name, values, low, high) => {
    const text = known(values).length > 1 ? path(times, values, low, high) : "";
    if ($(name + "-line").getAttribute("d") !== text) $(name + "-line").setAttribute("d", text);
  };
  // Both losses have one axis.
  const losses = known([...curve.loss, ...curve.eval_loss]), low = Math.min(...losses), high = Math.max(...losses);
  line("loss", curve.loss, low, high);
  line("eval", curve.eval_loss, low, high);
  $("eval-key").hidden = known(curve.eval_loss).length < 2;
  [high, (high + low) / 2, low].forEach((value, n) => put($("loss-axis").children[n], losses.length > 1 ? nats(value) : ""));
  const trained = known(curve.loss);
  put($("loss-text"), trained.length > 1 ? `In this picture, the loss in training goes from ${nats(trained[0])} to ${nats(trained[trained.length - 1])}.`
    : "There is no curve yet: it begins with the first rounds.");
  for (const [name, values, label] of [["flow", curve.tokens_per_second, short], ["peers", curve.peers, whole]]) {
    const most = Math.max(0, ...known(values)), shown = known(values).length > 1;
    line(name, values, 0, most);
    put($(name + "-axis").children[0], shown ? label(most) : "");
    put($(name + "-axis").children[1], shown ? label(0) : "");
  }
  const from = times[0], to = times[times.length - 1], form = to - from < 86400 ? CLOCK : DAY;
  const round = at => curve.round[times.findIndex(each => each >= at)] ?? null;
  for (const axis of document.querySelectorAll(".times"))
    [from, (from + to) / 2, to].forEach((at, index) => put(axis.children[index], times.length > 1 ? form.format(at * 1000)
      + (axis.parentNode.classList.contains("tall") && round(at) !== null ? ` · round ${whole(round(at))}` : "") : ""));
}

function experts(swarm) {
  $("experts").hidden = !swarm.experts.length;
  fill($("groups"), swarm.experts, () => {
    const row = make("tr");
    for (const kind of ["number", "", "number", "number"]) row.append(make("td", kind));
    return row;
  }, (row, group) => {
    const ago = group.stale_rounds === null ? "" : group.stale_rounds ? ` (${whole(group.stale_rounds)} ago)` : " (newest)";
    const values = [group.stage, group.first === group.last ? group.first : `${group.first} to ${group.last}`,
      group.holders || "none", group.trained === null ? "unknown" : whole(group.trained) + ago];
    values.forEach((value, index) => put(row.children[index], value));
    mark(row.children[2], group.holders ? "number" : "number bad");
  });
  put($("more-experts"), swarm.more_experts ? `and ${whole(swarm.more_experts)} groups with more peers` : "");
}

const votes = peer => peer.is_new_voter ? "new" : peer.vote_weight === null ? "–"
  : Math.round(100 * peer.vote_weight) + " %";
function doubts(swarm) {
  $("doubts").hidden = !swarm.doubts.length;
  fill($("doubt"), swarm.doubts, () => make("li"), put);
}
function newRow() {
  const row = make("tr");
  for (const kind of ["name", "code", "number", "", "number", "number", "number", "number", "number", "number"])
    row.append(make("td", kind));
  return row;
}
async function peers(swarm) {
  const rows = $("rows");
  while (rows.children.length > swarm.rows.length) rows.lastElementChild.remove();
  for (let n = 0; n < swarm.rows.length; n++) {
    if (n && n % ROWS_A_FRAME === 0) await frame();
    if (n >= rows.children.length) rows.append(newRow());
    const row = rows.children[n], peer = swarm.rows[n], cells = row.children;
    const values = [peer.name || "–", brief(peer.peer), peer.stage < 0 ? "–" : peer.stage,
      peer.state + (peer.state === "gone" || peer.answers ? "" : " (by its record)"),
      peer.stage < 0 ? "–" : whole(peer.round), nats(peer.loss), whole(peer.tokens_per_second), votes(peer),
      short(peer.tokens),
      age(swarm.at - peer.signed_at)];
    values.forEach((value, index) => put(cells[index], value));
    if (cells[1].title !== peer.peer) cells[1].title = peer.peer;
    mark(cells[7], votes(peer) !== "–" && peer.vote_weight < 0.5 && !peer.is_new_voter ? "number bad" : "number");
    mark(row, peer.state === "gone" ? "gone" : "");
  }
  const more = [];
  if (swarm.more) more.push(`and ${whole(swarm.more)} more: search for them above`);
  if (swarm.left_out) more.push(`${whole(swarm.left_out)} records are beyond this page's limit`);
  if (swarm.search && !swarm.rows.length) more.push("no peer matches");
  put($("more"), more.join("; "));
}

function lists(swarm) {
  fill($("contributors"), swarm.contributors.map((entry, index) => [index + 1, ...entry]), () => {
    const row = make("tr");
    for (const kind of ["number", "", "number", "number", "number"]) row.append(make("td", kind));
    return row;
  }, (row, [rank, peer, name, confirmed, tokens, seconds]) => {
    [rank, name || brief(peer), confirmed ? whole(confirmed) : "–", short(tokens), seconds ? hours(seconds) : "–"]
      .forEach((value, n) => put(row.children[n], value));
    if (row.children[1].title !== peer) row.children[1].title = peer;
  });
  put($("no-people"), swarm.contributors.length ? PROVEN : "No tokens are claimed yet.");
  $("answers").hidden = swarm.answer === null;
  if (swarm.answer !== null) {
    put($("prompt"), swarm.answer.prompt);
    put($("answer"), swarm.answer.text);
    put($("answered"), `The bold text was given. The model wrote the rest ${duration(swarm.at - swarm.answer.at)} ago,`
      + ` with its weights of round ${whole(swarm.answer.round)}. It was not checked.`);
  }
  const away = Object.entries(swarm.away);
  put($("departures"), away.length
    ? "Not back: " + away.map(([code, count]) => `${whole(count)} ${REASONS[code] || code}`).join(", ")
    : "No peer is away.");
  fill($("recent"), swarm.events.slice(-SHOWN_EVENTS).reverse(), () => make("li"), (item, event) => {
    put(item, `${duration(swarm.at - event.time)} ago: ${event.text}`);
  });
}

function about(swarm) {
  const run = swarm.run;
  put($("name"), run.name);
  document.title = run.name + " · swarmnet";
  put($("purpose"), run.intended_use);
  put($("about"), `A language model that people train together. ${plural(run.layers.length, "stage")}, `
    + `as of ${new Date(swarm.at * 1000).toLocaleTimeString()}` + (run.access === "open" ? ", open" : ", by invite"));
  const silent = swarm.at - swarm.walked_at;
  const trouble = !swarm.walked_at ? "The directory has not been read yet."
    : silent > 180 ? `The directory has not responded for ${duration(silent)}: this page may be outdated.` : "";
  $("trouble").hidden = !trouble;
  put($("trouble"), trouble);
  const facts = [
    ["licence of the model", run.licence || "not stated"], ["text", sources(run)],
    ["run id", run.id], ["owner", run.owner], ["layers by stage", run.layers.join(" + ")],
    ["contact", run.contact || "–"], ["access", run.access === "open" ? "open" : "by invite"],
    ["owner's orders", ordered(swarm)],
    ["versions", swarm.versions.map(([version, count]) => `${version || "unknown"}: ${count}`).join(", ") || "–"],
    ["bootstraps", Object.entries(swarm.bootstraps).map(([at, up]) => at + (up ? " responds" : " does not respond"))
      .join("; ") || "–"],
    ["settled round", swarm.settled < 0 ? "none yet" : whole(swarm.settled)],
    ["directory read", swarm.walked_at ? duration(silent) + " ago" : "not yet"],
  ];
  fill($("run"), facts.flat(), () => make($("run").children.length % 2 ? "dd" : "dt"), put);
}

let timer, asked = 0;
async function update() {
  clearTimeout(timer);
  const mine = ++asked, stop = new AbortController(), late = setTimeout(() => stop.abort(), PATIENCE_MS);
  const search = $("search").value.trim();
  try {
    const answer = await fetch("swarm.json" + (search ? "?search=" + encodeURIComponent(search) : ""),
      {signal: stop.signal, cache: "no-store"});
    const swarm = await answer.json();
    if (mine !== asked) return;
    if (!answer.ok) throw new Error(swarm.error || answer.statusText);
    const others = Object.entries(swarm.others).map(([role, count]) => ", " + plural(count, role)).join("");
    put($("peers-head"), `Peers (${plural(swarm.peers, "worker")}${others})`);
    for (const part of [about, now, doubts, tiles, stages, experts, curves, peers, lists]) {
      await part(swarm);
      await frame();
      if (mine !== asked) return;
    }
  } catch (error) {
    if (mine !== asked) return;
    $("trouble").hidden = false;
    put($("trouble"), `The observer does not respond (${error.message}); this page may be outdated. Trying again.`);
  } finally {
    clearTimeout(late);
    if (mine === asked && !document.hidden) timer = setTimeout(update, EVERY_MS);
  }
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) update(); });
let typing;
$("search").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(update, 200); });
copyJoinLine();
update();
