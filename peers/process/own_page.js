"use strict";
const EVERY_MS = 2000, PATIENCE_MS = 6000, SHOWN_PEERS = 50, SHOWN_EVENTS = 8, MEGABIT = 125000, GIGA = 1e9;
// The token comes after `#`. It stays in this tab only, and leaves the address, which people may photograph.
const KEY = "swarmnet-token";
if (location.hash.length > 1) {
  sessionStorage.setItem(KEY, location.hash.slice(1));
  history.replaceState(null, "", location.pathname);
}
async function ask(request) {
  const stop = new AbortController(), late = setTimeout(() => stop.abort(), PATIENCE_MS);
  try {
    const answer = await fetch("control", {method: "POST", signal: stop.signal, cache: "no-store",
      headers: {"Content-Type": "application/json", "X-Swarmnet-Token": sessionStorage.getItem(KEY) || ""},
      body: JSON.stringify(request)});
    const found = await answer.json();
    if (!answer.ok || found.error) throw Object.assign(new Error(found.error || answer.statusText), {status: answer.status});
    return found;
  } finally { clearTimeout(late); }
}

const STATE_TEXTS = {paused_by_owner: "paused by the run's owner", ended: "the run has ended"};
const WHY = {paused_by_owner: "The run's owner has paused the run. This computer starts again when the owner resumes it.",
  ended: "The run's owner has ended it. This computer hands over what others lack, and leaves."};
let paused = false, edited = false;
// The run may stand still although this computer is ready.
const isWaiting = status => !paused && status.state === "training" && status.waits_for.length > 0;
function head(status, credit) {
  const reasons = Object.entries(credit.paused);
  paused = reasons.length > 0;
  put($("name"), credit.name);
  const waits = isWaiting(status), state = paused ? "Paused" : waits ? "waiting" : STATE_TEXTS[status.state] || status.state;
  put($("state"), state);
  mark($("state"), state === "training" ? "good" : "rest");
  document.title = state + " · " + credit.name;
  put($("about"), (credit.stage >= 0 ? `, stage ${credit.stage}` : "") + `, running for ${duration(credit.uptime_seconds)}`);
  put($("work"), credit.own_work || "Nothing has been counted yet. The first contribution counts within some rounds.");
  put($("why"), waits ? `No peer holds stage ${status.waits_for.join(" and ")} of the model, so no text can pass through it. `
      + "Work continues when someone takes it: pass the line below on."
    : WHY[status.state] || reasons.map(([reason, text]) => reason === "user" ? "You have paused it." : text).join("; "));
  const mine = reasons.some(([reason]) => reason === "user");
  put($("pause"), mine ? "Resume" : "Pause");
  $("pause").disabled = false;
  const known = status.round !== null && status.planned;
  if (known) $("bar").hidden = false;
  if (known) $("bar").value = Math.min(1, status.round / status.planned);
  if (credit.progress || !paused) put($("progress"), credit.progress);
}
function tiles(status, credit) {
  const sum = counts => Object.values(counts).reduce((total, count) => total + count, 0);
  const work = status.own_work;
  fillTiles([
    ["tokens trained here", work ? short(work.tokens) : "–"],
    ["time trained", work ? hours(work.seconds) : "–"],
    [work && work.stage !== null ? `share of stage ${work.stage}` : "share of the run",
      work && work.share !== null ? percent(work.share) : "–"],
    ...(credit.rank ? [[`rank of ${credit.rank.workers} workers, by tokens since each started`, credit.rank.place]] : []),
    ["contributions confirmed by others", whole(credit.accepted)],
    ["tokens per second now", status.state !== "training" || isWaiting(status) ? "–" : whole(status.tokens_per_second)],
    ["loss, nats per token", nats(status.loss)],
    ["sent since this stage began", bytes(sum(status.sent))],
    ["memory", status.memory_bytes === null ? "–" : bytes(status.memory_bytes)],
    ...(work && work.joules ? [["energy of the GPU, kWh", (work.joules / 3.6e6).toFixed(2)]] : []),
  ]);
}
function swarm(status) {
  const most = Math.max(1, ...status.stages.map(stage => stage.peers));
  fill($("stages"), status.stages, () => {
    const line = make("div", "stage"), bar = make("div", "bar");
    bar.append(make("i", "training"));
    line.append(make("span"), bar, make("span"));
    return line;
  }, (line, stage) => {
    put(line.children[0], "stage " + stage.stage);
    line.children[1].firstChild.style.width = (100 * stage.peers / most).toFixed(1) + "%";
    put(line.children[2], stage.peers ? plural(stage.peers, "peer") : stage.is_seen ? "no peer" : "not seen from here");
  });
  $("alone").hidden = status.rows.length > 1;
  $("peers").hidden = !status.rows.length;
  fill($("rows"), status.rows.slice(0, SHOWN_PEERS), () => {
    const row = make("tr");
    for (const kind of ["code", "number", "", "number"]) row.append(make("td", kind));
    return row;
  }, (row, peer) => {
    [peer.here ? "this computer" : peer.name || brief(peer.peer), peer.stage < 0 ? "–" : peer.stage, peer.state,
      whole(peer.round)].forEach((value, index) => put(row.children[index], value));
    mark(row, peer.state === "gone" ? "gone" : "");
  });
  put($("more"), status.rows.length > SHOWN_PEERS ? `and ${whole(status.rows.length - SHOWN_PEERS)} more` : "");
}
function rest(status, credit) {
  $("invite").hidden = !credit.join || status.state === "ended";
  put($("join"), credit.join);
  const events = status.events.slice(-SHOWN_EVENTS).reverse();
  $("news").hidden = !events.length;
  fill($("recent"), events, () => make("li"), (item, event) => {
    put(item, `${duration(status.at - event.time)} ago: ${event.text}`);
  });
  put($("used"), `${bytes(credit.month_bytes)} so far`);
}
function limits(values) {
  if (edited) return;
  $("upload").value = values.upload === null ? "" : +(values.upload / MEGABIT).toPrecision(6);
  $("traffic").value = values.traffic_per_month === null ? "" : +(values.traffic_per_month / GIGA).toPrecision(6);
  $("hours").value = values.hours || "";
  $("idle").checked = values.only_when_idle;
  $("mains").checked = values.only_when_plugged_in;
  $("share").value = 100 * values.compute_duty_cycle;
  showShare();
}
function showShare() { put($("share-shown"), $("share").value + " %"); }
function trouble(text) { $("trouble").hidden = !text; put($("trouble"), text); }

