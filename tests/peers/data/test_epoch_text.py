"""A text larger than memory is read a shard at a time, all of it, and goes on where it was."""

import asyncio
import hashlib
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from swarm import sign, tiny_manifest

from peers.data.documents import Reading
from peers.data.epoch_text import EpochText, Says
from peers.data.files import TextError, TextUnreachable
from peers.data.shard_tokens import ShardCache, Stopped
from peers.data.shards import all_shards, shards_of
from peers.data.tokenizer import ByteTokenizer
from peers.data.tokens import written
from peers.errors import UserError
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.run.manifest import Data, Source

LENGTH = 16
ORIGIN = PeerId("12D3KooOrigin")


def silent(_done, _all):
    """Progress that nobody wants to know."""


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    monkeypatch.setattr("peers.data.shards.LEAST_SHARD_BYTES", 1000)


def fill(folder, shards=10, windows=8):
    """Each shard has so many whole windows, and each of its bytes tells which one it is of."""
    folder.mkdir(exist_ok=True)
    for number in range(shards):
        lines = b"".join(bytes([33 + number]) * LENGTH for _ in range(windows))
        (folder / f"{number:03}.txt").write_bytes((lines + b"\n").ljust(1000, b"\n"))
    return folder


def run_of(*sources, sequences=2):
    data = Data(tuple(sources), sequence_tokens=LENGTH, microbatch_sequences=sequences, order="epochs")
    return sign(tiny_manifest(data=data))


class Peer:
    """Its disk, and what it was told."""

    def __init__(self, state, signed, places, origin=ORIGIN, withdrawn=()):
        self.state, self.signed, self.places, self.origin = state, signed, places, origin
        self.withdrawn = withdrawn
        self.read, self.troubles, self.opened = [], [], asyncio.Event()

    async def start(self):
        reading, data = Reading(), self.signed.manifest.data
        self.cache = ShardCache(None, 256, self.state, data.end_of_text, self.withdrawn)
        shards = all_shards(data.sources, self.places, reading)
        self.cache.keep_only(each for some in shards.values() for each in some)
        says = Says(self.opened.set, self.read.append, self.troubles.append, lambda: silent)
        self.text = EpochText(self.signed, self.origin, shards, self.cache, self.state, says)
        await self.text.begin()
        self.ahead = asyncio.create_task(self.text.read_ahead())
        return self.text

    async def take(self, microbatches=1):
        """So many, waiting where the next shard is not open yet."""
        taken = []
        while len(taken) < microbatches:
            self.opened.clear()
            if (found := self.text.microbatch(MicrobatchId(self.origin, 7))) is not None:
                taken.append(found)
                continue
            waiting = asyncio.create_task(self.opened.wait())
            done, _ = await asyncio.wait(
                {waiting, self.ahead}, timeout=20, return_when=asyncio.FIRST_COMPLETED
            )
            waiting.cancel()
            assert done
            if self.ahead in done:
                await self.ahead
        return taken

    async def stop(self, saved=True):
        self.ahead.cancel()
        await asyncio.gather(self.ahead, return_exceptions=True)
        if saved:
            self.text.save()


def windows(taken):
    return [bytes(window.tolist()) for inputs, _ in taken for window in inputs]


