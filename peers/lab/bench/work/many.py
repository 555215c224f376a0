"""Honest peers in as many ways as they can be honest in, and every window of theirs computed again: whether
any of them is ever found to lie. A play follows from its number alone.

An auditor computes with the settings of the peer: others are not judged. What differs from play to play are
numbers, threads, models, microbatches, steps, methods, the length of windows, and which contributions come
too late for their set.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from peers.lab.bench.work.audits import AuditedPeers, Peer
from swarmnet.identifiers import PeerId
from swarmnet.model.computing.choices import Computing, DtypeName
from swarmnet.run.manifest import Data, Manifest, MethodName, ModelShape, Rounds, Sync

DTYPES: tuple[DtypeName, ...] = ("fp32", "bf16")
THREADS = (1, 1, 1, 2, 2, 4, 8, 16)
"""Threads that wait for one another must not spin where others want the cores, or two take thirty times as
long as one on models this small: OMP_WAIT_POLICY=PASSIVE."""
METHODS: tuple[MethodName, ...] = (
    "local-steps", "local-steps", "diloco", "streaming-diloco", "sparse-loco", "partitioned",
)  # fmt: skip
WINDOWS = 8
"""Of each peer in a play, or ROUNDS if that is fewer."""
ROUNDS = 24


@dataclass(frozen=True, slots=True)
class Play:
    """What a number stands for."""

    seed: int
    dtype: DtypeName
    threads: int
    peers: int
    late: float
    """Share of contributions that come too late."""
    manifest: Manifest


@dataclass(slots=True)
class Found:
    play: Play
    verdicts: Counter[str]
    reasons: Counter[str]
    """Of those that do not agree."""
    carrying: int = 0
    """Audited windows into which something was carried."""
    broken: int = 0
    """Which a late contribution had ended before their time."""
    rounds: int = 0
    """That were computed again."""
    seconds: float = 0.0
    """Of the processor, making and auditing."""
    audit_seconds: float = 0.0


def play_of(seed: int) -> Play:
    chance = Random(f"honest {seed}")
    dtype, threads = DTYPES[seed % len(DTYPES)], THREADS[seed // len(DTYPES) % len(THREADS)]
    method = chance.choice(METHODS)
    peers, steps, sequences = chance.randint(2, 4), chance.randint(1, 3), chance.randint(1, 3)
    width, tokens = chance.choice((16, 16, 32, 48)), chance.choice((8, 16, 24))
    microbatch = sequences * tokens
    model = ModelShape(
        vocabulary=256, width=width, layers=chance.choice((1, 1, 1, 2)), heads=width // 16,
        key_value_heads=width // 16, head_width=16, feed_forward=2 * width, context=64,
    )  # fmt: skip
    sync = Sync(
        method=method, learning_rate=chance.choice((2e-3, 8e-3)), warmup_rounds=chance.choice((1, 20)),
        afresh_rounds=chance.choice((1, 2, 2, 3, 4)),
        step_tokens=chance.choice((0, microbatch, 2 * microbatch - 1, 3 * microbatch)),
    )  # fmt: skip
    if method == "local-steps" and chance.random() < 0.3:
        other: dict[str, Any] = chance.choice(
            [{"sent": "four-bits"}, {"parts": 1}, {"inner": "adamw"}, {"rest": "feedback"}]
        )
        sync = replace(sync, **other)
    manifest = Manifest(
        "honest", PeerId("owner"), stages=(model.layers,), model=model,
        data=Data(sequence_tokens=tokens, microbatch_sequences=sequences),
        rounds=Rounds(target_tokens=peers * steps * microbatch), sync=sync,
    )  # fmt: skip
    return Play(seed, dtype, threads, peers, chance.choice((0.0, 0.05, 0.2)), manifest)


class HonestPeers(AuditedPeers):
    """Each window is looked into once."""

    def __init__(self, play: Play, corpus: Tensor) -> None:
        self._chance = Random(f"what happens in {play.seed}")
        self._of = play
        self._late: set[PeerId] = set()
        self.found = Found(play, Counter(), Counter())
        super().__init__(play.manifest, corpus, play.peers, 0, "", 1.0, play.seed, Computing(play.dtype))

    def counting(self, round: int, told: Mapping[PeerId, bytes]) -> dict[PeerId, bytes]:
        """See `AuditedPeers`: some are too late, but not all."""
        late = [peer for peer in told if self._chance.random() < self._of.late]
        self._late = set(late[: len(told) - 1])
        return {peer: payload for peer, payload in told.items() if peer not in self._late}

    def _look(self, auditor: Peer, round: int, here: Sequence[Peer]) -> None:
        if auditor is not here[0]:
            return
        for peer in here:
            evidence = peer.evidence(round)
            if evidence is not None:
                began = time.process_time()
                finding = self.auditor.judge(evidence)
                self.found.audit_seconds += time.process_time() - began
                self.found.verdicts[finding.verdict] += 1
                self.found.carrying += bool(evidence.carried)
                self.found.broken += len(evidence.window) < self._of.manifest.sync.afresh_rounds
                if finding.verdict != "agrees":
                    self.found.reasons[finding.reason] += 1
        for peer in here:
            if peer.me in self._late:
                peer.lose(round)


def honest(seed: int, corpus: Tensor) -> Found:
    """The play of that number."""
    play, began, threads = play_of(seed), time.process_time(), torch.get_num_threads()
    torch.set_num_threads(play.threads)
    try:
        group = HonestPeers(play, corpus)
        group.play(min(ROUNDS, WINDOWS * play.manifest.sync.afresh_rounds))
    finally:
        torch.set_num_threads(threads)
    group.found.rounds = group.auditor.rounds
    group.found.seconds = time.process_time() - began
    return group.found
