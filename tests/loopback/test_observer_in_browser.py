"""The observer's page in a real Chromium: six real peers of which one is killed, and a thousand made-up ones.

`Browser.look_at_all_sizes` says how to keep pictures, and how to run axe.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

from browser import Browser, in_browser
from observed import NOON, Crowd, record
from swarm import TINY_MODEL, expert_manifest, sign, tiny_manifest
from swarm_scene import RUN, Scene

from peers.config.run_url import join_command
from peers.lab.processes.demo import LOOPBACK
from peers.lab.processes.local_processes import DemoPeer, start
from peers.runtime.http_server import PageServer
from peers.stageless.observer.page_json import SHOWN_PEERS, Board
from peers.stageless.observer.pages import pages
from peers.stageless.observer.sightings import PeerObservations
from peers.stageless.observer.snapshot_of_records import snapshot_of
from peers.stageless.observer.swarm_metrics import SwarmMetrics
from peers.telemetry.snapshot import OwnerOrdersView, Pause
from swarmnet.identifiers import PeerId
from swarmnet.optimizer.agreement.weight_report import encode_report, short_tag
from swarmnet.rounds.result_table import tag_key, tag_of
from swarmnet.run.owner_orders import Ban, OwnerOrders, Withdrawal
from swarmnet.run.schema import Data, TextSource

pytestmark = in_browser(600)

OWN = "127.0.0.1:9410"
PROMISED_SECONDS = 15.0
SLOW_FRAME_MS = 50.0
WINDOWS = 3
"""Of 7 s each. Most must be without a slow frame: other work makes Chromium wait now and then."""
FRAMES = """new Promise(done => {
  const gaps = [], stamps = [], began = performance.now();
  let last = began;
  const watcher = new MutationObserver(() => stamps.push(performance.now()));
  const about = document.getElementById("about");
  if (about) watcher.observe(about, {childList: true, characterData: true, subtree: true});
  requestAnimationFrame(function frame(now) {
    gaps.push(now - last);
    last = now;
    if (now < began + 7000) requestAnimationFrame(frame);
    else { watcher.disconnect(); done({longest: Math.max(...gaps.slice(1)), updates: stamps.length}); }
  });
})"""
CELLS = "[...document.querySelectorAll('#rows td')].map(cell => cell.textContent)"
COSTS = """(async () => {
  const swarm = await (await fetch("swarm.json")).json(), costs = {};
  for (let n = 0; n < 12; n++) {
    for (const row of swarm.rows) { row.tokens += 1000 + n; row.round += 1; row.loss += 0.001; }
    for (const stage of swarm.stages) stage.states.training -= n % 2;
    for (const part of [about, now, tiles, stages, experts, curves, peers, lists]) {
      const began = performance.now(), done = part(swarm);
      document.body.offsetHeight;
      const took = performance.now() - began;
      await done;
      costs[part.name] = Math.min(costs[part.name] ?? Infinity, took);
    }
  }
  return costs;
})()"""
"""Milliseconds of script and layout that each part of an update takes when nothing comes between; of the
rows, the first slice."""


async def longest_frames(browser: Browser, updates: int) -> list[float]:
    """The longest frame, ms, of each window, until most windows agree whether there is a slow one. A window
    sees so many updates of the page, at least."""
    longest: list[float] = []
    while max(slow := slow_ones(longest), len(longest) - slow) <= WINDOWS // 2:
        seen = await browser.js(FRAMES)
        assert seen["updates"] >= updates, seen
        longest.append(round(seen["longest"], 1))
    return longest


def slow_ones(longest: list[float]) -> int:
    return sum(milliseconds > SLOW_FRAME_MS for milliseconds in longest)


# -- six real peers ---------------------------------------------------------------------------------------


async def observer_of(scene: Scene) -> tuple[DemoPeer, str]:
    assert scene.boot is not None
    peer = await start(scene.folder, "observer", {
        "role": "observer", "run": "run.json", "bootstrap": scene.boot.addresses,
        "observer": {"listen": "127.0.0.1:0", "targets": [OWN]}, **LOOPBACK,
    })  # fmt: skip
    scene.peers.append(peer)
    await peer.until_listening()
    page = "the swarm's page is at "
    for _ in range(200):
        found = [line.removeprefix(page) for line in peer.said if line.startswith(page)]
        if found:
            return peer, found[0]
        await asyncio.sleep(0.1)
    raise AssertionError(list(peer.said))


def stage_shows(stage: int, peers: int) -> str:
    return f"document.querySelectorAll('#stages .stage')[{stage}]?.dataset.peers === '{peers}'"


async def test_six_real_peers_are_shown_and_a_killed_ones_stage_thins_within_fifteen_seconds(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(RUN, "stages", [1, 1, 1])
    monkeypatch.setitem(RUN, "model", {**RUN["model"], "num_hidden_layers": 3})
    scene = Scene(tmp_path)
    try:
        await scene.begin()  # Two peers in each of the first two stages.
        for _ in range(2):
            await scene.worker(2)
        observer, url = await observer_of(scene)
        async with Browser(tmp_path / "browser") as browser:
            await browser.look_like(1200, 900)
            await browser.open(url)
            three = " && ".join(stage_shows(stage, 2) for stage in range(3))
            await browser.until(three)
            await browser.until(f"{CELLS}.filter(text => text === 'training').length === 6")
            assert "swarmnet join" in await browser.js("document.getElementById('join').textContent")
            await browser.look_at_all_sizes("six")
            victim = scene.peers[3]
            victim.kill()
            took = await browser.until(stage_shows(1, 1))
            print(f"the killed peer's stage was thinner on the page after {took:.1f} s")
            assert took < PROMISED_SECONDS
            assert await browser.js("$('weak').textContent.startsWith('Most needed now: stage 1 ')")
            recent = "document.getElementById('recent').textContent"
            await browser.until(f"{recent}.includes('could not be dialled')")
            await browser.look_at_all_sizes("six-killed")
            assert await browser.js("fetch('healthz').then(answer => answer.status)") == 200
            assert await browser.js("fetch('sd').then(a => a.json()).then(a => a[0].targets)") == [OWN]
            metrics = await browser.js("fetch('metrics').then(answer => answer.text())")
            assert re.search(r'swarmnet_swarm_stage_peers\{[^}]*stage="1"\} 1\.0', metrics)
            assert "swarmnet_swarm_bootstrap_up{" in metrics
            assert browser.complaints == []
    finally:
        await scene.end()
    assert observer.process.returncode == 0, list(observer.said)


# -- a thousand made-up ones ------------------------------------------------------------------------------


async def test_a_thousand_peers_make_no_slow_frame_and_no_endless_table(tmp_path):
    model = replace(TINY_MODEL, num_hidden_layers=8)
    signed = sign(tiny_manifest((1,) * 8, model=model, name="a thousand peers"))
    sightings = PeerObservations(8)
    crowd = Crowd(sightings, 1000)
    bootstrap = "/ip4/203.0.113.5/tcp/31330/p2p/12D3KooW..."
    board = Board(signed, join_command(signed.run_id, [bootstrap]), "0.1.0")

    def live(seconds: float) -> None:
        crowd.live(seconds)
        board.show(snapshot_of(sightings, signed, crowd.now, walked_at=crowd.now))

    async def live_on() -> None:
        while True:
            live(2.0)
            await asyncio.sleep(1.0)

    for _ in range(100):
        live(5.0)
    made = pages(lambda: board, SwarmMetrics(lambda: board.snapshot), (), lambda: None)
    living = asyncio.create_task(live_on())
    server = PageServer(address=("127.0.0.1", 0), pages=made, key="observer.listen")
    try:
        async with Browser(tmp_path / "browser") as browser:
            await browser.look_like(1200, 900)
            await browser.open(server.url)
            await browser.until(f"document.querySelectorAll('#rows tr').length === {SHOWN_PEERS}")
            assert "more: search for them" in await browser.js("document.getElementById('more').textContent")
            await browser.look_at_all_sizes("thousand")
            costs = await browser.js(COSTS)
            browser.goes_first()
            longest = await longest_frames(browser, 2)
            print(f"script and layout, ms: {costs}; longest frames of windows of 7 s, ms: {longest}")
            assert max(costs.values()) < SLOW_FRAME_MS / 2
            assert await browser.js("document.querySelectorAll('*').length") < 2000
            await browser.js("$('search').value = 'machine 999'")
            await browser.js("$('search').dispatchEvent(new Event('input'))")
            await browser.until("document.querySelectorAll('#rows tr').length === 1")
            assert browser.complaints == []
            if slow_ones(longest) > WINDOWS // 2:
                await browser.open("about:blank")
                empty = await longest_frames(browser, 0)
                assert slow_ones(empty) > WINDOWS // 2, f"{longest} ms, and {empty} on an empty page"
    finally:
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
        server.close()


# -- a website that would read it -------------------------------------------------------------------------


async def test_a_website_whose_name_points_to_this_machine_reads_nothing_through_a_visitors_browser(tmp_path):
    board = Board(sign(tiny_manifest()), "swarmnet join RUN", "0.1.0")
    made = pages(lambda: board, SwarmMetrics(lambda: board.snapshot), (), lambda: None)
    status = "fetch('/metrics').then(answer => answer.status)"
    with PageServer(address=("127.0.0.1", 0), pages=made, key="observer.listen") as server:
        async with Browser(tmp_path / "browser", resolves="rebound.example") as browser:
            await browser.open(f"http://rebound.example:{server.address[1]}/")
            await browser.until("document.body?.innerText.startsWith('asked by another name')")
            assert await browser.js(status) == 403
            await browser.open(server.url)
            await browser.until("document.getElementById('rows') !== null")
            assert await browser.js(status) == 200


# -- a run that its owner holds ---------------------------------------------------------------------------

HOSTILE = "<img src=x onerror=alert(1)><b>bold</b>" + "w" * 120
TEXT_OF = "document.getElementById('{}').textContent"
HELD = "document.getElementById('held')?.hidden === false"


def held_board() -> Board:
    """Of a run by invite; what its owner typed is meant to break the page."""
    texts = (
        TextSource("the encyclopaedia", "a.jsonl", "CC-BY-SA-4.0"),
        TextSource(HOSTILE, "b.txt", "unknown"),
    )
    manifest = tiny_manifest(
        (1, 1, 1), name="held", access="invite", contact="someone@example.org " + HOSTILE
    )
    signed = sign(replace(manifest, data=Data(texts, seq_len=16, micro_batch_size=2)))
    return Board(signed, f"swarmnet join {signed.run_id} --bootstrap /ip4/203.0.113.5/tcp/31330", "0.1.0")


async def test_a_run_that_its_owner_holds_says_so_with_the_reason_and_whom_to_ask_for_an_invite(tmp_path):
    board, sightings = held_board(), PeerObservations(3)
    for number in range(6):
        sightings.recorded(record(f"peer-{number}", number % 3, state="paused_by_owner"), NOON)
        sightings.answered(f"peer-{number}", NOON)

    def show(order: OwnerOrders, pause: Pause | None = None) -> None:
        board.show(
            snapshot_of(sightings, board.signed, NOON, OwnerOrdersView(order, NOON, pause), walked_at=NOON)
        )

    bans = (Ban("one", HOSTILE), Ban("two", "noise"))
    order = OwnerOrders(
        int((NOON - 60) * 1e6), HOSTILE, True, bans=bans, withdrawn=(Withdrawal("ab" * 32, ""),)
    )
    show(order, Pause(NOON - 7200, "a look at the data " + HOSTILE))
    made = pages(lambda: board, SwarmMetrics(lambda: board.snapshot), (), lambda: None)
    server = PageServer(address=("127.0.0.1", 0), pages=made, key="observer.listen")
    try:
        async with Browser(tmp_path / "browser") as browser:
            await browser.look_like(1200, 900)
            await browser.open(server.url)
            await browser.until(HELD)
            await browser.until(f"{CELLS}.filter(text => text === 'paused_by_owner').length === 6")
            told = await browser.js(TEXT_OF.format("held"))
            assert told.startswith("Paused since ")
            assert "(2 h ago)Reason: “a look at the data <img" in told
            invited = await browser.js(TEXT_OF.format("access"))
            assert "add --invite" in invited
            assert "someone@example.org <img" in invited
            facts = await browser.js(TEXT_OF.format("run"))
            assert "the run is paused; 2 peers banned; 1 document withdrawn" in facts
            assert "the encyclopaedia (CC-BY-SA-4.0), <img" in facts
            assert await browser.js(stage_shows(0, 2)), "who is held holds its stage"
            assert (
                await browser.js(
                    "document.querySelectorAll('img[src]:not([src=\"join.svg\"]), #held b b, dd b').length"
                )
                == 0
            )
            await browser.look_at_all_sizes("held")
            show(order)
            await browser.until(f"{TEXT_OF.format('held-why')}.startsWith('Newest order, of ')")
            show(replace(order, paused=False))
            await browser.until(f"!({HELD})")
            assert browser.complaints == []
    finally:
        server.close()


# -- a run whose peers each train some experts ------------------------------------------------------------


async def test_a_run_with_experts_shows_who_trains_which_and_what_nobody_trains(tmp_path):
    signed = sign(expert_manifest(num_experts=6, top_k=2, groups=3))
    board, sightings = Board(signed, "swarmnet join RUN", "0.1.0"), PeerObservations(3)

    def show(*groups: int) -> None:
        for number, group in enumerate(groups):
            trained = (95, 95, 60) if 2 not in groups else (95, 95, 95)
            experts = {"experts_group": group, "experts_trained": trained}
            told = record(f"peer-{number}", number // 3, NOON + len(groups), **experts)
            sightings.recorded(told, NOON + len(groups))
            sightings.answered(told.peer, NOON)
        board.show(snapshot_of(sightings, signed, NOON, walked_at=NOON))

    show(0, 1, 1)
    table = "[...$('groups').rows].map(row => [...row.cells].map(cell => cell.textContent))"
    made = pages(lambda: board, SwarmMetrics(lambda: board.snapshot), (), lambda: None)
    server = PageServer(address=("127.0.0.1", 0), pages=made, key="observer.listen")
    try:
        async with Browser(tmp_path / "browser") as browser:
            await browser.look_like(1200, 900)
            await browser.open(server.url)
            await browser.until("document.querySelectorAll('#groups tr').length === 9")
            assert (await browser.js(table))[:4] == [
                ["0", "0 to 1", "1", "95 (newest)"], ["0", "2 to 3", "2", "95 (newest)"],
                ["0", "4 to 5", "none", "60 (35 ago)"], ["1", "0 to 1", "none", "unknown"],
            ]  # fmt: skip
            assert await browser.js("$('groups').querySelectorAll('.bad').length") == 7
            await browser.look_at_all_sizes("experts")
            assert "round 100 of 1,000 planned (10 %)" in await browser.js(TEXT_OF.format("progress"))
            show(0, 1, 2, 0, 1, 2)
            await browser.until("$('groups').querySelectorAll('.bad').length === 3")
            assert (await browser.js(table))[2] == ["0", "4 to 5", "1", "95 (newest)"]
            assert browser.complaints == []
    finally:
        server.close()


async def test_a_run_without_groups_of_experts_has_no_such_table(tmp_path):
    board = held_board()
    made = pages(lambda: board, SwarmMetrics(lambda: board.snapshot), (), lambda: None)
    board.show(snapshot_of(PeerObservations(3), board.signed, NOON, walked_at=NOON))
    with PageServer(address=("127.0.0.1", 0), pages=made, key="observer.listen") as server:
        async with Browser(tmp_path / "browser") as browser:
            await browser.open(server.url)
            await browser.until("document.getElementById('name')?.textContent === 'held'")
            assert await browser.js("document.getElementById('experts').offsetHeight") == 0


# -- peers that others doubt ------------------------------------------------------------------------------


async def test_peers_that_others_doubt_are_named_with_the_reason_and_the_weight_of_their_votes(tmp_path):
    signed = sign(tiny_manifest())
    board, sightings = Board(signed, "swarmnet join RUN", "0.1.0"), PeerObservations(3)
    names = ["anna", "ben", "cleo", "dora"]
    marks = [(short_tag(tag_key(tag_of(PeerId(name)))), 15) for name in names]
    liar = "12D3KooW" + "x" * 44
    told = {"vote_weights": encode_report(95, [*marks, (short_tag(tag_key(tag_of(PeerId(liar)))), 2)])}
    for stage, peers in enumerate((["zoe", "yan"], [*names, liar, "new"], ["max"])):
        for peer in peers:
            avoids = ((liar, 2, 3),) if peer in ("zoe", "max") else ()
            fields = {"name": HOSTILE[:64] if peer == liar else peer, "avoids": avoids}
            sightings.recorded(record(peer, stage, **fields, **(told if peer in names else {})), NOON)
            sightings.answered(PeerId(peer), NOON)
    board.show(snapshot_of(sightings, signed, NOON, walked_at=NOON))
    made = pages(lambda: board, SwarmMetrics(lambda: board.snapshot), (), lambda: None)
    with PageServer(address=("127.0.0.1", 0), pages=made, key="observer.listen") as server:
        async with Browser(tmp_path / "browser") as browser:
            await browser.look_like(1200, 900)
            await browser.open(server.url)
            await browser.until("document.getElementById('doubts')?.hidden === false")
            said = await browser.js(TEXT_OF.format("doubt"))
            assert "its votes weigh 13%" in said
            assert "avoided by 2 peers (" in said
            assert f"swarmnet order ban {signed.run_id} PEER" in said
            await browser.until("document.querySelectorAll('#rows tr').length === 9")
            weights = await browser.js("[...$('rows').rows].map(row => row.cells[7].textContent)")
            assert sorted(weights) == ["100 %"] * 4 + ["13 %", "new", "–", "–", "–"]
            assert (
                await browser.js("document.querySelectorAll('img[src]:not([src=\"join.svg\"])').length") == 0
            )
            await browser.look_at_all_sizes("doubted")
            assert browser.complaints == []
