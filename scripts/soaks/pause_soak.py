"""What a pause frees, and how fast: two real peers of one stage, the second is paused and resumed.

    scripts/soak pause [--width 512]

Prints a JSON object: resident bytes of the peer before, while paused and after, seconds until they were free,
and until it was in step again. Ends with 1 if its memory was not free within 5 s.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import psutil
from processes import QUIET, times, until

from peers.config.run_file import publish
from peers.lab.processes.local_processes import start
from peers.runtime.control_client import ask
from protocols.signed.identity import load_or_create
from swarmnet.resources.memory_estimate import PROCESS_BYTES

PROMISED_SECONDS = 5.0
"""From `swarmnet pause` to free memory."""
MAX_BYTES = 1.2 * PROCESS_BYTES
"""Resident in a peer that holds nothing of a stage."""
RUN = """
name: pause
seed: 1
stages: [4]
model: {{num_hidden_layers: 4, hidden_size: {width}, num_attention_heads: 8,
  num_key_value_heads: 8, head_dim: {head}, intermediate_size: {inner}}}
data: {{seq_len: 64, micro_batch_size: 1}}
rounds: {{global_batch_tokens: 256, snapshot_interval: 4, finality_timeout_seconds: 2}}
"""


async def measure(folder: Path, width: int) -> dict[str, object]:
    (folder / "run.yaml").write_text(RUN.format(width=width, head=width // 8, inner=4 * width))
    publish(folder / "run.yaml", load_or_create(folder / "owner.key"), folder / "run.json")
    keys = {"run": "run.json", "stage": 0, **QUIET}
    peers = [await start(folder, "first", keys)]
    try:
        await peers[0].until_listening()
        peers.append(await start(folder, "second", {**keys, "bootstrap": peers[0].addresses[-1:]}))
        second = peers[1]
        for peer in peers:
            await until(lambda peer=peer: len(times(peer.state, "settled")) > 8, "both train", 600.0)
        process = psutil.Process(second.process.pid)
        before = process.memory_info().rss
        answer = await asyncio.to_thread(ask, second.state, {"do": "pause"}, 60.0)
        await asyncio.sleep(2.0)
        paused, resumed_at = process.memory_info().rss, time.time()
        await asyncio.to_thread(ask, second.state, {"do": "resume"}, 60.0)
        await until(
            lambda: any(at > resumed_at for at in times(second.state, "in_step")), "it is back", 300.0
        )
        back = max(times(second.state, "in_step")) - resumed_at
        settled = len(times(second.state, "settled"))
        await until(lambda: len(times(second.state, "settled")) > settled + 8, "it settles rounds", 600.0)
        return {
            "width": width, "before_bytes": before, "answered_bytes": answer["bytes"], "paused_bytes": paused,
            "after_bytes": process.memory_info().rss, "free_seconds": answer["seconds"],
            "back_seconds": round(back, 1), "load": psutil.getloadavg()[0],
        }  # fmt: skip
    finally:
        for peer in peers:
            await peer.stop(30.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    with tempfile.TemporaryDirectory() as folder:
        seen = asyncio.run(measure(Path(folder), parser.parse_args().width))
    print(json.dumps(seen, indent=1))
    if seen["free_seconds"] > PROMISED_SECONDS or seen["answered_bytes"] > MAX_BYTES:
        sys.exit(
            f"{seen['answered_bytes'] / 1e6:.0f} MB were in use after {seen['free_seconds']} s; promised are "
            f"{MAX_BYTES / 1e6:.0f} MB after {PROMISED_SECONDS:g} s"
        )
