"""Planning chains for a live swarm: every peer is asked for its hops, and what they tell is annealed.

Asks as any visitor may, with an identity that is thrown away. What peers tell are claims: whoever lies about
its hops gets chains that are slower than planned, or none, and nobody else is harmed by more than that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from peers.errors import NoAnswer
from peers.reaching import Reached
from protocols.envelope import run_bytes
from protocols.errors import WireError
from protocols.identity import Identity
from protocols.invites import seal_invite
from protocols.messages import AskHops, Hello, Hops, Lane, Message
from protocols.records import SignedRecord, open_record
from protocols.terms import Terms
from protocols.transport import Link
from swarmnet.chains import Chain, Places, Told, places_of
from swarmnet.identifiers import PeerId
from swarmnet.manifest import WIRE_VERSION

LOOK_SECONDS = 15.0
DIAL_SECONDS = 8.0
ANSWER_SECONDS = 15.0
"""For all answers, and the links that peers open for them."""
INVITE_SECONDS = 600.0


class HopAsker:
    """`Receiver` of the visitor's transport."""

    def __init__(self, found: Reached, owner: Identity) -> None:
        self._found = found
        now = found.directory.now()
        run_id, me = found.signed.run_id, found.transport.peer
        by_invite = found.signed.manifest.access == "invite"
        invite = seal_invite(owner, run_id, me, now + INVITE_SECONDS, now) if by_invite else b""
        self._hello = Hello(WIRE_VERSION, run_bytes(run_id), b"", invite)
        self._stage: dict[PeerId, int] = {}
        """Of those that were asked."""
        self.told: dict[PeerId, Told] = {}
        self._links: list[Link] = []
        self._news = asyncio.Event()

    async def ask(self) -> Mapping[PeerId, Told]:
        """What all peers of all stages tell; those that do not answer in time are left out. NoAnswer if none
        does."""
        self._found.transport.listen(self, Terms({}, lambda peer: peer in self._stage))
        records = await asyncio.gather(*(self._records(stage) for stage in range(self._stages)))
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await asyncio.gather(*(self._dial(signed) for group in records for signed in group))
                while not self.told.keys() >= self._stage.keys():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass  # Who has not answered by now has no part in the plan.
        finally:
            for link in self._links:
                link.close()
        if not self.told:
            raise NoAnswer(f"no peer told its hops within {ANSWER_SECONDS:g} s: are any of them training?")
        return self.told

    @property
    def _stages(self) -> int:
        return len(self._found.signed.manifest.stages)

    async def _records(self, stage: int) -> list[SignedRecord]:
        """Those that hold it and stay, by what they said last."""
        run = self._found.signed.run_id
        try:
            found = await self._found.directory.look_up(run, stage, LOOK_SECONDS)
            signed = [open_record(data, run) for data in found.values()]
        except WireError:
            return []
        return [one for one in signed if one.record.state not in ("leaving", "paused")]

    async def _dial(self, signed: SignedRecord) -> None:
        peer = signed.peer
        try:
            link = await self._found.transport.open(peer, "data", DIAL_SECONDS, signed.record.addresses)
            link.post(self._hello)
            link.post(AskHops())
        except WireError:
            return
        self._links.append(link)
        self._stage[peer] = signed.record.stage

    # -- Receiver -------------------------------------------------------------------------------------

    def received(self, peer: PeerId, lane: Lane, message: Message, body: bytes, wire_bytes: int) -> None:
        stage = self._stage.get(peer)
        if stage is None or not isinstance(message, Hops):
            return
        if message.compute_seconds > 0:
            self.told[peer] = told_by(stage, message)
        else:
            del self._stage[peer]  # It has not begun to train.
        self._news.set()

    def lost(self, peer: PeerId, lane: Lane, reason: str) -> None:
        pass  # Its answer comes over a link of its own.

    def refused(self, peer: PeerId, code: str, reason: str) -> None:
        self._stage.pop(peer, None)
        self._news.set()


def told_by(stage: int, hops: Hops) -> Told:
    """The answer of a peer of that stage."""
    return Told(stage, hops.compute_seconds, {PeerId(hop.peer): hop.seconds for hop in hops.hops})


async def places(found: Reached, owner: Identity) -> Places:
    """The swarm as its peers tell it now. Raises NoAnswer."""
    told = await HopAsker(found, owner).ask()
    return places_of(found.signed.manifest.path_rules(), told)


def lines(seen: Places, chains: tuple[Chain, ...]) -> list[str]:
    """A plan, for people: origin first."""
    named = sorted(((seen.round_trip(chain), chain) for chain in chains), reverse=True)
    return [
        f"chain  {seconds:7.2f} s  " + "  ".join(f"{seen.stage[peer]}:{peer[-8:]}" for peer in chain)
        for seconds, chain in named
    ]
