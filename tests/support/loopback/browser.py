"""A real Chromium without a window, driven over its DevTools pipe: no web socket, no driver, no download."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
START_SECONDS = 60.0
ANSWER_SECONDS = 120.0
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio",
    "--disable-dev-shm-usage", "--remote-debugging-pipe", "about:blank",
)  # fmt: skip

UNLABELLED = """[...document.querySelectorAll('input, button, progress, output')].filter(field =>
  !(field.labels?.length || field.textContent.trim() || field.getAttribute('aria-label'))).map(f => f.id)"""
FAINT = """(() => {
  const parts = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
  const ground = node => {
    for (; node; node = node.parentElement) {
      const colour = parts(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll('main *')].filter(node => node.offsetHeight && !node.disabled
    && [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim())).map(node => {
      const pair = [light(parts(getComputedStyle(node).color)), light(ground(node))].sort((a, b) => b - a);
      return [node.id || node.textContent.trim().slice(0, 30), (pair[0] + 0.05) / (pair[1] + 0.05)];
    }).filter(([, contrast]) => contrast < 4.5);
})()"""
"""Texts whose contrast is below 4.5, the least that WCAG 2.2 AA asks for."""

AXE = "axe.run(document).then(found => found.violations.map(each => [each.id, each.nodes.map(n => n.html)]))"

TEXT = "document.getElementById('{}').textContent"


def in_browser(seconds: int) -> list:
    """What marks a test of pages that lasts at most so long."""
    import pytest  # `scripts/first-hour` looks at pages without it.

    return [
        pytest.mark.loopback,
        pytest.mark.slow,
        pytest.mark.timeout(seconds),
        pytest.mark.skipif(
            CHROMIUM is None, reason="chromium is not installed (Debian: apt install chromium)"
        ),
    ]


class Browser:
    """Use as `async with Browser(folder) as browser`. One page."""

    def __init__(self, folder: Path, resolves: str = "") -> None:
        """`resolves`: a name that DNS says is this machine, as a website's owner may have it."""
        self.folder = folder
        self.flags = [*FLAGS, *([f"--host-resolver-rules=MAP {resolves} 127.0.0.1"] if resolves else [])]
        self._answers: dict[int, asyncio.Future[dict]] = {}
        self._count = 0
        self._session = ""
        self.complaints: list[str] = []
        """What the page wrote to its console as an error, and exceptions that nobody caught."""

    async def __aenter__(self) -> Browser:
        read_here, write_there = os.pipe()
        read_there, write_here = os.pipe()
        # Chromium reads descriptor 3 and writes descriptor 4; a shell puts the pipes there.
        self.process = await asyncio.create_subprocess_exec(
            "/bin/bash", "-c", f'exec "$0" "$@" 3<&{read_there} 4>&{write_there}',
            CHROMIUM, f"--user-data-dir={self.folder}", *self.flags,
            pass_fds=(read_there, write_there), start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_there)
        os.close(write_there)
        self._write = os.fdopen(write_here, "wb", buffering=0)
        self._file = os.fdopen(read_here, "rb")
        self._reader = asyncio.StreamReader(limit=64 << 20)
        protocol = asyncio.StreamReaderProtocol(self._reader)
        self._pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, self._file)
        self._listener = asyncio.create_task(self._listen(), name="browser")
        try:
            target = await self.ask("Target.createTarget", START_SECONDS, url="about:blank")
            found = await self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
            self._session = found["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                await self.ask(f"{domain}.enable")
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # Its own session: all of its helpers with it.
        await self.process.wait()
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)
        self._pipe.close()
        self._write.close()

    async def _listen(self) -> None:
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            answer = self._answers.pop(message.get("id", -1), None)
            if answer is not None and not answer.done():
                answer.set_result(message)
            method, fields = message.get("method"), message.get("params", {})
            if method == "Runtime.exceptionThrown":
                details = fields["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description") or details["text"])
            elif method == "Log.entryAdded" and fields["entry"]["level"] == "error":
                self.complaints.append(f"{fields['entry']['text']} {fields['entry'].get('url', '')}")

    async def ask(self, method: str, seconds: float = ANSWER_SECONDS, **params: object) -> dict:
        self._count += 1
        answer = self._answers[self._count] = asyncio.get_running_loop().create_future()
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(seconds):
            found = await answer
        assert "error" not in found, f"{method}: {found['error']}"
        return found["result"]

    def goes_first(self) -> None:
        """Let its processes run before what else the machine does, for measuring, where that is allowed (it
        takes root, and Linux groups processes by session)."""
        with suppress(OSError):
            Path(f"/proc/{self.process.pid}/autogroup").write_text("-15")

    async def look_like(self, width: int, height: int, dark: bool = False) -> None:
        """A window of so many CSS pixels, in daylight or in the dark."""
        await self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=width < 500,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.ask("Emulation.setEmulatedMedia", features=[scheme])

    async def open(self, url: str) -> None:
        await self.ask("Page.navigate", url=url)

    async def js(self, expression: str, seconds: float = ANSWER_SECONDS) -> object:
        """The value of an expression in the page; a promise is waited for."""
        found = await self.ask(
            "Runtime.evaluate", seconds, expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str, seconds: float = ANSWER_SECONDS) -> float:
        """Wait until an expression is true in the page; how long that took, seconds."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not await self.js(expression):
            assert loop.time() < began + seconds, f"not within {seconds:g} s: {expression}"
            await asyncio.sleep(0.1)
        return loop.time() - began

    async def picture(self, path: Path, whole: bool = True) -> None:
        """A PNG of the page."""
        found = await self.ask("Page.captureScreenshot", captureBeyondViewport=whole)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(found["data"]))

    async def look_at_all_sizes(self, name: str) -> None:
        """On a phone and a wide screen, light and dark, nothing sticks out, every field has a name, and every
        text can be read. With SWARMNET_PICTURES=FOLDER the page is kept there as PNG. With
        SWARMNET_AXE=axe.min.js (from the npm package axe-core) axe finds no fault either."""
        folder, axe = os.environ.get("SWARMNET_PICTURES"), os.environ.get("SWARMNET_AXE")
        if axe:
            await self.js(await asyncio.to_thread(Path(axe).read_text) + "; 0")
        for width in (390, 1280):
            for dark in (True, False):
                await self.look_like(width, 800, dark)
                at = f"{name}-{width}-{'dark' if dark else 'light'}"
                assert await self.js("document.documentElement.scrollWidth <= innerWidth"), at
                assert await self.js(FAINT) == [], at
                if folder:
                    await self.picture(Path(folder) / f"{at}.png")
                if axe:
                    assert await self.js(AXE) == [], at
        assert await self.js(UNLABELLED) == [], name
