"""A run's public page and the page of one of its computers in a real Chromium: the run trains, is paused, is
stuck because a stage has lost its only peer, and ends. In between the observer starts again.

`Browser.look_at_all_sizes` says how to keep pictures, and how to run axe.
"""

from __future__ import annotations

import asyncio

import pytest
from archive_scene import Scene, order, owned
from browser import TEXT, Browser, in_browser

from peers.lab.processes.local_processes import DemoPeer
from peers.runtime.control_client import ask

pytestmark = in_browser(900)
PAGE = "the swarm's page is at "
PROMPT = "the first <b>text</b>"
DOES = "document.getElementById('now')?.className === '{}'"
OWN_STATE = 'document.getElementById("state")?.textContent === "{}"'
SWARM = "fetch('swarm.json').then(answer => answer.json())"


async def observer_page(scene: Scene, keys: dict) -> tuple[DemoPeer, str]:
    """An observer that scores a held-out text and continues a prompt, and the address of its page."""
    (scene.folder / "held.txt").write_text("a text that is not trained on. " * 40)
    observer = await scene.peer("observer", {
        "role": "observer", "run": "run.json", "bootstrap": keys["bootstrap"],
        "observer": {"listen": "127.0.0.1:0"},
        "evaluating": {"seconds": 3, "text": "held.txt", "prompt": PROMPT},
    })  # fmt: skip
    await scene.until(lambda: any(line.startswith(PAGE) for line in observer.said), "a page")
    return observer, next(line.removeprefix(PAGE) for line in observer.said if line.startswith(PAGE))


async def look_at_both(browser: Browser, own: DemoPeer, url: str, name: str, state: str) -> str:
    """Look at the own page, which shows `state`, and then at the public one; the own page's address."""
    secret = (await asyncio.to_thread(ask, own.state, {"do": "page"}, 15.0))["url"]
    await browser.open(secret)
    await browser.until(OWN_STATE.format(state))
    await browser.look_at_all_sizes(f"own-{name}")
    await browser.open(url)
    await browser.until(f"document.readyState === 'complete' && {DOES.format(name)}")
    await browser.look_at_all_sizes(f"public-{name}")
    return secret.partition("#")[0]


async def test_the_public_page_tells_what_a_run_does_and_keeps_what_it_knew_over_a_restart(tmp_path):
    purpose = {"intended_use": "To see a page work.", "license": "apache-2.0"}
    async with owned(tmp_path, "tales", **purpose) as (scene, keys):
        anna = await scene.peer("anna", {**keys, "stage": 0, "page": "127.0.0.1:0"})
        keys["checkpoint_seconds"] = 2
        ben = await scene.peer("ben", {**keys, "stage": 1})
        observer, url = await observer_page(scene, keys)
        async with Browser(tmp_path / "browser") as browser:
            await browser.look_like(1280, 900)
            await browser.open(url)
            await browser.until(DOES.format("training"))
            await browser.until("document.querySelectorAll('#contributors tr').length === 2")
            await browser.until("document.getElementById('loss-line').getAttribute('d').length > 50")
            await browser.until("document.getElementById('eval-line').getAttribute('d').length > 20")
            await browser.until(f"{TEXT.format('prompt')} === '{PROMPT}'")
            await browser.until(f"{TEXT.format('progress')}.includes(' left at this pace')")
            await browser.until("[...$('contributors').rows].every(row => row.cells[4].textContent !== '–')")
            head = await browser.js("document.head.innerHTML")
            assert f'content="{url}/preview.png"' in head
            assert await browser.js("fetch('preview.png').then(answer => answer.status)") == 200
            await look_at_both(browser, anna, url, "training", "training")

            await order(scene, "pause", "--reason", "a look at the data")
            await look_at_both(browser, anna, url, "paused", "paused by the run's owner")
            assert "“a look at the data”" in await browser.js(TEXT.format("held"))
            await order(scene, "resume", "--reason", "it is fine")
            await browser.until(DOES.format("training"))

            ben.kill()
            await look_at_both(browser, anna, url, "stuck", "waiting")
            stuck = await browser.js(TEXT.format("obstacles"))
            assert stuck.startswith("Stage 1No peer holds this part of the model")
            assert " --stage 1" in stuck
            scene.peers.remove(ben)
            await scene.peer("ben", {**keys, "stage": 1})
            await browser.until(DOES.format("training"))

            before = await browser.js(SWARM)
            await browser.open("about:blank")
            await observer.stop(60.0)
            scene.peers.remove(observer)
            observer, url = await observer_page(scene, keys)
            await browser.open(url)
            await browser.until(f"document.readyState === 'complete' && {DOES.format('training')}")
            after = await browser.js(SWARM)
            people = {name: (tokens, seconds) for _, name, _, tokens, seconds in after["contributors"]}
            for _, name, _, tokens, seconds in before["contributors"]:
                assert people[name] >= (tokens, seconds)
            assert after["curve"]["at"][0] == pytest.approx(before["curve"]["at"][0], abs=0.1)
            assert after["answer"]["prompt"] == PROMPT

            assert browser.complaints == []
            # An order needs some seconds to come around, and rounds take a tenth of a second here.
            await order(scene, "end", "--from-round", max(scene.settled(anna)) + 250)
            left = await look_at_both(browser, anna, url, "ended", "the run has ended")
            assert await browser.js("document.getElementById('join-in').hidden")
            # A peer leaves an ended run, and its page may ask once more.
            refused = [each for each in browser.complaints if "net::ERR_CONNECTION" in each and left in each]
            assert browser.complaints == refused
