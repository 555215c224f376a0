"""Whose contributions count where work is audited: a newcomer's entry fee is work, and a lie ends it all.

A fold over what is settled, so that all come to the same: who contributed, and the findings that peers signed
beside their own contributions.
"""

from __future__ import annotations

from collections import defaultdict

from swarmnet.identifiers import PeerId


class Standings:
    """Of one group."""

    def __init__(self, fee: int) -> None:
        """`fee`: rounds of a newcomer that others find to agree before anything of it counts."""
        self._fee = fee
        self._founders: set[PeerId] = set()
        self._agreed: defaultdict[PeerId, dict[int, set[PeerId]]] = defaultdict(dict)
        """Of a peer's rounds, who has found them to agree."""
        self.convicted: dict[PeerId, int] = {}
        """Of a lie in that round: from then on nothing of them counts, nor what they say of others."""

    def founded(self, peers: frozenset[PeerId]) -> None:
        """These contributed when there was nobody yet to audit anybody."""
        self._founders |= peers

    def counts(self, peer: PeerId) -> bool:
        """Whether what it contributes is in sets from now on."""
        return peer not in self.convicted and (peer in self._founders or self.paid(peer) >= self._fee)

    def paid(self, peer: PeerId) -> int:
        """Rounds of it that somebody who did not lie has found to agree."""
        return sum(bool(auditors - self.convicted.keys()) for auditors in self._agreed[peer].values())

    def agreed(self, auditor: PeerId, peer: PeerId, rounds: range) -> None:
        """An auditor signed that these rounds of a peer follow from its commitments. Of one that does not
        count it is worth nothing."""
        if auditor == peer or not self.counts(auditor):
            return
        for round in rounds:
            self._agreed[peer].setdefault(round, set()).add(auditor)

    def lied(self, peer: PeerId, round: int) -> frozenset[PeerId]:
        """With a proof that was checked. It convicts also whoever signed that this round agrees: those, and
        the liar."""
        accomplices = self._agreed[peer].get(round, set())
        guilty = frozenset({peer, *accomplices})
        for each in guilty:
            self.convicted[each] = min(round, self.convicted.get(each, round))
        return guilty
