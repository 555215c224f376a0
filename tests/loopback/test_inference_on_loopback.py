"""A visitor of real peers on 127.0.0.1: `swarmnet generate` and `swarmnet evaluate` with --run."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from pathlib import Path

import pytest
from model_sizes import model_keys
from processes import publish_run

from peers.lab.processes.demo import LOOPBACK
from peers.lab.processes.local_processes import DemoPeer, start

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(600)]

RUN = {
    "name": "visited",
    "stages": [1, 1],
    "model": model_keys(width=64, layers=2, heads=4, kv_heads=4, inner=128),
    "data": {"seq_len": 64, "micro_batch_size": 4},
    "rounds": {"global_batch_tokens": 2048, "snapshot_interval": 2},
}
PATIENCE_SECONDS = 120.0
WORK_SHARE = 0.25
"""Of the peers' compute: they would train as fast as they can, and everything else would wait for a core."""


async def swarmnet(*arguments: str, typed: bytes = b"") -> tuple[int, str, list[float], str]:
    """Exit code, standard output, when its pieces came, and standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "peers.cli.main", *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(typed)
    process.stdin.close()
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    pieces, times = [], []
    while piece := await asyncio.wait_for(process.stdout.read(4096), PATIENCE_SECONDS):
        pieces.append(piece)
        times.append(time.monotonic())
    code = await asyncio.wait_for(process.wait(), PATIENCE_SECONDS)
    return code, b"".join(pieces).decode(errors="replace"), times, (await errors).decode()


async def settled(peers: list[DemoPeer], rounds: int) -> None:
    """Wait until every peer has settled some rounds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        logs = [peer.state / "events.jsonl" for peer in peers]
        counts = [log.read_text().count('"settled"') if log.exists() else 0 for log in logs]
        if min(counts) >= rounds:
            return
        assert time.monotonic() < deadline, (counts, [list(peer.said)[-2:] for peer in peers])
        await asyncio.sleep(0.5)


async def test_a_visitor_streams_a_text_and_scores_the_model_of_a_real_swarm(tmp_path: Path):
    publish_run(tmp_path, RUN)
    boot = await start(tmp_path, "boot", {"role": "bootstrap", "run": "run.json", **LOOPBACK})
    peers: list[DemoPeer] = []
    try:
        await boot.until_listening()
        for stage in (0, 1):
            keys = {
                "run": "run.json", "bootstrap": boot.addresses, "stage": stage, "in_flight": 2,
                "compute_duty_cycle": WORK_SHARE,
            }  # fmt: skip
            peers.append(await start(tmp_path, f"peer-{stage}", {**keys, **LOOPBACK}))
        await settled(peers, 8)
        ways = ["--run", str(tmp_path / "run.json"), "--bootstrap", boot.addresses[0]]
        code, text, times, errors = await swarmnet("generate", *ways, "--tokens", "40", "def ")
        assert code == 0, errors
        assert text.startswith("def ")
        assert len(text.rstrip("\n")) >= 20
        assert len(times) > 10, "it streams"
        assert re.search(r"weights of settled rounds, by stage: 0: \d+.*, 1: \d+", errors), errors
        assert re.search(r"[\d.]+ tokens/s, [\d,]+ bytes per token", errors), errors
        code, text, _, errors = await swarmnet(
            "generate", *ways, "--tokens", "8", "import ", "class ", "def "
        )
        assert code == 0, errors
        assert sum(text.count(prompt) for prompt in ("import ", "class ", "def ")) >= 3
        book = tmp_path / "book.txt"
        book.write_text("for number in range(10):\n    print(number)\n" * 100)
        code, text, _, errors = await swarmnet("evaluate", *ways, "--eval-text", str(book))
        assert code == 0, errors
        assert 1.0 < float(re.search(r"perplexity ([\d.]+) per token", text)[1]) < 300.0
    finally:
        await asyncio.gather(*(peer.stop(60.0) for peer in peers))
        await boot.stop(60.0)
