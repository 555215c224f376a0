"""A worker's text: in epochs a shard at a time, all of it, and it goes on where it was; or drawn from."""

import asyncio
import hashlib
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from swarm import TextProcess, exchange_alone, sign, tiny_manifest

from peers.config.errors import UserError
from peers.config.peer_file import PeerFile
from peers.data.documents import ReadSummary
from peers.data.files import TextUnreachable
from peers.data.local_text import first_shard_here, missing_text, text_line
from peers.data.shards import shards_of
from peers.data.tokenizer import ByteTokenizer
from peers.data.tokens import ShardCache
from peers.telemetry import log_events
from peers.worker.pipeline import text_reader
from peers.worker.pipeline.text_reader import TextReader
from protocols.signed.identity import Identity
from swarmnet.identifiers import MicrobatchId
from swarmnet.run.mixtures import MixtureChange
from swarmnet.run.schema import Data, TextSource

LENGTH = 16


def silent(_done, _all):
    """Progress that nobody wants to know."""


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    monkeypatch.setattr("peers.data.shards.MIN_SHARD_BYTES", 1000)


def fill(folder, shards=10, windows=8):
    """Each shard has so many whole windows, and each of its bytes tells which one it is of."""
    folder.mkdir(exist_ok=True)
    for number in range(shards):
        lines = b"".join(bytes([33 + number]) * LENGTH for _ in range(windows))
        (folder / f"{number:03}.txt").write_bytes((lines + b"\n").ljust(1000, b"\n"))
    return folder


def run_of(*sources, order="epoch"):
    data = Data(tuple(sources), seq_len=LENGTH, micro_batch_size=2, sampling=order)
    return sign(tiny_manifest(data=data))


class Peer:
    """Its disk, and what it was told."""

    def __init__(self, state, signed, places, origin="origin", withdrawn=(), **keys):
        self.withdrawn, self.opened, self.ended = frozenset(withdrawn), asyncio.Event(), asyncio.Event()
        self.threads = ThreadPoolExecutor()
        asyncio.get_running_loop().set_default_executor(self.threads)
        places = {name: str(place) for name, place in places.items()}
        self.process = TextProcess(
            PeerFile(run="ab" * 32, state=state, data_paths=places, **keys),
            Identity.from_seed(origin.encode()),
        )
        self.text = TextReader(
            process=self.process,
            signed=signed,
            exchange=exchange_alone(self.process, signed),
            opened=self.opened.set,
            ended=lambda _: self.ended.set(),
        )
        self.start = partial(self.text.open, self.withdrawn)

    @property
    def read(self):
        return [event for event in self.process.events if isinstance(event, log_events.ShardRead)]

    @property
    def epochs(self):
        return [event for event in self.process.events if isinstance(event, log_events.EpochRead)]

    async def take(self, microbatches=1, mixture=None):
        """So many, waiting where the next shard is not open yet."""
        taken = []
        while len(taken) < microbatches:
            self.opened.clear()
            if (found := self.text.microbatch(MicrobatchId("me", 7), mixture)) is not None:
                taken.append(found)
                continue
            waits = [asyncio.create_task(each.wait()) for each in (self.opened, self.ended)]
            done, _ = await asyncio.wait(waits, timeout=20, return_when=asyncio.FIRST_COMPLETED)
            for each in waits:
                each.cancel()
            assert done
            if self.ended.is_set():
                await asyncio.gather(*self.text._tasks)
        return taken

    async def kill(self):
        """It ends without a word. Its threads end too, as those of a process do."""
        for task in self.text._tasks:
            task.cancel()
        await asyncio.gather(*self.text._tasks, return_exceptions=True)
        self.threads.shutdown()


def windows(taken):
    return [bytes(window.tolist()) for inputs, _ in taken for window in inputs]