async def test_an_epoch_reads_every_window_once_and_every_shard_is_counted(tmp_path):
    books = fill(tmp_path / "books")
    peer = Peer(tmp_path / "state", run_of(Source("books", "books")), {"books": str(books)})
    text = await peer.start()
    each = (1000 - 1) // LENGTH
    taken = await peer.take(10 * each // 2)
    assert [one.shard for one in peer.read] != sorted(one.shard for one in peer.read)
    assert sorted(one.shard for one in peer.read) == [f"books/{number:03}.txt" for number in range(10)]
    assert [one.ends_epoch for one in peer.read] == [False] * 9 + [True]
    assert sum(one.tokens for one in peer.read) == 10 * each * LENGTH == sum(i.numel() for i, _ in taken)
    assert (text.coverage().shards, text.coverage().shards_read) == (10, 10)
    letters = Counter(window[0] for window in windows(taken) if window.strip() == window)
    assert {letters[33 + number] for number in range(10)} <= {7, 8}, "a window may be cut across two"
    assert all(torch.equal(inputs[:, 1:], labels[:, :-1]) for inputs, labels in taken)

    again = await peer.take(10 * each // 2)
    assert windows(again) != windows(taken)
    assert text.coverage().epochs == 1
    assert {one.epoch for one in peer.read[10:]} == {1}
    await peer.stop()


async def test_what_is_open_does_not_grow_with_the_text(tmp_path, monkeypatch):
    books, held, most, batches = fill(tmp_path / "books", 60), set(), 0, []
    peer = Peer(tmp_path / "state", run_of(Source("books", "books")), {"books": str(books)})
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
    await peer.stop()


@pytest.mark.parametrize("saved", [True, False])
async def test_who_starts_again_goes_on_where_it_was(tmp_path, saved):
    books, signed = fill(tmp_path / "books"), run_of(Source("books", "books"))
    whole = Peer(tmp_path / "other", signed, {"books": str(books)})
    await whole.start()
    expected = windows(await whole.take(150))
    await whole.stop()

    peer = Peer(tmp_path / "state", signed, {"books": str(books)})
    await peer.start()
    first = windows(await peer.take(70))
    peer.text.save()
    lost = [] if saved else windows(await peer.take(5))
    await peer.stop(saved)
    later = Peer(tmp_path / "state", signed, {"books": str(books)})
    text = await later.start()
    assert text.coverage().shards_read == len({one.shard for one in peer.read[:2]})
    rest = windows(await later.take(80))
    assert first + rest == expected
    assert lost == rest[: len(lost)], "what was read since the place was written is read once more"
    await later.stop()


async def test_two_origins_read_different_text(tmp_path):
    books, signed = fill(tmp_path / "books"), run_of(Source("books", "books"))
    texts = []
    for name in ("A", "B"):
        peer = Peer(tmp_path / name, signed, {"books": str(books)}, PeerId(f"12D3Koo{name}"))
        await peer.start()
        texts.append(windows(await peer.take(20)))
        await peer.stop()
    assert not set(texts[0]) & set(texts[1]) - {b"\n" * LENGTH}


async def test_sources_are_mixed_by_their_weights_however_long_they_are(tmp_path):
    long, short = fill(tmp_path / "long", 10), fill(tmp_path / "short", 2)
    sources = (Source("long", "x", weight=1.0), Source("short", "y", weight=3.0))
    peer = Peer(tmp_path / "state", run_of(*sources), {"long": str(long), "short": str(short)})
    text = await peer.start()
    await peer.take(200)
    assert [circle.read for circle in text.circles] == [100, 300]
    assert [circle.place.epoch for circle in text.circles] == [0, 300 // (2 * 62)]
    await peer.stop()


async def test_a_file_that_is_shorter_than_a_sequence_is_read_with_others(tmp_path):
    (tmp_path / "books").mkdir()
    for number in range(300):
        (tmp_path / "books" / f"{number:03}.txt").write_text(f"file {number}")
    (shards, again) = (shards_of(Source("b", "b"), str(tmp_path / "books"), Reading()) for _ in range(2))
    assert [shard.name for shard in shards] == [shard.name for shard in again]
    assert sum(len(shard.parts) for shard in shards) == 300
    assert 1 < len(shards) < 5
    peer = Peer(tmp_path / "state", run_of(Source("b", "b")), {"b": str(tmp_path / "books")})
    await peer.start()
    assert b"file" in b"".join(windows(await peer.take(3)))
    await peer.stop()


async def test_a_text_without_one_sequence_says_so(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    peer = Peer(tmp_path / "state", run_of(Source("b", "b")), {"b": str(tmp_path / "a.txt")})
    with pytest.raises(UserError, match="no shard of the run's text holds a sequence of 17 tokens"):
        await peer.start()


async def test_a_withdrawn_document_is_left_out_and_other_shards_are_not_made_again(tmp_path, monkeypatch):
    books = fill(tmp_path / "books", 4)
    gone = b"secret " * 20
    lines = [{"text": gone.decode()}, *({"text": f"line {number} " * 10} for number in range(40))]
    (books / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    signed, places = run_of(Source("books", "books")), {"books": str(books)}
    peer = Peer(tmp_path / "state", signed, places)
    await peer.start()
    assert b"secret" in b"".join(windows(await peer.take(300)))
    await peer.stop()

    made = []

    def counted(path, *rest):
        made.append(path)
        return written(path, *rest)

    monkeypatch.setattr("peers.data.shard_tokens.written", counted)
    later = Peer(tmp_path / "state", signed, places, withdrawn={hashlib.sha256(gone).digest()})
    await later.start()
    text = b"".join(windows(await later.take(300)))
    assert b"secret" not in text
    assert b"line 39" in text
    assert len(made) == 1, "four shards were read again, and hold what they held"
    await later.stop()


async def test_tokens_are_made_once_and_what_is_of_other_shards_is_removed(tmp_path):
    books, signed = fill(tmp_path / "books", 3), run_of(Source("books", "books"))
    cache = ShardCache(None, 256, tmp_path / "state")
    shards = shards_of(signed.manifest.data.sources[0], str(books), Reading())
    opened = [cache.open(shard, silent) for shard in shards]
    again = [cache.open(shard, silent) for shard in shards]
    assert [one.made for one in opened + again] == [True] * 3 + [False] * 3
    assert [one.tokens.tolist() for one in opened] == [one.tokens.tolist() for one in again]
    folder = tmp_path / "state" / "text" / "shards"
    (folder / "half.part").write_bytes(b"x")
    cache.keep_only(shards[:1])
    assert len(list(folder.iterdir())) == 2
    (books / "001.txt").write_text("other " * 200)
    changed = shards_of(signed.manifest.data.sources[0], str(books), Reading())[1]
    assert bytes(cache.open(changed, silent).tokens.tolist()) == b"other " * 200


@pytest.mark.parametrize("harm", ["truncated", "no note", "note is no JSON", "note is a list"])
def test_tokens_that_are_not_whole_are_made_again(tmp_path, harm):
    cache = ShardCache(None, 256, tmp_path / "state")
    (shard,) = shards_of(Source("b", "b"), str(fill(tmp_path / "b", 1)), Reading())
    whole = cache.open(shard, silent).tokens.tolist()
    folder = tmp_path / "state" / "text" / "shards"
    (tokens,), (note,) = folder.glob("*.tokens"), folder.glob("*.json")
    if harm == "truncated":
        tokens.write_bytes(b"short")
    elif harm == "no note":
        note.unlink()
    else:
        note.write_text("{" if harm == "note is no JSON" else "[]")
    again = cache.open(shard, silent)
    assert again.made
    assert again.tokens.tolist() == whole


def test_who_does_not_want_the_tokens_any_more_does_not_wait_for_them(tmp_path):
    cache = ShardCache(None, 256, tmp_path / "state")
    (shard,) = shards_of(Source("b", "b"), str(fill(tmp_path / "b", 1)), Reading())
    cache.stopped = lambda: True
    with pytest.raises(Stopped):
        cache.open(shard, silent)
    assert list((tmp_path / "state" / "text" / "shards").iterdir()) == []


@pytest.mark.parametrize(
    "told",
    [
        "{", "[]", '{"run": 3}', '{"run": "RUN", "circles": {"": {"epoch": -1}}}',
        '{"run": "other", "circles": {}}', '{"run": "RUN", "circles": 5}',
    ],
)  # fmt: skip
async def test_a_place_that_cannot_be_read_begins_anew(tmp_path, told):
    books, signed = fill(tmp_path / "books", 2), run_of(Source("books", "books"))
    place = tmp_path / "state" / "text" / "place.json"
    place.parent.mkdir(parents=True)
    place.write_text(told.replace("RUN", signed.run_id))
    peer = Peer(tmp_path / "state", signed, {"books": str(books)})
    text = await peer.start()
    assert text.circles[0].place.windows == 0
    await peer.take()
    await peer.stop()


async def test_who_keeps_the_text_and_does_not_answer_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr("peers.data.epoch_text.FIRST_PAUSE_SECONDS", 0.0)
    books = fill(tmp_path / "books")
    peer = Peer(tmp_path / "state", run_of(Source("books", "books")), {"books": str(books)})
    opens, fails = ShardCache.open, iter([True, False, True])

    def open(self, shard, progress):
        if next(fails, False):
            raise TextUnreachable("text https://example.org cannot be read: it is night there")
        return opens(self, shard, progress)

    monkeypatch.setattr(ShardCache, "open", open)
    await peer.start()
    await peer.take(100)
    why = "text https://example.org cannot be read: it is night there; trying again in 0 s"
    assert peer.troubles == [why] * 2
    await peer.stop()


async def test_a_disk_that_is_full_ends_the_reading_with_a_reason(tmp_path, monkeypatch):
    books = fill(tmp_path / "books")
    peer = Peer(tmp_path / "state", run_of(Source("books", "books")), {"books": str(books)})
    await peer.start()
    await peer.take()

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="tokens cannot be kept: No space left on device"):
        await peer.take(500)


def test_a_source_whose_folder_holds_no_text_says_so(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(TextError, match=r"holds no text: put \.txt, .*\.parquet files there"):
        shards_of(Source("b", "b"), str(tmp_path / "empty"), Reading())
    (tmp_path / "empty" / "a.txt").touch()
    with pytest.raises(TextError, match="the source `b` has no text at"):
        shards_of(replace(Source("b", "b")), str(tmp_path / "empty"), Reading())
