"""The run's text comes from other peers: by hash, from several, past those that lie or die."""

import asyncio

import pytest
from chats import VOCABULARY, chat_folder, riddles, write_lines
from on_p2pd import DEADLINE, transports
from travelling import RUN, Directory, lying, newcomer, published, record_of, shelf_of, write_shards

from peers.data.files import TextUnreachable
from peers.data.local_text import missing_text, shards_here
from peers.data.shards import read_index
from peers.state.archive_store import open_store
from peers.state.archived_text import ArchivedText
from peers.telemetry import log_events
from peers.worker.pipeline.text_reader import TextReader
from protocols.signed.identity import load
from swarmnet.identifiers import MicrobatchId
from swarmnet.model.sampling import IGNORE_INDEX

pytestmark = pytest.mark.loopback
SHARD_BYTES = 1_200_000
"""Ten chunks."""


@pytest.fixture
async def start(tmp_path):
    async with transports(tmp_path) as start:
        yield start


@pytest.fixture
def run(tmp_path):
    write_shards(tmp_path / "books", 4, SHARD_BYTES)
    return published(tmp_path)


async def holder(start, tmp_path, directory, signed, find=None, **record):
    transport = await start()
    identity = load(tmp_path / f"identity{len(directory.records)}")
    transport.serve_text(find or shelf_of(signed, tmp_path).find)
    directory.records[transport.peer] = (
        record.get("stage", 0),
        record_of(transport, identity, signed, **record),
    )
    return transport


def fetched(peer):
    return [event for event in peer.process.events if isinstance(event, log_events.TextFetched)]


def dropped(peer):
    events = [event for event in peer.process.events if isinstance(event, log_events.HolderDropped)]
    return {(event.peer, event.code) for event in events}


async def test_a_newcomer_gets_its_text_from_others_past_one_that_lies_and_one_that_dies(
    start, tmp_path, run
):
    directory = Directory()
    shelf = shelf_of(run, tmp_path)
    archivist = await holder(start, tmp_path, directory, run, role="archivist", stage=-1)
    liar = await holder(start, tmp_path, directory, run, lying(shelf, run))
    dies = await holder(start, tmp_path, directory, run)
    peer = newcomer(run, await start(), directory, tmp_path / "new")
    assert missing_text(run.manifest, peer.process.config) == "", "it may hold the first stage"
    reader = TextReader(
        process=peer.process, signed=run, exchange=peer.exchange, opened=lambda: None, ended=print
    )
    async with asyncio.timeout(DEADLINE):
        await reader.open(frozenset())
        assert reader.microbatch(MicrobatchId("me", 7)) is not None
        await dies.daemon.stop()
        for shard in reader.circles[0].shards.values():
            await peer.exchange.fetch(shard)
        await reader.close()
    folder = tmp_path / "new" / "text" / "fetched"
    books = {path.read_bytes() for path in (tmp_path / "books").glob("*.txt")}
    assert {path.read_bytes() for path in folder.iterdir() if path.stat().st_size == SHARD_BYTES} == books
    assert not list(folder.glob("*.part"))
    assert (liar.peer, "wrong_hash") in dropped(peer)
    assert not {archivist.peer} & {one for one, _ in dropped(peer)}
    assert sum(event.bytes for event in fetched(peer)) == 4 * SHARD_BYTES
    assert any("other peers send 4 files, 4.8 MB of 4.8 MB" in line for line in peer.process.lines)


