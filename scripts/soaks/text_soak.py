"""A text larger than memory: 100 shards are read to their end without a model; then some of them by a real
peer that is killed twice on the way.

    scripts/soak text [--gigabytes 1] [--trained 10] [--sequences 16] [--memory 2000] [--folder FOLDER]

0 of either leaves that part out. `--memory`: megabytes that each process, the peer's p2pd too, may have of
its own at most, by the system's own count (RLIMIT_DATA): what asks for more dies.

Prints a JSON object for each. Alone: memory that no file stands for (RssAnon) before, after the first tenth
of the shards and at most, what was mapped at most, seconds to make all tokens and read them. Trained:
which shards were read, by the event log, and how many when the peer was killed. Ends with 1 if one was not
read once in the epoch, or memory grew, while the other nine tenths were read, by a twentieth of these: what
starting takes is the same for any text.
"""

import argparse
import asyncio
import json
import random
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from processes import QUIET, until
from swarm import TextProcess, exchange_alone

from peers.config.peer_file import PeerFile
from peers.config.run_file import publish
from peers.data.shards import MIN_SHARD_BYTES
from peers.lab.processes.local_processes import start
from peers.telemetry import event_log
from peers.telemetry.log_events import ShardRead
from peers.worker.pipeline.text_reader import TextReader
from protocols.signed.identity import load_or_create
from swarmnet.identifiers import MicrobatchId

SHARDS = 100
WARM_SHARDS = SHARDS // 10
"""After so many, all that a reader of any text needs is there."""
RUN = """
name: text
stages: [1]
model: {{num_hidden_layers: 1, hidden_size: 16, num_attention_heads: 1,
  num_key_value_heads: 1, head_dim: 16, intermediate_size: 16}}
data: {{seq_len: {length}, micro_batch_size: {sequences}, sampling: epoch,
       sources: [{{name: books, path: books}}]}}
rounds: {{global_batch_tokens: 32768, snapshot_interval: 16, finality_timeout_seconds: 1}}
"""
WORDS = [f"{word}{number}" for number in range(200) for word in ("call", "me", "by", "my", "name")]


def write_text(folder: Path, shards: int, size: int) -> None:
    """Of `size` bytes each, no two alike."""
    folder.mkdir(parents=True)
    for number in range(shards):
        chance, left = random.Random(number), size
        with (folder / f"{number:03}.jsonl").open("wb") as file:
            while left > 0:
                text = " ".join(chance.choices(WORDS, k=2000))
                left -= file.write(json.dumps({"text": text}).encode() + b"\n")


def published(folder: Path, length: int, sequences: int):
    (folder / "run.yaml").write_text(RUN.format(length=length, sequences=sequences))
    return publish(folder / "run.yaml", load_or_create(folder / "owner.key"), folder / "run.json")[0]


def memory_of(pid: int | str) -> tuple[int, int]:
    """Bytes in use that no file stands for, and of files."""
    status = Path(f"/proc/{pid}/status").read_text()
    anonymous, file = (
        int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024 for name in ("RssAnon", "RssFile")
    )
    return anonymous, file


