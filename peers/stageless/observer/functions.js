"use strict";
// Functions of the observer's page and of the page of one computer.
const $ = id => document.getElementById(id);
const REASONS = {left: "left politely", moved: "moved to another stage", paused: "paused",
  silent: "stopped responding", not_reached: "cannot be reached"};
const STATES = ["training", "joining", "serving", "paused_by_owner", "ended", "paused", "leaving", "other", "gone"];

// Write only what has changed, so that the browser lays out nothing else again.
function put(node, text) { text = String(text); if (node.textContent !== text) node.textContent = text; }
function mark(node, name) { if (node.className !== name) node.className = name; }
function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}
// Give `parent` one child per item; a child is built once and updated from then on.
function fill(parent, items, build, update) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(build());
  items.forEach((item, index) => update(parent.children[index], item));
}
// Do part of the work in each frame, so that no frame is late.
const frame = () => new Promise(done => requestAnimationFrame(done));
// Created once: a formatter costs more than a hundred uses of it.
const WHOLE = new Intl.NumberFormat("en", {maximumFractionDigits: 0});
const COMPACT = new Intl.NumberFormat("en", {notation: "compact", maximumFractionDigits: 1});
const whole = number => number === null || number === undefined ? "–" : WHOLE.format(number);
const short = number => COMPACT.format(number || 0);
const nats = loss => loss === null || loss === undefined ? "–" : loss.toFixed(3);
function bytes(count) {
  if (count === null) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 999.5) return (unit === "B" || count >= 99.5 ? count.toFixed(0) : count.toFixed(1)) + " " + unit;
    count /= 1000;
  }
  return count.toFixed(1) + " TB";
}
function duration(seconds) {
  seconds = Math.max(0, Math.round(seconds));
  if (seconds < 100) return seconds + " s";
  if (seconds < 6000) return Math.round(seconds / 60) + " min";
  return seconds < 172800 ? Math.round(seconds / 3600) + " h" : Math.round(seconds / 86400) + " days";
}
const age = seconds => seconds < 10 ? "new" : duration(seconds < 100 ? 10 * Math.floor(seconds / 10) : seconds);
const plural = (count, word) => whole(count) + " " + word + (count === 1 ? "" : "s");
const brief = peer => peer.length > 16 ? "…" + peer.slice(-8) : peer;
const hours = seconds => seconds < 5940 ? duration(seconds) : whole(seconds / 3600) + " h";
const percent = share => (share > 0 && share < 0.0995 ? (100 * share).toFixed(1) : Math.round(100 * share)) + " %";

// Show each pair of a label and a value as a tile.
function fillTiles(shown) {
  fill($("tiles"), shown, () => {
    const tile = make("div", "tile");
    tile.append(make("b"), make("span", "soft"));
    return tile;
  }, (tile, [label, value]) => { put(tile.firstChild, value); put(tile.lastChild, label); });
}
// The button #copy copies the text of #join, or selects it where the browser allows no more.
function copyJoinLine() {
  $("copy").addEventListener("click", async () => {
    getSelection().selectAllChildren($("join"));
    let copied = false;
    try { await navigator.clipboard.writeText($("join").textContent); copied = true; }
    catch { copied = document.execCommand("copy"); }
    put($("copy"), copied ? "Copied" : "Selected");
    setTimeout(() => put($("copy"), "Copy"), 2000);
  });
}
