"""Convert the rounds' events and effects to wire messages and back."""

from __future__ import annotations

from protocols.messages.table import Announce, OpenRound, Progress
from protocols.messages.table import ContributionRef as WireReference
from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.events import OpenSet, ProgressArrived, Reference, SendProgress

REFERENCES_PER_MESSAGE = 256
"""A reference takes about 90 bytes; a message header holds 64 KiB."""


def read_progress(peer: PeerId, message: Progress) -> ProgressArrived:
    sets = tuple(OpenSet(s.round, s.gathered, s.sealed, s.count, s.digest) for s in message.sets)
    return ProgressArrived(
        peer,
        message.round,
        max(0, message.tokens),
        frozenset(message.contributed),
        message.settled,
        message.in_step,
        message.anchor_round,
        message.anchor,
        sets,
    )


def write_progress(effect: SendProgress) -> Progress:
    sets = [
        OpenRound(entry.round, entry.gathered, entry.sealed, entry.count, entry.digest)
        for entry in effect.sets
    ]
    return Progress(
        effect.round,
        effect.tokens,
        list(effect.contributed),
        effect.settled,
        effect.in_step,
        effect.anchor_round,
        effect.anchor,
        sets,
    )


def read_reference(reference: WireReference) -> Reference:
    return Reference(reference.round, PeerId(reference.peer), ContributionId(reference.id), reference.size)


def write_announces(references: tuple[Reference, ...], complete: tuple[int, ...]) -> list[Announce]:
    """Return announcements that each fit in a header. A `complete` round is never split."""
    messages: list[Announce] = []
    by_round: dict[int, list[WireReference]] = {number: [] for number in complete}
    for reference in references:
        wire = WireReference(reference.round, reference.peer, reference.id, reference.size)
        by_round.setdefault(reference.round, []).append(wire)
    batch: list[WireReference] = []
    whole: list[int] = []
    for number, of_round in by_round.items():
        if batch and len(batch) + len(of_round) > REFERENCES_PER_MESSAGE:
            messages.append(Announce(batch, whole))
            batch, whole = [], []
        batch = batch + of_round
        whole = whole + ([number] if number in complete else [])
    messages.append(Announce(batch, whole))
    return messages
