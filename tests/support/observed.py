"""Peers for an observer to look at, that do not run: records as they would announce, and their life."""

from __future__ import annotations

from random import Random

from protocols.messages.table import PeerRecord
from protocols.signed.records import SignedRecord
from swarmnet.identifiers import PeerId

NOON = 1_790_000_000.0
"""Some moment, seconds since 1970."""


def record(peer="peer-0", stage=0, at=NOON, **fields):
    """A verified record of a worker that trains; `at`: when it was signed."""
    usual = {"state": "training", "name": peer, "loss": 3.0, "round": 100, "settled": 95, "tokens": 1000}
    content = PeerRecord(
        peer, stage, fields.pop("role", "worker"), ["/ip4/127.0.0.1/tcp/1"],
        fields.pop("round", usual.pop("round")), fields.pop("tokens_per_second", 500.0),
        fields.pop("version", "0.1.0"), **{**usual, **fields},
    )  # fmt: skip
    return SignedRecord(content, PeerId(peer), int(at * 1e6))


class Crowd:
    """Many peers with a life: they compute, save, die, leave, come back and lie, from a seed."""

    def __init__(self, sightings, peers, seed=0, now=NOON):
        self.sightings, self.chance, self.now = sightings, Random(seed), now
        self.names = [f"12D3KooW{self.chance.getrandbits(200):050x}"[:52] for _ in range(peers)]
        self.tokens = {name: self.chance.randrange(10_000) for name in self.names}
        self.round, self.dead = 1000, set()
        for number, name in enumerate(self.names):
            self._announce(number, name)

    def _announce(self, number, name):
        chance = self.chance
        self.tokens[name] += chance.randrange(300)
        self.sightings.recorded(
            record(
                name, number % self.sightings.stages, self.now - chance.random(), name=f"machine {number}",
                round=self.round - chance.randrange(3), settled=self.round - 5, tokens=self.tokens[name],
                tokens_per_second=500 + 3000 * chance.random(),
                loss=2.5 + 200 / self.round + 0.1 * chance.random(),
                state="joining" if chance.random() < 0.05 else "training",
                version=chance.choice(["0.1.0", "0.1.0", "0.1.1"]),
                checkpoint_round=self.round - 50, checkpoint_seconds=self.now - 400,
                sent_bytes=self.tokens[name] * 4000, received_bytes=self.tokens[name] * 4000,
            ),
            self.now,
        )  # fmt: skip

    def live(self, seconds):
        """So long a time: a fifteenth announces itself each 2 s, all are asked, a few die or come back."""
        self.now += seconds
        self.round += 1
        for number, name in enumerate(self.names):
            draw = self.chance.random()
            if name in self.dead:
                if draw < 0.02:
                    self.dead.discard(name)
                continue
            if draw < seconds / 30:
                self._announce(number, name)
            elif draw > 0.998:
                self.dead.add(name)
        for peer in self.sightings.due(self.now, 10**6):
            if peer in self.dead:
                self.sightings.missed(peer, "not_reached", self.now)
            else:
                self.sightings.answered(peer, self.now)
        self.sightings.look(self.now)
