"""A newcomer that knows only a run's id and a bootstrap holds the first stage, and gets the run's text from
others: one dies while it sends, one lies, one stays.

    scripts/soak travel [--megabytes 1000] [--shards 20] [--folder FOLDER]

Real peers on 127.0.0.1; the liar is a peer without a stage that announces the first one. Prints a JSON
object: seconds until the newcomer trains and until all text is with it, bytes, what it dropped and why. Ends
with 1 if a file differs from the original, or the liar was not found out.
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


async def travel(folder: Path, shards: int, size: int) -> dict[str, object]:
    books = await asyncio.to_thread(write_shards, folder / "books", shards, size)
    signed = await asyncio.to_thread(published, folder)
    boot = await start(folder, "boot", {"role": "bootstrap", "run": "run.json", **QUIET})
    peers, liar = [boot], None
    try:
        await boot.until_listening()
        keys = {"run": "run.json", "bootstrap": boot.addresses, **QUIET}
        own = {**keys, "stage": 0, "data_paths": {"books": str(books)}}
        for name, more in (("dies", own), ("stays", own), ("last", {**keys, "stage": 1})):
            peers.append(await start(folder, name, more))
        dies, stays, last = peers[1:]
        for peer in (dies, stays, last):
            await until(lambda peer=peer: events(peer.state, "in_step"), f"{peer.name} trains", 600.0)
        liar = asyncio.create_task(lie(folder, signed, list(boot.addresses)))
        await asyncio.sleep(3.0)
        began = time.monotonic()
        new = await start(
            folder, "new", {"run": signed.run_id, "bootstrap": boot.addresses, "stage": 0, **QUIET}
        )
        peers.append(new)
        seen: dict[str, float] = {}

        def fetched(count: int) -> bool:
            if events(new.state, "in_step"):
                seen.setdefault("trains", time.monotonic() - began)
            return len(events(new.state, "text_fetched")) >= count

        await until(lambda: fetched(shards // 4), "a quarter is here", PATIENCE_SECONDS)
        dies.kill()
        quarter = time.monotonic() - began
        await until(lambda: fetched(shards), "all is here", PATIENCE_SECONDS)
        seconds = time.monotonic() - began
        await until(lambda: fetched(shards) and "trains" in seen, "the newcomer trains", PATIENCE_SECONDS)
        files = [one.fields for one in events(new.state, "text_fetched")]
        dropped = [(one.fields["peer"], one.fields["code"]) for one in events(new.state, "holder_dropped")]
    finally:
        if liar is not None:
            liar.cancel()
            await asyncio.gather(liar, return_exceptions=True)
        await asyncio.gather(*(peer.stop(30.0) for peer in peers))

    def digests(place: Path) -> set[str]:
        return {hashlib.sha256(path.read_bytes()).hexdigest() for path in place.iterdir()}

    here = await asyncio.to_thread(digests, new.state / "text" / "fetched")
    wanted = await asyncio.to_thread(
        lambda: {hashlib.sha256(p.read_bytes()).hexdigest() for p in books.glob("*.txt")}
    )
    return {
        "text_bytes": shards * size, "files": shards, "fetched_bytes": sum(one["bytes"] for one in files),
        "seconds_until_it_trains": round(seen["trains"], 1), "seconds_until_one_died": round(quarter, 1),
        "seconds_until_all_is_here": round(seconds, 1),
        "megabytes_per_second": round(shards * size / 1e6 / seconds, 1),
        "seconds_of_files": [one["seconds"] for one in files],
        "senders_of_files": [one["peers"] for one in files],
        "dropped": dropped, "all_files_are_right": wanted <= here,
        "liar_found_out": any(code == "wrong_hash" for _, code in dropped),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where there is room for three times the text")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=told.folder) as folder:
        seen = asyncio.run(travel(Path(folder), told.shards, told.megabytes * 10**6 // told.shards))
    print(json.dumps(seen, indent=1))
    if not (seen["all_files_are_right"] and seen["liar_found_out"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
