"""Peers on real p2pd that hold a run's text and send it: honest ones, and one that lies."""

import json
import random
import time
from types import SimpleNamespace

from model_sizes import model_keys
from swarm import TextProcess

from peers.config.peer_file import PeerFile
from peers.config.run_file import publish
from peers.data.local_text import places_here
from peers.data.shared_text import shared_blobs, shared_files
from peers.state.chunks.text_exchange import TextExchange
from peers.state.chunks.text_shelf import TextShelf
from peers.tools.owner.run_check import counted_data
from protocols.signed.identity import load_or_create
from protocols.signed.peer_record import PeerRecord
from protocols.signed.records import seal_record
from swarmnet.identifiers import PeerId

RUN = {
    "name": "travelling",
    "stages": [1, 1],
    "model": model_keys(width=32, layers=2, heads=2, kv_heads=2, inner=64),
    "data": {
        "seq_len": 64,
        "micro_batch_size": 2,
        "sampling": "epoch",
        "sources": [{"name": "books", "path": "books", "licence": "CC0-1.0"}],
    },
    "rounds": {"global_batch_tokens": 512, "snapshot_interval": 4},
}


def write_shards(folder, count, size):
    """Files of `size` bytes, no two alike."""
    folder.mkdir(parents=True)
    for number in range(count):
        chance = random.Random(number)
        words = [f"word{chance.randrange(10_000)}" for _ in range(2000)]
        with (folder / f"{number:03}.txt").open("w") as file:
            while file.tell() < size:
                text = " ".join(chance.choices(words, k=4000))
                file.write(text[: size - file.tell()])
    return folder


def published(folder, keys=RUN):
    """The run of the text in `folder`/books, signed by its owner as `swarmnet publish` does."""
    from peers.config.run_file import load_manifest

    file = folder / "run.yaml"
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    data = counted_data(load_manifest(file, PeerId("")), folder, None)
    return publish(file, load_or_create(folder / "owner.key"), folder / "run.json", data=data)[0]


def shelf_of(signed, folder, withdrawn=(), tokenizer=None):
    """The shelf of a peer with its own copy in `folder`/books."""
    config = PeerFile(run=signed.run_id, state=folder / "state", data_paths={"books": str(folder / "books")})
    places, shelf = places_here(signed.manifest, config), TextShelf()
    shelf.replace(
        shared_files(signed.manifest, config, places, withdrawn),
        shared_blobs(signed.manifest, config, places, tokenizer),
    )
    return shelf


def lying(shelf, signed):
    """What a peer serves that changes a byte in every chunk of a file; lists and index are right."""

    async def find(digest, index):
        chunk = await shelf.find(digest, index)
        is_of_file = digest in shelf._files and chunk
        return bytes([chunk[0] ^ 1]) + chunk[1:] if is_of_file else chunk

    return find


def record_of(transport, identity, signed, stage=0, role="worker"):
    addresses = list(transport.addresses)
    record = PeerRecord(transport.peer, stage, role, addresses, 0, 0.0, "1")
    return seal_record(identity, signed.run_id, record, time.time())


class Directory:
    """The records of a stage, and how often they were asked for."""

    def __init__(self):
        self.records, self.asked = {}, 0

    async def look_up(self, _run, stage, _deadline):
        self.asked += 1
        return {peer: data for peer, (at, data) in self.records.items() if at == stage}


def newcomer(signed, transport, directory, state, **keys):
    """The exchange of a peer without a copy, with the process that it reports to."""
    process = TextProcess(PeerFile(run=signed.run_id, state=state, **keys))
    exchange = TextExchange(
        config=process.config,
        signed=signed,
        transport=transport,
        directory=directory,
        log_event=process.log.record,
        notify=process.notify,
    )
    return SimpleNamespace(process=process, exchange=exchange, signed=signed)
