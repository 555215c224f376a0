"""The registry: listed runs, each with the manifest that proves it, its state, and who endorses it.

An entry in the directory only names a run. The rest comes from documents that their authors signed. The
owner's manifest says what the run is, and the owner's newest order that it is proposed, paused or over.
Curators sign endorsements. Counts of peers and tokens are claims of the peers that are there now."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from random import Random
from typing import Literal

from peers.config.run_file import RunFileError, SignedManifest, from_wire
from peers.tools.owner.run_facts import RunFacts, from_directory
from protocols.errors import WireError
from protocols.ports import Directory
from protocols.signed.opinions import SignedOpinion
from swarmnet.identifiers import PeerId, RunId

LOOK_SECONDS = 15.0
AT_ONCE = 16
RunState = Literal["proposed", "training", "paused", "idle", "ended"]


@dataclass(frozen=True, slots=True)
class RegisteredRun:
    """A listed run, as the directory shows it now."""

    facts: RunFacts
    endorsements: tuple[SignedOpinion, ...]
    """Those of trusted curators, the newest first."""

    @property
    def signed(self) -> SignedManifest:
        return self.facts.signed

    @property
    def state(self) -> RunState:
        """What the owner's signed orders say, and otherwise whether peers are there. `ended`: the ordered end
        is reached, or the peers have gone. `proposed`: paused before its first round settled. `training`:
        every stage has a peer with weights. `idle`: some stage has none."""
        facts = self.facts
        order, is_complete = facts.order, all(facts.active_peers)
        if order.ends is not None and (facts.known_round >= order.ends or not any(facts.active_peers)):
            return "ended"
        if order.paused:
            return "paused" if facts.known_round >= 0 else "proposed"
        return "training" if is_complete else "idle"


async def runs(
    directory: Directory, limit: int, chance: Random, trusted: Collection[PeerId] = (), endorsed: bool = False
) -> tuple[list[RegisteredRun], int]:
    """Return at most `limit` listed runs whose manifests are found, by name, and the number of entries. From
    more entries a random part is taken, since entries cost their authors nothing. With `endorsed`, that part
    is taken of the runs that a `trusted` curator endorses. Raises WireError if the directory does not
    answer."""
    entries = await directory.listings(LOOK_SECONDS)
    turns = asyncio.Semaphore(AT_ONCE)

    async def endorsements(run_id: RunId) -> tuple[SignedOpinion, ...]:
        """Return a run's endorsements by trusted curators."""
        if not trusted:
            return ()
        async with turns:
            opinions = await directory.opinions(run_id, "endorsement", LOOK_SECONDS)
        return tuple(opinion for opinion in opinions if opinion.author in trusted)

    async def registered(run_id: RunId, by: tuple[SignedOpinion, ...]) -> RegisteredRun | None:
        """Return what is known of a run; None if it is not listed or not found."""
        async with turns:
            signed = await manifest(directory, run_id)
            if signed is None or not signed.manifest.listed:
                return None
            try:
                return RegisteredRun(await from_directory(signed, directory), by)
            except WireError:
                return None

    if endorsed:
        found = await asyncio.gather(*map(endorsements, entries))
        pairs = [(run_id, by) for run_id, by in zip(entries, found, strict=True) if by]
        pairs = pairs if len(pairs) <= limit else chance.sample(pairs, limit)
    else:
        chosen = entries if len(entries) <= limit else chance.sample(entries, limit)
        found = await asyncio.gather(*map(endorsements, chosen))
        pairs = list(zip(chosen, found, strict=True))
    listed = [run for run in await asyncio.gather(*(registered(*pair) for pair in pairs)) if run is not None]
    return sorted(listed, key=lambda run: (run.signed.manifest.name, run.signed.run_id)), len(entries)


async def manifest(directory: Directory, run_id: RunId) -> SignedManifest | None:
    """Return the manifest of a run; None if no peer has it or it is invalid."""
    try:
        data = await directory.get_manifest(run_id, LOOK_SECONDS)
        return from_wire(data, run_id) if data is not None else None
    except (WireError, RunFileError):
        return None
