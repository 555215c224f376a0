"""Returns of a run to earlier snapshots, as its owner orders them, and the weights that are valid afterwards.

An order names one snapshot of each stage, by round and digest. Its peers give up all that they settled later,
and count on from that round. They begin an *era*: all chain values after it end with the era's name. Chain
values are in reports, signed digests, snapshots and checkpoints, so each of these shows its era. A peer uses
only what belongs to the era of the newest order that it knows. No vote and no length of a branch can bring a
given-up history back.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from swarmnet.identifiers import RunId

DIGEST_BYTES = 12
"""Length of the digests of sets and of chain values. With 8 bytes, a peer that makes contributions at will
finds two sets with one digest after 2^32 tries, within a round. The 2^48 tries for 12 bytes are hours of a
GPU. With 16 bytes, `KEPT_LINKS` rounds (rounds/history.py) would not fit into one message."""
ERA_BYTES = 8
"""Length of an era's name. Only the owner can begin an era, and gains nothing by two with one name."""


def era_of(chain: bytes) -> bytes:
    """Return the name of the era of a chain value; empty before the first return to a snapshot."""
    return chain[DIGEST_BYTES:]


@dataclass(frozen=True, slots=True)
class Lineage:
    """Decides which weights of one stage belong to the run's present history."""

    era: bytes = b""
    """The name of the era; empty before the first return."""
    target: tuple[int, bytes] | None = None
    """The snapshot with which the era begins; None: the run's start."""

    def admits(self, root: tuple[int, bytes], chain: bytes) -> bool:
        """Return whether weights with this chain value may be used: they are of the era, or its target."""
        return era_of(chain) == self.era or root == self.target

    def gives_up(self, root: tuple[int, bytes], chain: bytes) -> bool:
        """Return whether these weights are of an earlier era and newer than the target."""
        return self.target is not None and not self.admits(root, chain) and root[0] > self.target[0]

    def continue_chain(self, root: tuple[int, bytes], chain: bytes) -> bytes:
        """Return the chain value with which a peer continues from admitted weights. At the target it depends
        on the weights and the era alone, so that all peers agree on it."""
        if era_of(chain) == self.era:
            return chain
        return hashlib.sha256(self.era + root[1]).digest()[:DIGEST_BYTES] + self.era

    def contribution_run(self, run_id: RunId) -> RunId:
        """Return the run id that contributions of this era are signed with. Rounds have the same numbers in
        every era, so a contribution of an earlier one could otherwise be sent again."""
        if not self.era:
            return run_id
        return RunId(hashlib.sha256(bytes.fromhex(run_id) + self.era).hexdigest())


NO_RETURN = Lineage()
"""The owner has ordered no return."""


@dataclass(frozen=True, slots=True)
class Return:
    """An order by which all stages return to snapshots that belong together."""

    number: int
    """1 for the first return of the run, and one more for each later one."""
    points: tuple[tuple[int, str], ...]
    """For each stage the round of its snapshot, and the digest of the settled weights, in hexadecimal."""

    def lineage(self, stage: int) -> Lineage:
        """Return which weights of a stage are valid after this return."""
        content = b"".join(round.to_bytes(8, "big") + bytes.fromhex(digest) for round, digest in self.points)
        era = hashlib.sha256(b"swarmnet return 1\0" + self.number.to_bytes(8, "big") + content).digest()
        round, digest = self.points[stage]
        return Lineage(era[:ERA_BYTES], (round, bytes.fromhex(digest)))

    def describe(self) -> str:
        """Return the points in words."""
        return ", ".join(f"stage {stage} to round {round}" for stage, (round, _) in enumerate(self.points))
