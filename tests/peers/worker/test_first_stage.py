"""How a newcomer counts the peers of each stage: more are listed than it can ask, and some of them died."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import fmean
from types import SimpleNamespace

import pytest
from swarm import TINY_MODEL, announcer, sign, tiny_manifest

from peers.config.run_file import SignedManifest
from peers.network.discovery.announcer import MAX_ASKED
from peers.worker.stage_moves import first_stage
from protocols.errors import Unreachable
from protocols.messages.table import PeerRecord
from protocols.signed.identity import Identity
from protocols.signed.records import seal_record
from swarmnet.identifiers import PeerId, RunId
from swarmnet.run.schema import Paths

SIGNED = sign(tiny_manifest())
ROUND = 7
ME = Identity.from_seed(b"newcomer")


class Swarm:
    """Directory and transport of a newcomer: so many peers listed at each stage, so many of them dead."""

    def __init__(self, listed: Sequence[int], dead: Sequence[int], signed: SignedManifest = SIGNED) -> None:
        self.signed = signed
        self.records: list[dict[PeerId, bytes]] = []
        self.dead: set[PeerId] = set()
        self.asked: list[PeerId] = []
        for stage, (count, gone) in enumerate(zip(listed, dead, strict=True)):
            peers = [Identity.from_seed(f"{stage}/{number}".encode()) for number in range(count)]
            self.records.append({peer.peer_id: self.record(peer, stage) for peer in peers})
            self.dead.update(peer.peer_id for peer in peers[:gone])
        self.transport = SimpleNamespace(peer=ME.peer_id, open=self.open)

    def record(self, peer: Identity, stage: int) -> bytes:
        content = PeerRecord(peer.peer_id, stage, "worker", [], ROUND, 64.0, "0")
        return seal_record(peer, self.signed.run_id, content, 100.0)

    def now(self) -> float:
        return 100.0

    async def look_up(self, run: RunId, stage: int, deadline_seconds: float) -> dict[PeerId, bytes]:
        return self.records[stage] if stage >= 0 else {}

    async def open(self, peer: PeerId, lane: str, deadline_seconds: float, addresses: Sequence[str]):
        self.asked.append(peer)
        if peer in self.dead:
            raise Unreachable("it has died")
        return SimpleNamespace(close=lambda: None)

    async def chosen(self, seed: int) -> tuple[int, list[int]]:
        """The stage that a newcomer takes, and how many peers it counts at each."""
        self.asked.clear()
        said: list[str] = []
        presence = announcer(self.signed, ME, self.transport, self)
        stage = await first_stage(presence, Random(seed), lambda event, line: said.append(line), frozenset())
        return stage, [int(count) for count in re.findall(r"stage \d+: (\d+)", said[0])]


async def test_stages_of_more_peers_than_can_be_asked_are_not_all_alike():
    swarm = Swarm(listed=(90, 40, 60), dead=(0, 0, 0))
    for seed in range(10):
        assert await swarm.chosen(seed) == (1, [90, 40, 60])
        assert len(swarm.asked) == 3 * MAX_ASKED


async def test_of_peers_that_are_not_asked_the_same_share_counts_as_answered():
    swarm = Swarm(listed=(90, 40, 60), dead=(60, 0, 0))
    counts = [(await swarm.chosen(seed))[1] for seed in range(20)]
    assert all(others == [40, 60] for _, *others in counts)
    assert 25 < fmean(first for first, *_ in counts) < 35, "30 live"


@pytest.mark.parametrize("dead", [0, 5])
async def test_a_stage_that_can_be_asked_whole_counts_who_answered(dead):
    swarm = Swarm(listed=(MAX_ASKED, 30, 30), dead=(dead, 0, 0))
    assert (await swarm.chosen(1))[1] == [MAX_ASKED - dead, 30, 30]


async def test_what_a_newcomer_has_announced_before_counts_for_nobody():
    swarm = Swarm(listed=(2, 1, 2), dead=(0, 0, 0))
    swarm.records[1][ME.peer_id] = swarm.record(ME, 1)
    assert await swarm.chosen(1) == (1, [2, 1, 2])
    assert ME.peer_id not in swarm.asked


@pytest.mark.parametrize(("full_path_warmup_rounds", "thin"), [(0, 0), (ROUND, 0), (ROUND + 1, 3)])
async def test_stages_that_microbatches_leave_out_need_fewer_peers_once_they_do(
    full_path_warmup_rounds, thin
):
    manifest = tiny_manifest(
        (1,) * 6,
        model=replace(TINY_MODEL, num_hidden_layers=6),
        paths=Paths(1 / 3, full_path_warmup_rounds=full_path_warmup_rounds),
    )
    swarm = Swarm(listed=(5, 4, 4, 3, 4, 9), dead=(0,) * 6, signed=sign(manifest))
    assert (await swarm.chosen(1))[0] == thin
