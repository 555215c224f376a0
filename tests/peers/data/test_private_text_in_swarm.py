"""Owners train on private texts together, and a reader of every byte that they send finds nothing of them."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from private_wire import token_windows
from swarm import Swarm, TextProcess, exchange_alone, shared_rounds, tiny_manifest

from peers.config.peer_file import PeerFile
from peers.data.documents import ReadSummary
from peers.data.shards import index_of
from peers.lab.world.virtual_time import run
from peers.network.discovery.record_reader import opened
from peers.worker.pipeline.text_reader import TextReader
from protocols.memory.directory import MemoryDirectory
from protocols.memory.transport import MemoryLink
from protocols.signed.identity import Identity
from swarmnet.model.carried_text import CarriedText, TextCodec
from swarmnet.run.manifest_check import check
from swarmnet.run.schema import Data, Sync, TextSource

pytestmark = pytest.mark.swarm
OWNERS = {"a": b"Anna's canary sings ", "b": b"Ben's dog barks deep ", "c": b"Cleo's cat says meow "}
DATA = Data((TextSource("own", "own"),), seq_len=16, micro_batch_size=2, private=True)
SYNC = Sync(
    "diloco", outer_lr=1.0, outer_momentum=0.0, weights="tokens",
    warmup_rounds=1, decay_rounds=1000, optimizer_warmup_steps=1,
)  # fmt: skip


@pytest.fixture
def sent(monkeypatch):
    """Every byte that peers send: through links, and to the directory."""
    found = []

    def receive(link, data):
        found.append(bytes(data))
        plain_receive(link, data)

    async def announce(directory, run_id, stage, record, *deadline):
        found.append(record)
        return await plain_announce(directory, run_id, stage, record, *deadline)

    async def at_once(work, *arguments):
        """In the place of asyncio.to_thread, which a virtual clock does not wait for."""
        await asyncio.sleep(0.01)
        return work(*arguments)

    plain_receive, plain_announce = MemoryLink._receive, MemoryDirectory.announce
    monkeypatch.setattr(MemoryLink, "_receive", receive)
    monkeypatch.setattr(MemoryDirectory, "announce", announce)
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    return found


def needles(folder):
    """The text as bytes and as tokens of every width, its hashes, and those of its index."""
    (path,) = folder.glob("*.txt")
    text = path.read_bytes()
    phrase = text[: len(text) // 2][:12]  # A sequence of 16 tokens holds all of it, or most at its start.
    widths = [np.frombuffer(phrase, np.uint8).astype(kind).tobytes() for kind in ("u1", "<u2", "<i4", "<i8")]
    index = index_of(folder, ReadSummary(), lambda done, total: None)
    digests = [kind(data).digest() for kind in (hashlib.sha256, hashlib.blake2b) for data in (text, index)]
    return [*widths, *digests, *(digest.hex().encode() for digest in digests), path.name.encode()]


class ByOwner:
    """The text of the peer that cuts the microbatch."""

    def __init__(self):
        self.readers = {}

    def microbatch(self, key, mixture=None):
        return self.readers[key.origin].microbatch(key, mixture)


async def texts(swarm, tmp_path):
    """Open the text of each owner, and return what they would send of it to others."""
    swarm.text, shelves = ByOwner(), []
    for name, phrase in OWNERS.items():
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / f"secret-of-{name}.txt").write_bytes(phrase * 400)
        identity = Identity.from_seed(name.encode())
        config = PeerFile(run="ab" * 32, state=tmp_path / f"state-{name}", data_paths={"own": str(folder)})
        process = TextProcess(config, identity)
        exchange = exchange_alone(process, swarm.signed)
        shelves.append(exchange.shelf)
        reader = TextReader(
            process=process,
            signed=swarm.signed,
            exchange=exchange,
            opened=lambda: None,
            ended=lambda task: None,
        )
        swarm.text.readers[identity.peer_id] = await reader.open(frozenset({hashlib.sha256(b"x").digest()}))
    return shelves


def knows_nothing_for_others(shelves, tmp_path):
    for shelf, name in zip(shelves, OWNERS, strict=True):
        digest = hashlib.sha256((tmp_path / name / f"secret-of-{name}.txt").read_bytes()).digest()
        assert asyncio.run(shelf.find(digest, 0)) is None, "nor does it send the text to one who knows it"


def has_trained(swarm):
    return shared_rounds(swarm) >= 6


def train(manifest, tmp_path, stages, others=(), until=has_trained):
    """Train a few rounds, and return the swarm and what peers would send of their texts. The peers `others`,
    by name and stage, have no text."""
    swarm, found = Swarm(manifest), []

    async def story():
        swarm.open()
        found.extend(await texts(swarm, tmp_path))
        for name, stage in zip(OWNERS, stages, strict=True):
            swarm.start(name, stage, in_flight=2)
        for name, stage in others:
            swarm.start(name, stage)
        await swarm.until(lambda: until(swarm), 120.0)
        for reader in swarm.text.readers.values():
            await reader.close()
        await swarm.close()

    run(story())
    return swarm, found


@pytest.mark.parametrize("sampling", ["random", "epoch"])
def test_nothing_of_a_private_text_is_in_any_byte_that_its_owner_sends(sent, tmp_path, sampling):
    manifest = tiny_manifest((3,), data=replace(DATA, sampling=sampling), sync=SYNC)
    check(manifest)
    swarm, shelves = train(manifest, tmp_path, (0, 0, 0))
    wire = b"\0".join(sent)
    assert len(wire) > 100_000
    for name in OWNERS:
        assert [needle for needle in needles(tmp_path / name) if needle in wire] == []
    knows_nothing_for_others(shelves, tmp_path)
    records = list(opened(sent, swarm.signed.run_id))
    assert {found.peer for found in records} == {member.peer for member in swarm.members.values()}
    assert {(found.record.text_shards, found.record.text_shards_read) for found in records} == {(0, 0)}
    settled = [note.fields["ids"] for note in swarm.of("settled")]
    assert any(len(ids) == len(OWNERS) for ids in settled), "all owners count"


def test_the_reader_of_the_wire_finds_a_text_that_is_not_private(sent, tmp_path):
    train(tiny_manifest((1, 2), data=replace(DATA, private=False)), tmp_path, (0, 1, 1))
    wire = b"\0".join(sent)
    assert any(needle in wire for needle in needles(tmp_path / "a"))


U_SHAPED = tiny_manifest((2, 1), data=replace(DATA, u_shaped_layers=1))


def test_neither_tokens_nor_labels_leave_an_owner_that_holds_both_ends(sent, tmp_path):
    check(U_SHAPED)
    swarm, shelves = train(U_SHAPED, tmp_path, (0, 0, 0), others=(("m", 1), ("n", 1)))
    wire = b"\0".join(sent)
    assert swarm.committed(1) > 40, "hidden states went over the wire"
    for name in OWNERS:
        secrets = {*needles(tmp_path / name), *token_windows(OWNERS[name] * 4)}
        assert [secret for secret in secrets if secret in wire] == []
    knows_nothing_for_others(shelves, tmp_path)


def test_the_reader_of_the_wire_finds_the_labels_of_ordinary_stages(sent, tmp_path):
    ordinary = replace(U_SHAPED, data=replace(U_SHAPED.data, u_shaped_layers=0))
    train(ordinary, tmp_path, (0, 1, 1))
    wire = b"\0".join(sent)
    assert any(needle in wire for needle in token_windows(OWNERS["a"] * 4))


def test_the_reader_finds_the_tokens_that_an_owner_sends_and_no_peer_takes_them(sent, tmp_path, monkeypatch):
    def encode(codec, tokens, labels):
        return CarriedText(tokens.to(torch.int16).numpy().tobytes(), labels)

    monkeypatch.setattr(TextCodec, "encode", encode)

    def refusals(swarm):
        return [note.fields["reason"] for note in swarm.of("refused", "m")]

    swarm, _ = train(U_SHAPED, tmp_path, (0, 0, 0), (("m", 1),), refusals)
    wire = b"\0".join(sent)
    assert any(needle in wire for needle in token_windows(OWNERS["a"] * 4))
    assert all("2048 are allowed" in reason for reason in refusals(swarm)), "as many as hidden states take"
    assert swarm.of("committed") == []
