"""Where a worker starts from: the group's newest state, its own disk, or what the run starts from. Again
after a fork.

Where a run starts from a model (`start`), whose folder is on some machines only, a peer that does not have it
fetches its stage's part from those that do, as a snapshot whose digest the manifest says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from peers.compute.executor import UPDATE, Compute
from peers.network.discovery.announcer import RecordAnnouncer
from peers.network.peer_links import PeerLinks
from peers.state.archivists import PATIENCE_SECONDS, ArchivistClients
from peers.state.checkpoint_writer import CheckpointWriter
from peers.state.snapshot_service import NOTHING, NoState, SnapshotService
from peers.state.snapshot_store import Weights
from peers.state.start_folder import start_state
from peers.telemetry import events as noted
from peers.telemetry.events import Notify
from peers.worker.rounds.round_service import RoundService
from swarmnet.identifiers import PeerId
from swarmnet.rounds.events import Resync
from swarmnet.rounds.history import START
from swarmnet.rounds.own_contributions import NOTHING_PAST, Past

AGAIN_SECONDS = 1.0
"""Between two attempts to get the state from the group."""
START_AGAIN_SECONDS = 5.0
"""Between two lines that say that what the run starts from is nowhere."""
NO_START = "waits for one who has it; or say in the peer file where its folder is: start: PATH"
AGREE_SECONDS = 10.0
"""So long a peer that starts waits for those who have begun before it, if nobody takes part. Each of them may
have begun from something else, its disk or the seed, and waits in turn for this one (`Worker._in_step`)."""


def newest_wish(held: Resync | None, wish: Resync) -> Resync:
    """What to go by while the state is not there yet. More peers are in sight by then than at first, so a
    later wish names whom to ask; but a history that was given up stays given up, now to an unknown one."""
    if held is None or held.fork_round is None or wish.fork_round is not None:
        return wish
    return replace(wish, fork_round=held.fork_round, exact=False)


class StateRecovery:
    def __init__(
        self,
        disk: CheckpointWriter,
        states: SnapshotService,
        presence: RecordAnnouncer,
        neighbourhood: PeerLinks,
        compute: Compute,
        log_event: noted.LogEvent,
        notify: Notify,
        elsewhere: Callable[[], Awaitable[bool]],
        model: Path | None = None,
    ) -> None:
        """`elsewhere`: whether somebody who is not here has this run's weights
        (peers/network/discovery/height.py). `model`: the folder of the model that the run starts from."""
        self.model = model
        self.disk = disk
        self.states = states
        self.neighbourhood = neighbourhood
        self._pasts: dict[tuple[int, bytes], Past] = {}
        """By round and chain value, of the histories that the own checkpoints are of."""
        self._own: Weights | None = None
        """The newest of them, until this peer has begun."""
        self.keepers = ArchivistClients(presence, neighbourhood, neighbourhood.membership.stage)
        states.vouched = self.keepers.vouched
        states.kept = disk.chunks
        self.elsewhere = elsewhere
        self.compute = compute
        self.log_event = log_event
        self.notify = notify

    def group(self) -> list[PeerId]:
        """Linked peers of the own stage."""
        membership = self.neighbourhood.membership
        return [
            peer
            for peer, known in membership.peers.items()
            if known.stage == membership.stage and known.linked
        ]

    def is_trained(self) -> bool:
        """Whether one of them takes part."""
        known = self.neighbourhood.known()
        return any(known[peer].ready for peer in self.group())

    async def weights(self, update: RoundService | None, wish: Callable[[], Resync | None]) -> Weights:
        """The newest that the group offers, else what this peer has itself. `wish`: why the state is
        fetched anew, as it is known by then; after a fork only from those of the history that stands, and not
        on top of the own one."""
        own = self._first() if update is None else await self._settled(update)
        clock = self.neighbourhood.clock
        until, agreed_until = clock.time() + PATIENCE_SECONDS, clock.time() + AGREE_SECONDS
        while True:
            given_up = wish()
            forked = given_up is not None and given_up.fork_round is not None
            wanted = self.group() if given_up is None else given_up.peers
            group = [peer for peer in self.group() if peer in wanted]
            patient = clock.time() < until or own is None
            keepers = self._keepers(group) if update is None and patient else []
            alone = not group and not keepers
            others = update is None and self.neighbourhood.membership.others_may_be_there()
            if alone and others and clock.time() < until:
                await asyncio.sleep(AGAIN_SECONDS)  # To begin without them would be a second history.
                continue
            if alone and await self._waits_for_weights(own, update):
                continue
            if alone and own is not None:
                if own.settled_round < 0 and update is None:
                    source = "the run's model" if self.states.start else "the run's seed"
                    self.notify("weights", f"no other peer of this stage is there: starts from {source}")
                return own
            if alone:
                await self._wait_again("the run starts from a model that nobody here has", own, group)
                continue
            apart = update is None and clock.time() >= agreed_until and not self._trains(group)
            try:
                weights = await self.states.fetch([*group, *keepers], self._have(own, forked), apart=apart)
            except NoState as error:
                await self._wait_again(str(error), own, group)
                continue
            if weights is None and not forked:
                if not self._trains(group) and await self._waits_for_weights(own, update):
                    continue
                assert own is not None, "without weights some are fetched"
                return own
            if weights is None:  # From the first weights on, the sets of the history that stands are there.
                self._forget_after(-1)
                first = self.disk.first_weights(self.states.snapshots)
                assert first is not None, "likewise"
                return first
            bytes_now = self.states.fetched_bytes - self.states.kept_bytes
            self.log_event(noted.Fetched(round=weights.settled_round, bytes=bytes_now))
            if weights.settled_round < 0:  # Now it has what a seed would make at once, and looks again.
                self.states.snapshots.hold(weights)
                own = weights if own is None else own
                continue
            # Of a history that was given up the weights after this very round are others, too.
            self._forget_after(weights.settled_round - (forked or self._holds_another(weights)))
            self.states.snapshots.hold(weights)
            return replace(
                weights, past=self._pasts.get((weights.settled_round, weights.chain), NOTHING_PAST)
            )

    async def _wait_again(self, problem: str, own: Weights | None, group: Sequence[PeerId]) -> None:
        """Wait before asking again; who has nothing looks for archivists that have come meanwhile."""
        if own is not None or self._trains(group):
            self.notify("no_weights", f"{problem}; asks again in {AGAIN_SECONDS:g} s")
            await asyncio.sleep(AGAIN_SECONDS)
            return
        self.notify("no_weights", f"{problem}: {NO_START}")
        await asyncio.sleep(START_AGAIN_SECONDS)
        await self.keepers.reach()

    def _have(self, own: Weights | None, forked: bool) -> int:
        """The newest round whose weights this peer can go on from."""
        if forked:
            own = self.disk.first_weights(self.states.snapshots)
        return own.settled_round if own is not None else NOTHING

    async def _waits_for_weights(self, own: Weights | None, update: RoundService | None) -> bool:
        """Whether this peer, which would begin from the seed, has waited a moment instead."""
        begins = (own is None or own.settled_round < 0) and update is None
        if not begins or not await self.elsewhere():
            return False
        await asyncio.sleep(AGAIN_SECONDS)
        return True

    def _holds_another(self, weights: Weights) -> bool:
        """Whether the own disk had other weights after the same round."""
        held = self.states.snapshots.held
        return any(
            snapshot.root.round == weights.settled_round and snapshot.root.chain != weights.chain
            for snapshot in held
        )

    def _forget_after(self, round: int) -> None:
        self.disk.forget_after(round)
        self.states.snapshots.forget_after(round)

    def _keepers(self, group: Sequence[PeerId]) -> list[PeerId]:
        """Archivists to ask besides: none where somebody takes part."""
        return [] if self._trains(group) else self.keepers.linked()

    def _trains(self, group: Sequence[PeerId]) -> bool:
        known = self.neighbourhood.known()
        return any(known[peer].ready for peer in group)

    def restore(self) -> None:
        """Read the own checkpoints, which are served to others from then on. Before anybody can ask: where a
        whole group starts again, a disk that is not read yet counts as an empty one."""
        restored = self.disk.restored()
        self._pasts = {(weights.settled_round, weights.chain): weights.past for weights in restored}
        for weights in restored:
            self.states.snapshots.hold(weights)
        self._own = restored[0] if restored else None

    async def read_model(self) -> None:
        """Read what the run starts from, if this machine has it, for itself and others. Raises StartError."""
        if self.model is not None and self.states.start is not None:
            self.notify("weights", f"reads the model that the run starts from: {self.model}")
            await asyncio.to_thread(self._hold_model, self.model)

    def _hold_model(self, model: Path) -> None:
        units = start_state(model, self.disk.signed.manifest, self.disk.stage)
        self.states.snapshots.hold(Weights(units, -1, START, tokens=0))

    def _first(self) -> Weights | None:
        """The newest of the own checkpoints, else what the run starts from, if it is here."""
        own, self._own = self._own, None
        return own if own is not None else self.disk.first_weights(self.states.snapshots)

    async def _settled(self, update: RoundService) -> Weights:
        taken: asyncio.Future[Weights] = asyncio.get_running_loop().create_future()

        def deliver(weights: Weights, _seconds: float) -> None:
            if not taken.done():
                taken.set_result(weights)

        self.compute.submit(UPDATE, update.settled_weights, deliver)
        return await taken