async def alone(folder: Path, size: int) -> dict[str, object]:
    signed, books = published(folder, 2048, 8), folder / "books"
    await asyncio.to_thread(write_text, books, SHARDS, size // SHARDS)
    config = PeerFile(run=signed.run_id, state=folder / "state", data_paths={"books": str(books)})
    process, opened, read = TextProcess(config), asyncio.Event(), []
    text = TextReader(
        process=process,
        signed=signed,
        exchange=exchange_alone(process, signed),
        opened=opened.set,
        ended=print,
    )
    began, (before, _), warm, most, most_of_files = time.monotonic(), memory_of("self"), 0, 0, 0
    await text.open(frozenset())
    microbatches = 0
    while len(read) < SHARDS:
        opened.clear()
        if text.microbatch(MicrobatchId(signed.manifest.owner, microbatches)) is None:
            await opened.wait()
            continue
        microbatches += 1
        read = [event for event in process.events if isinstance(event, ShardRead)]
        if microbatches % 100 == 0:
            anonymous, of_files = memory_of("self")
            most, most_of_files = max(most, anonymous), max(most_of_files, of_files)
            if len(read) <= WARM_SHARDS:
                warm = most
            await asyncio.sleep(0)
    await text.close()
    kept = sum(path.stat().st_size for path in (folder / "state").rglob("*.tokens"))
    times_read = Counter(one.shard for one in read)
    return {
        "text_bytes": sum(path.stat().st_size for path in books.iterdir()), "tokens_on_disk_bytes": kept,
        "shards_read_once": sum(count == 1 for count in times_read.values()),
        "tokens_read": sum(one.tokens for one in read), "seconds": round(time.monotonic() - began, 1),
        "anonymous_bytes_before": before, "anonymous_bytes_warm": warm, "anonymous_bytes_at_most": most,
        "file_bytes_at_most": most_of_files,
    }  # fmt: skip


def shards_read(state: Path) -> list[tuple[int, str]]:
    path = state / "events.jsonl"
    events = event_log.read(path) if path.exists() else []
    return [(one.fields["epoch"], one.fields["shard"]) for one in events if one.name == "shard_read"]


async def trained(folder: Path, shards: int, sequences: int) -> dict[str, object]:
    published(folder, 128, sequences)
    await asyncio.to_thread(write_text, folder / "books", shards, MIN_SHARD_BYTES)
    keys = {"run": "run.json", "stage": 0, "data_paths": {"books": str(folder / "books")}, **QUIET}
    keys["checkpoint_seconds"] = 2
    peer = await start(folder, "peer", keys)
    began, lives, most = time.monotonic(), [], 0
    try:
        for part in (0.3, 0.6, 1.0):
            state = peer.state
            await until(lambda state=state, part=part: len(set(shards_read(state))) >= part * shards,
                        f"{part:.0%} of the shards are read", 3000.0)  # fmt: skip
            most = max(most, memory_of(peer.process.pid)[0])
            print(f"{len(shards_read(state))} shards after {time.monotonic() - began:.0f} s", file=sys.stderr)
            lives.append(len(shards_read(state)))
            if part < 1.0:
                peer.kill()
                await peer.stop(30.0)
                peer = await start(folder, "peer", keys)
    finally:
        await peer.stop(30.0)
    read = shards_read(peer.state)
    settled = [one.fields for one in event_log.read(peer.state / "events.jsonl") if one.name == "settled"]
    return {
        "shards": shards, "shards_read_in_the_epoch": len({name for epoch, name in read if epoch == 0}),
        "read_twice_after_a_kill": sum(count - 1 for count in Counter(read).values()),
        "shards_read_at_kills": lives[:2], "finalized_tokens": settled[-1]["tokens"],
        "seconds": round(time.monotonic() - began, 1), "anonymous_bytes": most,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--trained", type=int, default=10, help="shards of 1 MiB")
    parser.add_argument("--sequences", type=int, default=16, help="of 128 bytes in a microbatch")
    parser.add_argument("--memory", type=int, default=0, help="megabytes; 0: as many as there are")
    parser.add_argument("--folder", type=Path, help="where there is room for twice the text")
    told = parser.parse_args()
    if told.memory:
        resource.setrlimit(resource.RLIMIT_DATA, (told.memory * 10**6,) * 2)
    if told.gigabytes:
        with tempfile.TemporaryDirectory(dir=told.folder) as folder:
            (Path(folder) / "alone").mkdir()
            seen = asyncio.run(alone(Path(folder) / "alone", int(told.gigabytes * 1e9)))
        print(json.dumps(seen, indent=1), flush=True)
        grown = seen["anonymous_bytes_at_most"] - seen["anonymous_bytes_warm"]
        later_bytes = seen["text_bytes"] * (SHARDS - WARM_SHARDS) // SHARDS
        if seen["shards_read_once"] < SHARDS:
            sys.exit("not every shard was read once in the epoch")
        if not seen["anonymous_bytes_warm"]:
            sys.exit(
                "the text is too small to measure memory before a tenth of it is read; give more --gigabytes"
            )
        if grown > later_bytes / 20:
            sys.exit(f"memory grew by {grown:,} bytes while {later_bytes:,} bytes of text were read")
    if told.trained:
        with tempfile.TemporaryDirectory(dir=told.folder) as folder:
            by_peer = asyncio.run(trained(Path(folder), told.trained, told.sequences))
        print(json.dumps(by_peer, indent=1))
        if by_peer["shards_read_in_the_epoch"] < told.trained:
            sys.exit("not every shard was read in the epoch")


if __name__ == "__main__":
    main()
