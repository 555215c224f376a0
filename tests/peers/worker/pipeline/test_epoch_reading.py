"""A worker opens the text of a run in epochs, tells what becomes of it, and goes on where it was."""

import asyncio
import hashlib
import json
from types import SimpleNamespace

import pytest
from swarm import sign, tiny_manifest

from peers.config.peer_file import PeerFile
from peers.data.files import TextUnreachable
from peers.data.local_text import first_shard_here, missing_text, text_line
from peers.errors import UserError
from peers.telemetry import events as noted
from peers.worker.pipeline.epoch_reading import EpochReading
from protocols.signed.identity import Identity
from swarmnet.identifiers import MicrobatchId
from swarmnet.run.manifest import Data, Source

SECRET = "a secret " * 8


class Process(SimpleNamespace):
    """What `EpochReading` uses of one."""

    def __init__(self, config):
        self.events, self.lines = [], []
        report = SimpleNamespace(say=lambda _topic, line, level: self.lines.append(f"{level}: {line}"))
        super().__init__(
            config=config, identity=Identity.from_seed(b"origin"), report=report,
            log=SimpleNamespace(record=self.events.append), tell=self.events.append,
            say=lambda _topic, line: self.lines.append(line),
        )  # fmt: skip


@pytest.fixture
def run():
    data = Data((Source("books", "books"),), sequence_tokens=16, microbatch_sequences=2, order="epochs")
    return sign(tiny_manifest(data=data))


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr("peers.data.shards.LEAST_SHARD_BYTES", 1)
    (tmp_path / "books").mkdir()
    for number in range(3):
        lines = [f"line {number} {line} " * 5 for line in range(9)] + [SECRET]
        text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (tmp_path / "books" / f"{number}.jsonl").write_text(text)
    (tmp_path / "books" / "notes.doc").write_text("no text")
    return PeerFile(run="ab" * 32, state=tmp_path / "state", text={"books": str(tmp_path / "books")})


async def read(text, opened, count):
    taken = b""
    while count:
        opened.clear()
        found = text.microbatch(MicrobatchId("me", 0))
        if found is None:
            await asyncio.wait_for(opened.wait(), 20)
        else:
            taken, count = taken + bytes(found[0].flatten().tolist()), count - 1
    return taken


async def test_it_goes_on_where_it_was_without_what_was_withdrawn(run, config):
    process, opened, ended = Process(config), asyncio.Event(), []
    reading = EpochReading(process, opened.set, ended.append)
    text = await reading.open(run, frozenset())
    assert process.lines[0] == f"reads the run's text: books from {config.text['books']}"
    assert "notes.doc: of a folder only" in process.lines[1]
    assert process.lines[-1].startswith("3 shards, ")
    whole = text.circles[0].count(text.circles[0].ahead[1])
    assert b"secret" in await read(text, opened, 3 * whole // 2)
    shards = [event for event in process.events if isinstance(event, noted.ShardRead)]
    assert {event.shard for event in shards} <= {f"books/{number}.jsonl" for number in range(3)}
    (end,) = [event for event in process.events if isinstance(event, noted.EpochRead)]
    assert end.shards == len(shards) == 3
    before = text.coverage()

    gone = hashlib.sha256(SECRET.encode()).digest()
    again = await reading.open(run, frozenset({gone}))
    assert again is not text
    assert again.coverage() == before
    assert b"secret" not in await read(again, opened, whole)
    await reading.close()
    assert len(ended) == 2, "both have ended"
    assert all(task.cancelled() for task in ended)


async def test_text_that_is_missing_is_said_before_anything_is_read(run, config, tmp_path):
    elsewhere = config.model_copy(update={"text": {"books": str(tmp_path / "nowhere")}})
    with pytest.raises(UserError, match="source `books` is not on this machine"):
        await EpochReading(Process(elsewhere), lambda: None, lambda _: None).open(run, frozenset())
    assert missing_text(run.manifest, config) == ""
    at_a_url = config.model_copy(update={"text": {"books": "https://example.org/books"}})
    assert missing_text(run.manifest, at_a_url) == "", "nobody elsewhere is asked before it is needed"


async def test_a_url_that_does_not_answer_is_tried_again(run, config, monkeypatch):
    monkeypatch.setattr("peers.worker.pipeline.epoch_reading.FIRST_PAUSE_SECONDS", 0.0)
    from peers.worker.pipeline import epoch_reading

    finds, fails = epoch_reading.shards_here, iter([True, False])

    def sometimes(*arguments):
        if next(fails, False):
            raise TextUnreachable("text https://example.org/books cannot be read")
        return finds(*arguments)

    monkeypatch.setattr(epoch_reading, "shards_here", sometimes)
    process = Process(config)
    reading = EpochReading(process, lambda: None, lambda _: None)
    await reading.open(run, frozenset())
    assert "warning: text https://example.org/books cannot be read; trying again in 0 s" in process.lines
    await reading.close()


def test_who_looks_whether_the_text_can_be_read_reads_the_first_shard(run, config):
    first = first_shard_here(run.manifest, config, lambda done, all: None)
    assert first.shards == 3
    assert text_line(first).startswith("the first of 3 shards: ")
    assert "notes.doc" in first.reading.first_left_out
    nowhere = config.model_copy(update={"text": {"books": "nowhere://example.org/books"}})
    with pytest.raises(UserError, match="cannot be opened"):
        first_shard_here(run.manifest, nowhere, lambda done, all: None)
