"""Objections of third persons to documents of a run's text, grouped by document for the run's owner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protocols.signed.opinions import SignedOpinion
from swarmnet.run.owner_orders import OwnerOrders

MAX_REASONS = 5
"""Maximum number of reasons kept for a document, the newest."""


@dataclass(frozen=True, slots=True)
class DisputedDocument:
    """A document to which somebody objects."""

    document: str
    """Its SHA-256, or the place at which the objection says that it is found."""
    keys: int
    """Number of keys that object. A person can make any number of keys."""
    withdrawn: bool
    """Whether the owner has withdrawn it."""
    reasons: tuple[str, ...]


def disputed_documents(opinions: Iterable[SignedOpinion], order: OwnerOrders) -> list[DisputedDocument]:
    """Return the documents that are objected to. Those that are still in the text come first, and of these
    the ones with most keys. `opinions`: objections in force, the newest first."""
    by_document: dict[str, list[SignedOpinion]] = {}
    for opinion in opinions:
        by_document.setdefault(opinion.document, []).append(opinion)
    withdrawn = {withdrawal.document for withdrawal in order.withdrawn}
    documents = [
        DisputedDocument(
            document=document,
            keys=len({opinion.author for opinion in found}),
            withdrawn=document in withdrawn,
            reasons=tuple(opinion.text or "no reason given" for opinion in found[:MAX_REASONS]),
        )
        for document, found in by_document.items()
    ]
    return sorted(documents, key=lambda one: (one.withdrawn, -one.keys, one.document))
