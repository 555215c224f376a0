"""A newcomer that knows only a run's id and a bootstrap holds the first stage, and gets the run's text from
two peers, one of which dies while it sends and one of which lies; the archive has the rest.

    scripts/soak travel [--megabytes 1000] [--shards 20] [--folder FOLDER] [--no-archive]

Real peers on 127.0.0.1; the liar is a peer without a stage that announces the first one. An archivist has
copied the run to a folder before, and is gone. With `--no-archive` the newcomer does not know that folder: it
keeps what it has, and waits. Prints a JSON object: seconds until the newcomer trains and until all text is
with it, bytes, from whom, what it dropped and why. Ends with 1 if a file differs from the original, the liar
was not found out, or files are missing that the archive has.
"""

import argparse
import asyncio
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path

from processes import QUIET, until
from travelling import lying, published, record_of, shelf_of, write_shards

from peers.lab.processes.local_processes import start
from peers.telemetry import event_log
from protocols.daemon.p2pd import LOOPBACK
from protocols.dht.directory import DhtDirectory
from protocols.p2pd.transport import P2pdTransport
from protocols.signed.identity import create, load

PATIENCE_SECONDS = 1500.0
ANNOUNCE_SECONDS = 30.0
WAITING_SECONDS = 60.0
ARCHIVE = "archive"


def events(state: Path, name: str) -> list[event_log.LogLine]:
    path = state / "events.jsonl"
    return [one for one in event_log.read(path) if one.name == name] if path.exists() else []


async def lie(folder: Path, signed, bootstraps: list[str]) -> None:
    """A peer that announces the first stage and changes a byte of every chunk, until cancelled."""
    path = folder / "liar.key"
    create(path)
    transport = await P2pdTransport.start(path, LOOPBACK)
    directory = await DhtDirectory.start(transport.daemon)
    try:
        transport.serve_text(lying(shelf_of(signed, folder), signed))
        await directory.bootstrap(bootstraps, 20.0)
        while True:
            record = record_of(transport, load(path), signed)
            await directory.announce(signed.run_id, 0, record, 20.0)
            await asyncio.sleep(ANNOUNCE_SECONDS)
    finally:
        await directory.close()
        await transport.close()


def is_archived(folder: Path, shards: int) -> bool:
    """Whether the archive has both stages and all text, with its index."""
    index, text = folder / ARCHIVE / "archive.json", folder / ARCHIVE / "text.json"
    if not (index.is_file() and text.is_file()):
        return False
    stages = {entry["stage"] for entry in json.loads(index.read_bytes())["checkpoints"]}
    return stages == {0, 1} and len(json.loads(text.read_bytes())) == shards + 1


async def archive(folder: Path, keys: dict, books: Path, shards: int) -> None:
    """Run an archivist until the archive is complete."""
    own = {"data_paths": {"books": str(books)}, "archive": str(folder / ARCHIVE)}
    keeper = await start(folder, "keeper", {**keys, **own, "role": "archivist", "archiving": {"seconds": 2}})
    try:
        await until(lambda: is_archived(folder, shards), "the run is archived", PATIENCE_SECONDS)
    finally:
        await keeper.stop(30.0)


async def travel(folder: Path, shards: int, size: int, with_archive: bool) -> dict[str, object]:
    books = await asyncio.to_thread(write_shards, folder / "books", shards, size)
    signed = await asyncio.to_thread(published, folder)
    boot = await start(folder, "boot", {"role": "bootstrap", "run": "run.json", **QUIET})
    peers, liar = [boot], None
    try:
        await boot.until_listening()
        keys = {"run": "run.json", "bootstrap": boot.addresses, **QUIET}
        own = {**keys, "stage": 0, "data_paths": {"books": str(books)}}
        for name, more in (("dies", own), ("last", {**keys, "stage": 1})):
            peers.append(await start(folder, name, more))
        dies, last = peers[1:]
        for peer in (dies, last):
            await until(lambda peer=peer: events(peer.state, "in_step"), f"{peer.name} trains", 600.0)
        await archive(folder, keys, books, shards)
        liar = asyncio.create_task(lie(folder, signed, list(boot.addresses)))
        await asyncio.sleep(3.0)
        began = time.monotonic()
        known = {"run": signed.run_id, "bootstrap": boot.addresses, "stage": 0, **QUIET}
        if with_archive:
            known["archive"] = str(folder / ARCHIVE)
        new = await start(folder, "new", known)
        peers.append(new)
        seen: dict[str, float] = {}

        def fetched(count: int) -> bool:
            if events(new.state, "in_step"):
                seen.setdefault("trains", time.monotonic() - began)
            return len(events(new.state, "text_fetched")) >= count

        await until(lambda: fetched(shards // 4), "a quarter is here", PATIENCE_SECONDS)
        dies.kill()
        quarter = time.monotonic() - began
        if with_archive:
            await until(lambda: fetched(shards), "all is here", PATIENCE_SECONDS)
        else:
            await asyncio.sleep(WAITING_SECONDS)
        seconds = time.monotonic() - began
        await until(lambda: fetched(0) and "trains" in seen, "the newcomer trains", PATIENCE_SECONDS)
    finally:
        if liar is not None:
            liar.cancel()
            await asyncio.gather(liar, return_exceptions=True)
        await asyncio.gather(*(peer.stop(30.0) for peer in peers))
    times = {
        "seconds_until_it_trains": round(seen["trains"], 1), "seconds_until_one_died": round(quarter, 1),
        "seconds_until_the_end": round(seconds, 1),
    }  # fmt: skip
    return times | await asyncio.to_thread(result, new.state, books, shards * size)


def result(state: Path, books: Path, size: int) -> dict[str, object]:
    """What the newcomer has, from whom, and whom it dropped."""

    def digest(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    files = [one.fields for one in events(state, "text_fetched")]
    dropped = [(one.fields["peer"], one.fields["code"]) for one in events(state, "holder_dropped")]
    wanted = {digest(path) for path in books.glob("*.txt")}
    here = {path.name: digest(path) for path in (state / "text" / "fetched").iterdir()}
    texts = {name: found for name, found in here.items() if name in wanted}
    shards = [one for one in files if one["file"].endswith(".txt")]
    return {
        "text_bytes": size, "files": len(wanted), "files_here": len(texts),
        "fetched_bytes": sum(one["bytes"] for one in shards),
        "files_from_peers": sum(one["peers"] > 0 for one in shards),
        "files_from_the_archive": sum(one["peers"] == 0 for one in shards),
        "seconds_of_files": [one["seconds"] for one in shards], "dropped": dropped,
        "all_files_are_right": all(name == found for name, found in texts.items()),
        "liar_found_out": any(code == "wrong_hash" for _, code in dropped),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where there is room for four times the text")
    parser.add_argument("--no-archive", action="store_true", help="the newcomer does not know the archive")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=told.folder) as folder:
        size = told.megabytes * 10**6 // told.shards
        seen = asyncio.run(travel(Path(folder), told.shards, size, not told.no_archive))
    print(json.dumps(seen, indent=1))
    is_complete = told.no_archive or seen["files_here"] == seen["files"]
    if not (is_complete and seen["all_files_are_right"] and seen["liar_found_out"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
