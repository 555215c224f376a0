"""The page of one's own computer in a real Chromium, of a worker that trains with another one on 127.0.0.1.

`Browser.look_at_all_sizes` says how to keep pictures, and how to run axe.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from browser import TEXT, Browser, in_browser
from processes import publish_run
from swarm_scene import RUN, Scene

from peers.config.peer_file import load
from peers.lab.processes.demo import LOOPBACK
from peers.lab.processes.local_processes import DemoPeer, start
from peers.runtime.control_client import ask

pytestmark = in_browser(600)
STATUS = "fetch('control', {{method: 'POST', headers: {}, body: '{{}}'}}).then(answer => answer.status)"


async def two_workers(scene: Scene) -> DemoPeer:
    """The one of two workers that has a page."""
    run = RUN | {"stages": [1], "model": RUN["model"] | {"num_hidden_layers": 1}, "name": "tiny tales"}
    run["sync"] = {"decay_rounds": 5000}
    publish_run(scene.folder, run)
    scene.boot = await start(scene.folder, "boot", {"role": "bootstrap", "run": "run.json", **LOOPBACK})
    await scene.boot.until_listening()
    await scene.worker(0)
    keys = {"run": "run.json", "bootstrap": scene.boot.addresses, "page": "127.0.0.1:0", **LOOPBACK}
    scene.peers.append(await start(scene.folder, "attic", keys))
    await scene.peers[-1].until_listening()
    return scene.peers[-1]


async def asked(state: Path, request: dict) -> dict:
    return await asyncio.to_thread(ask, state, request, 15.0)


async def test_the_page_shows_pauses_and_limits_the_own_peer_and_nobody_else_can(tmp_path):
    scene = Scene(tmp_path)
    try:
        peer = await two_workers(scene)
        url = (await asked(peer.state, {"do": "page"}))["url"]
        assert not [line for line in peer.said if url in line], "the secret is in no log"
        lead = peer.state / "page.html"
        assert lead.stat().st_mode & 0o777 == 0o600
        async with Browser(tmp_path / "browser", resolves="rebound.example") as browser:
            await browser.look_like(1280, 900)
            await browser.open(lead.as_uri())
            await browser.until("location.hash === '' && location.protocol === 'http:'")
            await browser.until(f"{TEXT.format('state')} === 'training'")
            await browser.until(f"{TEXT.format('work')}.startsWith('This computer has trained ')")
            await browser.until(f"{TEXT.format('progress')}.includes(' of 5,000 (')")
            await browser.until(f"{TEXT.format('join')}.startsWith('swarmnet join swarmnet:')")
            await browser.until("document.querySelectorAll('#rows tr').length === 2")
            await browser.until(f"{TEXT.format('progress')}.includes(' left at this pace')")
            await browser.look_at_all_sizes("own-live")
            # In one step, as a person's typing: an update between the two would show the limits that hold.
            typed = "$('upload').value = '4'; $('share').value = '50'; $('hours').value = '25:00-8'; "
            await browser.js(typed + "$('limits').dispatchEvent(new Event('input'))")
            await browser.js("$('apply').click()")
            await browser.until(f"{TEXT.format('said')}.startsWith('Not applied: ')")
            await browser.js("$('hours').value = ''; $('apply').disabled = false; $('apply').click()")
            await browser.until(f"{TEXT.format('said')} === 'Applied until the peer stops.'")
            limits = (await asked(peer.state, {"do": "limit"}))["limits"]
            assert (limits["upload"], limits["compute_duty_cycle"]) == (500_000.0, 0.5)
            await browser.js("$('pause').click()")
            await browser.until(f"{TEXT.format('state')} === 'Paused' && {TEXT.format('pause')} === 'Resume'")
            await browser.until(f"{TEXT.format('why')} === 'You have paused it.'")
            await browser.until(f"{TEXT.format('work')}.startsWith('This computer has trained ')")
            await browser.until("!document.getElementById('alone').hidden")
            await browser.look_at_all_sizes("own-paused")
            await browser.js("$('pause').click()")
            await browser.until(f"{TEXT.format('state')} === 'training'")
            assert browser.complaints == []
            # In the browser of the user, another site gets nothing, not even with the token.
            token = url.rpartition("#")[2]
            site = url.partition("#")[0].replace("127.0.0.1", "rebound.example")
            await browser.open(site)
            await browser.until("document.body?.innerText.startsWith('asked by another name')")
            header = json.dumps({"Content-Type": "application/json", "X-Swarmnet-Token": token})
            assert await browser.js(STATUS.format(header)) == 403
            own = url.partition("#")[0]
            elsewhere = f"fetch('{own}control', {{method: 'POST', headers: {header}, body: '{{}}'}})"
            assert await browser.js(f"{elsewhere}.then(() => 'reached', () => 'refused')") == "refused"
    finally:
        await scene.end()
    assert not lead.exists()
    assert load(tmp_path / "attic.yaml").limits.upload is None, "a file that join did not write stays"