let timer, asked = 0;
async function update() {
  clearTimeout(timer);
  const mine = ++asked;
  try {
    const [status, credit, limit] = await Promise.all([ask({do: "status"}), ask({do: "credit"}), ask({do: "limit"})]);
    if (mine !== asked) return;
    head(status, credit);
    tiles(status, credit);
    swarm(status);
    rest(status, credit);
    limits(limit.limits);
    trouble(status.warnings.join(" "));
  } catch (error) {
    if (mine !== asked) return;
    trouble(error.status === 401 ? "This address is not valid, or no longer: type `swarmnet page` in a terminal."
      : error.status ? error.message + ". Trying again."
      : "The peer does not run, or does not answer. Trying again.");
  } finally {
    if (mine === asked && !document.hidden) timer = setTimeout(update, EVERY_MS);
  }
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) update(); });
$("pause").addEventListener("click", async () => {
  const resumes = $("pause").textContent === "Resume";
  $("pause").disabled = true;
  try { await ask(resumes ? {do: "resume"} : {do: "pause", wait: false}); } catch (error) { trouble(error.message); }
  update();
});
$("limits").addEventListener("input", () => { edited = true; $("apply").disabled = false; put($("said"), ""); showShare(); });
$("limits").addEventListener("submit", async event => {
  event.preventDefault();
  $("apply").disabled = true;
  const rate = parseFloat($("upload").value), volume = parseFloat($("traffic").value);
  try {
    const answer = await ask({do: "limit", set: {
      upload: rate ? rate + "Mbit/s" : null,
      traffic_per_month: volume ? volume + "GB" : null,
      hours: $("hours").value.trim() || null,
      only_when_idle: $("idle").checked, only_when_plugged_in: $("mains").checked,
      compute_duty_cycle: $("share").value / 100,
    }});
    put($("said"), answer.saved ? "Applied and saved." : "Applied until the peer stops.");
    edited = false;
    update();
  } catch (error) {
    $("apply").disabled = false;
    put($("said"), "Not applied: " + error.message);
  }
});
copyJoinLine();
update();
