"""What neighbours want of us is queued in small portions, once, and not after it has settled."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from peers.lab.world.virtual_time import run
from peers.worker.rounds.upload_scheduler import LOOK_SECONDS, QUEUE_BYTES, UploadQueue
from swarmnet.identifiers import ContributionId, PeerId

A, B = PeerId("a"), PeerId("b")
SIZE = 100_000


def ids(*numbers: int) -> list[ContributionId]:
    return [ContributionId(number.to_bytes(16, "big")) for number in numbers]


@dataclass
class Lines:
    """Two links that carry nothing until told."""

    queued: dict[PeerId, int] = field(default_factory=lambda: {A: 0, B: 0})
    sent: list[tuple[PeerId, int]] = field(default_factory=list)
    settled: set[ContributionId] = field(default_factory=set)

    def send(self, peer: PeerId, identity: ContributionId) -> None:
        if identity not in self.settled:
            self.queued[peer] += SIZE
            self.sent.append((peer, int.from_bytes(identity, "big")))


def play(story):

    async def whole():
        lines = Lines()
        giving = UploadQueue(lines.send, lines.queued.__getitem__, asyncio.get_running_loop())
        await story(lines, giving, lambda: asyncio.sleep(2 * LOOK_SECONDS))
        giving.close()

    run(whole())


def test_no_more_is_queued_than_a_line_needs_and_the_rest_follows_as_it_is_carried():
    async def story(lines, giving, a_while):
        giving.wanted(A, ids(*range(10)))
        assert QUEUE_BYTES <= lines.queued[A] < QUEUE_BYTES + SIZE
        giving.wanted(B, ids(5))
        assert lines.sent[-1] == (B, 5), "one slow neighbour does not hold up another"
        while len(giving):
            lines.queued[A] -= SIZE
            await a_while()
            assert lines.queued[A] < QUEUE_BYTES + SIZE
        assert [number for peer, number in lines.sent if peer == A] == list(range(10))

    play(story)


def test_what_is_asked_for_again_while_it_waits_is_sent_once():
    async def story(lines, giving, a_while):
        giving.wanted(A, ids(*range(5)))
        giving.wanted(A, ids(4, 3))
        lines.queued[A] = 0
        await a_while()
        assert [number for _, number in lines.sent] == list(range(5))

    play(story)


def test_what_has_settled_meanwhile_is_not_sent():
    async def story(lines, giving, a_while):
        giving.wanted(A, ids(*range(5)))
        lines.settled.update(ids(3))
        lines.queued[A] = 0
        await a_while()
        assert [number for _, number in lines.sent] == [0, 1, 2, 4]

    play(story)


def test_nothing_waits_for_a_neighbour_that_has_left():
    async def story(lines, giving, a_while):
        giving.wanted(A, ids(*range(9)))
        giving.left(A)
        lines.queued[A] = 0
        await a_while()
        assert len(lines.sent) == 3
        assert len(giving) == 0

    play(story)