async def test_a_download_goes_on_where_it_was_and_a_withdrawn_file_is_neither_fetched_nor_sent(
    start, tmp_path, run
):
    directory = Directory()
    shelf = shelf_of(run, tmp_path)
    given = []

    async def half(digest, index):
        """Two files, and the first half of the others."""
        if digest in shelf._files and index >= 5:
            return None
        given.append((digest, index))
        return await shelf.find(digest, index)

    first = await holder(start, tmp_path, directory, run, half)
    peer = newcomer(run, await start(), directory, tmp_path / "new")
    manifest, config = run.manifest, peer.process.config
    gone = bytes.fromhex(read_index(manifest.data.sources[0], str(tmp_path / "books"))[1].sha256)
    async with asyncio.timeout(DEADLINE):
        await peer.exchange.prepare()
        shards, _, _ = shards_here(manifest, config, peer.process.identity.public_key, frozenset({gone}))
        assert [shard.name for shard in shards["books"]] == [
            f"books/{name}.txt" for name in ("000", "002", "003")
        ]
        await peer.exchange.share(shards, {gone})
        with pytest.raises(
            TextUnreachable, match=r"books/000.txt is not complete: [5-9] of 10 chunks are missing"
        ):
            await peer.exchange.fetch(shards["books"][0])
        before = len(given)
        first.serve_text(shelf.find)
        await peer.exchange.fetch(shards["books"][0])
        fetched_twice = peer.exchange.fetched_bytes
        await peer.exchange.keep(peer.process.identity.public_key, frozenset({gone}))  # As an archivist does.
    assert fetched_twice == SHARD_BYTES, "what had come was not fetched again"
    assert len(fetched(peer)) == 3
    assert before
    assert await peer.exchange.shelf.find(gone, 0) is None
    sent = bytes.fromhex(shards["books"][0].files[0].sha256)
    assert (
        await peer.exchange.shelf.find(sent, 0) == (tmp_path / "books" / "000.txt").read_bytes()[: 128 * 1024]
    )
    withdrawn = shelf_of(run, tmp_path, {gone})
    assert await withdrawn.find(gone, 0) is None
    assert await withdrawn.find(sent, 9) is not None


async def test_conversations_travel_with_the_tokenizer_and_the_template_that_render_them(start, tmp_path):
    tokenizer = chat_folder(tmp_path)
    write_lines(tmp_path / "books" / "talks.jsonl", riddles(200))
    data = {**RUN["data"], "tokenizer": tokenizer.name, "format": "messages"}
    run = published(tmp_path, {**RUN, "data": data, "model": {**RUN["model"], "vocab_size": VOCABULARY}})
    directory = Directory()
    await holder(start, tmp_path, directory, run, shelf_of(run, tmp_path, tokenizer=tokenizer).find)
    peer = newcomer(run, await start(), directory, tmp_path / "new")
    reader = TextReader(
        process=peer.process, signed=run, exchange=peer.exchange, opened=lambda: None, ended=print
    )
    async with asyncio.timeout(DEADLINE):
        await reader.open(frozenset())
        inputs, labels = reader.microbatch(MicrobatchId("me", 0))
        await reader.close()
    assert 0 < (labels != IGNORE_INDEX).sum() < labels.numel(), "only answers are learned"
    assert inputs.min() >= 0
    kept = {path.name for path in (tmp_path / "new" / "text" / "fetched").iterdir()}
    assert {run.manifest.data.tokenizer_sha256, run.manifest.data.chat_template_sha256} < kept


async def test_an_archive_has_the_text_that_no_honest_peer_sends(start, tmp_path, run):
    directory, shelf = Directory(), shelf_of(run, tmp_path)
    archived = ArchivedText(open_store(str(tmp_path / "archive")))
    archived.put(shelf.paths())
    source = run.manifest.data.sources[0]
    gone, *_ = read_index(source, str(tmp_path / "books"))
    archived.withdraw({bytes.fromhex(gone.sha256)})
    liar = await holder(start, tmp_path, directory, run, lying(shelf, run))
    peer = newcomer(run, await start(), directory, tmp_path / "new", archive=str(tmp_path / "archive"))
    manifest, config = run.manifest, peer.process.config
    async with asyncio.timeout(DEADLINE):
        await peer.exchange.prepare()
        shards, _, _ = shards_here(manifest, config, peer.process.identity.public_key, frozenset())
        await peer.exchange.share(shards, frozenset())
        first, *others = shards["books"]
        for shard in others:
            await peer.exchange.fetch(shard)
        with pytest.raises(TextUnreachable, match="none of 1 others answers"):
            await peer.exchange.fetch(first)
        await peer.exchange.close()
    assert (liar.peer, "wrong_hash") in dropped(peer)
    assert [event.peers for event in fetched(peer)] == [0, 0, 0]
    assert all(peer.exchange.folder.path(file.sha256).is_file() for each in others for file in each.files)