async def test_an_epoch_reads_every_window_once_and_every_shard_is_counted(tmp_path):
    books = fill(tmp_path / "books")
    peer = Peer(tmp_path / "state", run_of(TextSource("books", "books")), {"books": books})
    text = await peer.start()
    each = (1000 - 1) // LENGTH
    taken = await peer.take(10 * each // 2)
    assert [one.shard for one in peer.read] != sorted(one.shard for one in peer.read)
    assert sorted(one.shard for one in peer.read) == [f"books/{number:03}.txt" for number in range(10)]
    assert [(one.epoch, one.shards) for one in peer.epochs] == [(0, 10)]
    assert sum(one.tokens for one in peer.read) == 10 * each * LENGTH == sum(i.numel() for i, _ in taken)
    assert (text.coverage().shards, text.coverage().shards_read) == (10, 10)
    letters = Counter(window[0] for window in windows(taken) if window.strip() == window)
    assert {letters[33 + number] for number in range(10)} <= {7, 8}, "a window may be cut across two"
    assert all(torch.equal(inputs[:, 1:], labels[:, :-1]) for inputs, labels in taken)

    again = await peer.take(10 * each // 2)
    assert windows(again) != windows(taken)
    assert text.coverage().epochs == 1
    assert {one.epoch for one in peer.read[10:]} == {1}
    await peer.text.close()


async def test_what_is_open_does_not_grow_with_the_text(tmp_path, monkeypatch):
    books, held, most, batches = fill(tmp_path / "books", 60), set(), 0, []
    peer = Peer(tmp_path / "state", run_of(TextSource("books", "books")), {"books": books})
    text = await peer.start()
    encode_pieces = ByteTokenizer.encode_pieces

    def counting(self, pieces):
        batches.append(sum(map(len, pieces)))
        return encode_pieces(self, pieces)

    monkeypatch.setattr("peers.data.tokenizer.ByteTokenizer.encode_pieces", counting)
    while len(peer.read) < 60:
        await peer.take()
        (circle,) = text.circles
        held = {one.name for one in (circle.now, circle.ahead and circle.ahead[1]) if one is not None}
        most = max(most, len(held))
        assert len(text._waiting) < 2
    assert most <= 2, "of 60 shards"
    assert max(batches) <= 1000, "tokens are made of one shard at a time"
    await peer.text.close()


@pytest.mark.parametrize("saved", [True, False])
async def test_who_starts_again_goes_on_where_it_was(tmp_path, saved):
    books, signed = fill(tmp_path / "books"), run_of(TextSource("books", "books"))
    whole = Peer(tmp_path / "other", signed, {"books": books})
    await whole.start()
    expected = windows(await whole.take(150))
    await whole.text.close()

    peer = Peer(tmp_path / "state", signed, {"books": books})
    await peer.start()
    first = windows(await peer.take(70))
    await peer.text._save()
    lost = [] if saved else windows(await peer.take(5))
    await (peer.text.close() if saved else peer.kill())
    later = Peer(tmp_path / "state", signed, {"books": books})
    text = await later.start()
    assert text.coverage().shards_read == len({one.shard for one in peer.read[:2]})
    rest = windows(await later.take(80))
    assert first + rest == expected
    assert lost == rest[: len(lost)], "what was read since the place was written is read once more"
    await later.text.close()


async def test_origins_begin_at_different_shards(tmp_path):
    books, signed = fill(tmp_path / "books"), run_of(TextSource("books", "books"))
    orders = set()
    for name in ("one", "two", "three"):
        peer = Peer(tmp_path / name, signed, {"books": books}, name)
        await peer.start()
        texts = windows(await peer.take(100))
        orders.add(tuple(dict.fromkeys(text for text in texts if len(set(text)) == 1)))
        await peer.text.close()
    assert len(orders) > 1, "two may begin at the same one by chance, and all three rarely do"


async def test_sources_are_mixed_by_their_weights_however_long_they_are(tmp_path):
    long, short = fill(tmp_path / "long", 10), fill(tmp_path / "short", 2)
    sources = (TextSource("long", "x", weight=1.0), TextSource("short", "y", weight=3.0))
    peer = Peer(tmp_path / "state", run_of(*sources), {"long": long, "short": short})
    text = await peer.start()
    await peer.take(200)
    assert [circle.place.read for circle in text.circles] == [100, 300]
    assert [circle.place.epoch for circle in text.circles] == [0, 300 // (2 * 62)]
    await peer.text.close()


async def test_a_changed_mixture_counts_from_its_round_on_and_goes_on_after_a_restart(tmp_path):
    long, short = fill(tmp_path / "long", 10), fill(tmp_path / "short", 2)
    run = run_of(TextSource("long", "x", weight=1.0), TextSource("short", "y", weight=3.0))

    def peer():
        return Peer(tmp_path / "state", run, {"long": long, "short": short})

    def read(text):
        return [circle.place.read for circle in text.circles]

    ordered = MixtureChange(9, (("long", 4000), ("short", 1000)))
    first = peer()
    text = await first.start()
    await first.take(20)
    assert read(text) == [10, 30]
    await first.take(5, ordered)
    assert read(text) == [18, 32], "what was read before is no debt"
    await text.close()
    again = peer()
    text = await again.start()
    await again.take(5, ordered)
    assert read(text) == [26, 34]
    await again.take(10, MixtureChange(20, (("short", 1), ("long", 0))))
    assert read(text) == [26, 54]
    await again.take(4, MixtureChange(30, (("unknown", 1),)))
    assert read(text) == [28, 60], "it names none of the sources: the published weights hold"
    await again.take(4)
    assert read(text) == [30, 66]
    await text.close()


async def test_a_file_that_is_shorter_than_a_sequence_is_read_with_others(tmp_path):
    (tmp_path / "books").mkdir()
    for number in range(300):
        (tmp_path / "books" / f"{number:03}.txt").write_text(f"file {number}")
    (shards, again) = (
        shards_of(TextSource("b", "b"), str(tmp_path / "books"), ReadSummary()) for _ in range(2)
    )
    assert [shard.name for shard in shards] == [shard.name for shard in again]
    assert sum(len(shard.files) for shard in shards) == 300
    assert 1 < len(shards) < 5
    peer = Peer(tmp_path / "state", run_of(TextSource("b", "b")), {"b": tmp_path / "books"})
    await peer.start()
    assert b"file" in b"".join(windows(await peer.take(3)))
    await peer.text.close()


@pytest.mark.parametrize("order", ["random", "epoch"])
async def test_a_text_without_one_sequence_says_so(tmp_path, order):
    (tmp_path / "a.txt").write_text("short")
    peer = Peer(tmp_path / "state", run_of(TextSource("b", "b"), order=order), {"b": tmp_path / "a.txt"})
    with pytest.raises(UserError, match="no shard of the run's text holds a sequence of 17 tokens"):
        await peer.start()


@pytest.mark.parametrize(
    "told",
    [
        "{", "[]", '{"run": 3}', '{"run": "RUN", "circles": {"": {"epoch": -1}}}',
        '{"run": "other", "circles": {}}', '{"run": "RUN", "circles": 5}',
    ],
)  # fmt: skip
async def test_a_place_that_cannot_be_read_begins_anew(tmp_path, told):
    books, signed = fill(tmp_path / "books", 2), run_of(TextSource("books", "books"))
    place = tmp_path / "state" / "text" / "place.json"
    place.parent.mkdir(parents=True)
    place.write_text(told.replace("RUN", signed.run_id))
    peer = Peer(tmp_path / "state", signed, {"books": books})
    text = await peer.start()
    assert text.circles[0].place.read == 0
    await peer.take()
    await peer.text.close()


async def test_who_keeps_the_text_and_does_not_answer_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr("peers.config.remote_files.FIRST_PAUSE_SECONDS", 0.0)
    books = fill(tmp_path / "books")
    peer = Peer(tmp_path / "state", run_of(TextSource("books", "books")), {"books": books})
    fails = iter([True, True, False, True, False, True])

    def sometimes(work):
        def tried(*arguments):
            if next(fails, False):
                raise TextUnreachable("text https://example.org cannot be read: it is night there")
            return work(*arguments)

        return tried

    monkeypatch.setattr(text_reader, "shards_here", sometimes(text_reader.shards_here))
    monkeypatch.setattr(ShardCache, "open", sometimes(ShardCache.open))
    await peer.start()
    await peer.take(100)
    why = "text https://example.org cannot be read: it is night there; trying again in 0 s (Ctrl+C stops)"
    assert [line for line in peer.process.lines if line.startswith("warning")] == [f"warning: {why}"] * 4
    await peer.text.close()


async def test_a_disk_that_is_full_ends_the_reading_with_a_reason(tmp_path, monkeypatch):
    books = fill(tmp_path / "books")
    peer = Peer(tmp_path / "state", run_of(TextSource("books", "books")), {"books": books})
    await peer.start()
    await peer.take()

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="tokens cannot be kept: No space left on device"):
        await peer.take(500)


SECRET = "a secret " * 8


def write_lines(folder):
    folder.mkdir()
    for number in range(3):
        lines = [f"line {number} {line} " * 5 for line in range(9)]
        lines.append(SECRET if number < 2 else "a letter " * 8)
        text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (folder / f"{number}.jsonl").write_text(text)
    (folder / "notes.doc").write_text("no text")
    return folder


@pytest.fixture
def books(tmp_path, monkeypatch):
    monkeypatch.setattr("peers.data.shards.MIN_SHARD_BYTES", 1)
    return write_lines(tmp_path / "lines")


async def test_it_goes_on_where_it_was_without_what_was_withdrawn(tmp_path, books, monkeypatch):
    made, writes = [], ShardCache._write_tokens

    def counted(cache, path, *rest):
        made.append(path)
        return writes(cache, path, *rest)

    monkeypatch.setattr(ShardCache, "_write_tokens", counted)
    peer = Peer(tmp_path / "state", run_of(TextSource("books", "books")), {"books": books})
    text, lines = await peer.start(), peer.process.lines
    assert lines[0] == f"reads the run's text: books from {books}; tokens: bytes"
    assert "notes.doc: of a folder only" in lines[1]
    assert lines[-1].startswith("3 shards, ")
    whole = text.circles[0].count(text.circles[0].ahead[1])
    assert b"secret" in b"".join(windows(await peer.take(3 * whole // 2)))
    assert {event.shard for event in peer.read} == {f"books/{number}.jsonl" for number in range(3)}
    assert [event.shards for event in peer.epochs] == [len(peer.read)] == [3]
    before = text.coverage()

    assert await text.open(frozenset({hashlib.sha256(SECRET.encode()).digest()})) is text
    peer.ended.clear()
    assert text.coverage() == before
    assert b"secret" not in b"".join(windows(await peer.take(3 * whole // 2)))
    assert len(made) == 3 + 2, "one shard was read again, and holds what it held"
    await text.close()
    await asyncio.wait_for(peer.ended.wait(), 20)


async def test_text_that_is_missing_is_said_before_anything_is_read(tmp_path, books):
    signed = run_of(TextSource("books", "books"))
    with pytest.raises(UserError, match="source `books` is not on this machine"):
        await Peer(tmp_path, signed, {"books": tmp_path / "nowhere"}).start()
    here, at_a_url = (
        PeerFile(run="ab" * 32, state=tmp_path, data_paths={"books": str(place)})
        for place in (books, "https://example.org/books")
    )
    assert missing_text(signed.manifest, here) == ""
    assert missing_text(signed.manifest, at_a_url) == "", "nobody elsewhere is asked before it is needed"


def test_who_looks_whether_the_text_can_be_read_reads_the_first_shard(tmp_path, books):
    manifest = run_of(TextSource("books", "books")).manifest
    config = PeerFile(run="ab" * 32, state=tmp_path / "state", data_paths={"books": str(books)})
    first, shards = first_shard_here(manifest, config, b"", silent)
    assert text_line(first, shards).startswith("the first of 3 shards: ")
    assert "notes.doc" in first.reading.first_left_out
    nowhere = config.model_copy(update={"data_paths": {"books": "nowhere://example.org/books"}})
    with pytest.raises(UserError, match="cannot be opened"):
        first_shard_here(manifest, nowhere, b"", silent)


async def test_text_is_drawn_from_anywhere_in_all_of_it_and_nobody_counts_what_came(tmp_path, books):
    peer = Peer(tmp_path / "state", run_of(TextSource("books", "books"), order="random"), {"books": books})
    text = await peer.start()
    (warning,) = [line for line in peer.process.lines if line.startswith("warning: ")]
    assert "notes.doc: of a folder only" in warning
    (read,) = [event for event in peer.process.events if isinstance(event, log_events.Text)]
    assert (read.files, read.documents, read.left_out) == (3, 30, 1)
    keys = [MicrobatchId("me", number) for number in range(60)]
    taken = b"".join(windows(map(text.microbatch, keys)))
    assert all(b"line %d" % number in taken for number in range(3))
    assert torch.equal(text.microbatch(keys[0])[0], text.microbatch(keys[0])[0])
    assert b"secret" in taken
    assert text.coverage() is None
    await text.open(frozenset({hashlib.sha256(SECRET.encode()).digest()}))
    assert b"secret" not in b"".join(windows(map(text.microbatch, keys)))
    await text.close()
    assert not (tmp_path / "state" / "text" / "place.json").exists()
