"""A worker's text where its run is read in epochs: opened, read ahead of the work, told of, and closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from peers.config.run_file import SignedManifest
from peers.data.documents import Reading
from peers.data.epoch_text import FIRST_PAUSE_SECONDS, EpochText, Says, ShardRead
from peers.data.files import TextUnreachable
from peers.data.local_text import Tokenizing, shards_here, text_here
from peers.data.tokens import Progress
from peers.errors import UserError
from peers.role import Process
from peers.telemetry import events as noted


class EpochReading:
    """Of one process. `open` once more, and the text before is closed: it goes on where that was."""

    def __init__(
        self, process: Process, opened: Callable[[], None], ended: Callable[[asyncio.Task[None]], None]
    ) -> None:
        """`opened()`: a shard that was waited for may be there; `ended`: takes what fails."""
        self._process, self._opened, self._ended = process, opened, ended
        self.text: EpochText | None = None
        self._ahead: asyncio.Task[None] | None = None
        self._stopped = False

    async def open(self, signed: SignedManifest, withdrawn: frozenset[bytes]) -> EpochText:
        """Until microbatches can be taken. Raises UserError."""
        await self.close()
        process, config = self._process, self._process.config
        process.say("text", f"reads the run's text: {text_here(signed.manifest, config)}")
        reading = Reading()
        find = partial(shards_here, signed.manifest, config, withdrawn)
        while True:
            try:
                shards, cache = await asyncio.to_thread(find, reading)
                break
            except TextUnreachable as error:
                self._trouble(f"{error}; trying again in {FIRST_PAUSE_SECONDS:.0f} s")
                await asyncio.sleep(FIRST_PAUSE_SECONDS)
                reading = Reading()
        for warning in reading.warnings():
            self._trouble(warning)
        self._stopped = False
        cache.stopped = lambda: self._stopped
        says = Says(self._opened, self._read, self._trouble, self._progress)
        me = process.identity.peer_id
        text = self.text = EpochText(signed, me, shards, cache, config.state, says)
        begun = False
        try:
            await text.begin()
            begun = True
        finally:
            self._stopped = not begun  # The thread that reads ends with its next block.
        self._ahead = asyncio.create_task(text.read_ahead(), name="read ahead")
        self._ahead.add_done_callback(self._ended)
        there, size = text.coverage(), sum(each.bytes for some in shards.values() for each in some)
        process.say(
            "text",
            f"{there.shards:,} shards, {size / 1e6:,.1f} MB: {there.shards_read:,} of them are read in epoch "
            f"{there.epochs}",
        )
        return text

    async def close(self) -> None:
        """What it has come to is on the disk."""
        self._stopped = True
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)
        text, self.text, self._ahead = self.text, None, None
        if text is not None:
            try:
                await asyncio.to_thread(text.save)
            except UserError as error:  # A full disk.
                self._trouble(str(error))

    def _read(self, what: ShardRead) -> None:
        assert self.text is not None
        self._process.log.record(noted.ShardRead(what.shard, what.epoch, what.tokens))
        if what.ends_epoch:
            read = self.text.coverage()
            told = f"epoch {what.epoch} ends: all {read.shards:,} shards are read, {read.tokens:,} tokens"
            self._process.tell(noted.EpochRead(told, what.epoch, read.shards, read.tokens))

    def _trouble(self, warning: str) -> None:
        self._process.report.say("text", warning, level="warning")
        self._process.log.record(noted.Remark(warning, "text_left_out"))

    def _progress(self) -> Progress:
        loop = asyncio.get_running_loop()
        tokenizing = Tokenizing(self._process.say, loop.time, "makes tokens of a shard, once")
        return tokenizing.from_thread(loop)
