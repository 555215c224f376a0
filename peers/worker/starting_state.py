"""Choose the state that a worker starts from: the group's newest state, its own disk, or the run's initial
weights. Used again after a fork.

If the run starts from a model (`init_checkpoint`), only some machines have its folder. Other peers fetch
their stage's part from them, as a snapshot whose digest is in the manifest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from peers.compute.executor import Compute, computed
from peers.network.peer_links import PeerLinks
from peers.state.archivists import PATIENCE_SECONDS, ArchivistClients
from peers.state.checkpoint_writer import CheckpointWriter
from peers.state.snapshot_service import NOTHING, NoState, SnapshotService
from peers.state.snapshot_store import Weights
from peers.state.start_folder import start_state
from peers.telemetry import log_events
from peers.telemetry.log_events import Notify
from peers.worker.rounds.round_service import RoundService
from swarmnet.identifiers import PeerId
from swarmnet.rounds.events import FetchGroupState
from swarmnet.rounds.history import START
from swarmnet.rounds.own_contributions import NOTHING_PAST, RestartState

AGAIN_SECONDS = 1.0
"""Interval between attempts to fetch the state from the group."""
START_AGAIN_SECONDS = 5.0
"""Interval between messages that no peer has the run's initial weights."""
NO_START = "waits for a peer that has it. If it is on this machine, set init_checkpoint: PATH in peer.yaml"
AGREE_SECONDS = 10.0
"""How long a starting peer waits for peers that started earlier, if no peer is training. Each of them may
have started from something else, its disk or the seed, and waits for this one in turn (`Worker._in_step`)."""


def combine_requests(held: FetchGroupState | None, wish: FetchGroupState) -> FetchGroupState:
    """Combine two requests to resynchronise while the state is not there yet.

    The later one names better sources, since more peers are known by then. But an abandoned branch stays
    abandoned. If the requests name different forks, the fork point counts as inexact: the state may already
    be on its way from the peers of the first request."""
    if held is None:
        return wish
    fork_round = held.fork_round if wish.fork_round is None else wish.fork_round
    exact = held.exact and wish.exact and held.fork_round == wish.fork_round
    return replace(wish, fork_round=fork_round, exact=exact)


class StateRecovery:
    def __init__(
        self,
        *,
        disk: CheckpointWriter,
        states: SnapshotService,
        keepers: ArchivistClients,
        neighbourhood: PeerLinks,
        compute: Compute,
        log_event: log_events.LogEvent,
        notify: Notify,
        elsewhere: Callable[[], Awaitable[bool]],
        model: Path | None = None,
    ) -> None:
        """`elsewhere()` returns whether an absent peer has this run's weights
        (peers/network/discovery/height.py). `model` is the folder of the model that the run starts from."""
        self.model = model
        self.disk = disk
        self.states = states
        self.neighbourhood = neighbourhood
        self._pasts: dict[tuple[int, bytes], RestartState] = {}
        """What is known of earlier rounds, by round and chain value of this peer's checkpoints."""
        self._own: Weights | None = None
        """The newest of these checkpoints, until this peer has started."""
        self.keepers = keepers
        self.elsewhere = elsewhere
        self.compute = compute
        self.log_event = log_event
        self.notify = notify

    def group(self) -> list[PeerId]:
        """Return the linked peers of the own stage."""
        return self.neighbourhood.linked(self.neighbourhood.membership.stage)

    def is_trained(self) -> bool:
        """Return whether a linked peer of the own stage is in step."""
        known = self.neighbourhood.known()
        return any(known[peer].ready for peer in self.group())

    async def weights(
        self, update: RoundService | None, wish: Callable[[], FetchGroupState | None]
    ) -> Weights:
        """Return the newest weights that the group offers, else this peer's own.

        `wish()` returns why the state is fetched again, as known by then. After a fork only peers of the
        winning branch are asked, and own weights of the losing branch are not used."""
        own = self._first() if update is None else await computed(self.compute, update.settled_weights)
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
                await asyncio.sleep(AGAIN_SECONDS)  # To start without them would create a second branch.
                continue
            if alone and await self._waits_for_weights(own, update):
                continue
            if alone and own is not None:
                if own.settled_round < 0 and update is None:
                    source = "the run's model" if self.states.start else "the run's seed"
                    self.notify("weights", f"no other peer of this stage is there: starts from {source}")
                return own
            if alone:
                target = self.disk.lineage.target
                lacking = f"the owner ordered a return to round {target[0]}" if target else "the run starts"
                await self._wait_again(f"{lacking} from a model that no peer here has", own, group)
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
            if weights is None:  # The winning branch has its sets from the first weights on.
                self._forget_after(-1)
                first = self.disk.first_weights(self.states.snapshots)
                assert first is not None, "likewise"
                return first
            bytes_now = self.states.fetched_bytes - self.states.kept_bytes
            self.log_event(log_events.Fetched(round=weights.settled_round, bytes=bytes_now))
            if weights.settled_round < 0:  # Now it has what a seed would give, and tries again.
                self.states.snapshots.hold(weights)
                own = weights if own is None else own
                continue
            # On an abandoned branch even the weights after this round differ.
            self._forget_after(weights.settled_round - (forked or self._holds_another(weights)))
            self.states.snapshots.hold(weights)
            return replace(
                weights, past=self._pasts.get((weights.settled_round, weights.chain), NOTHING_PAST)
            )

    async def _wait_again(self, problem: str, own: Weights | None, group: Sequence[PeerId]) -> None:
        """Wait before the next attempt. A peer without weights also looks for archivists that joined
        meanwhile."""
        if own is not None or self._trains(group):
            self.notify("no_weights", f"{problem}; tries again in {AGAIN_SECONDS:g} s")
            await asyncio.sleep(AGAIN_SECONDS)
            return
        self.notify("no_weights", f"{problem}: {NO_START}")
        await asyncio.sleep(START_AGAIN_SECONDS)
        await self.keepers.reach()

    def _have(self, own: Weights | None, forked: bool) -> int:
        """Return the newest round whose weights this peer can continue from."""
        if forked:
            own = self.disk.first_weights(self.states.snapshots)
        return own.settled_round if own is not None else NOTHING

    async def _waits_for_weights(self, own: Weights | None, update: RoundService | None) -> bool:
        """Return whether this peer, which would start from the seed, has waited a moment instead."""
        begins = (own is None or own.settled_round < 0) and update is None and not self.disk.lineage.era
        if not begins or not await self.elsewhere():
            return False
        await asyncio.sleep(AGAIN_SECONDS)
        return True

    def _holds_another(self, weights: Weights) -> bool:
        """Return whether this peer's disk has other weights after the same round."""
        held = self.states.snapshots.held
        return any(
            snapshot.root.round == weights.settled_round and snapshot.root.chain != weights.chain
            for snapshot in held
        )

    def _forget_after(self, round: int) -> None:
        self.disk.forget_after(round)
        self.states.snapshots.forget_after(round)

    def _keepers(self, group: Sequence[PeerId]) -> list[PeerId]:
        """Return the archivists to ask as well; none if a peer of the group is in step."""
        return [] if self._trains(group) else self.keepers.linked()

    def _trains(self, group: Sequence[PeerId]) -> bool:
        # A peer of the group may have left while its state was fetched.
        known = self.neighbourhood.known()
        return any(peer in known and known[peer].ready for peer in group)

    def restore(self) -> None:
        """Read this peer's checkpoints and serve them from then on. Called before any request can arrive:
        when a whole group restarts, a disk that is not read yet counts as empty."""
        restored = self.disk.restored()
        self._pasts = {(weights.settled_round, weights.chain): weights.past for weights in restored}
        for weights in restored:
            self.states.snapshots.hold(weights)
        self._own = restored[0] if restored else None

    async def read_model(self) -> None:
        """Read the run's initial model if this machine has it, for this peer and others. Raises
        StartError."""
        if self.model is not None and self.states.start is not None:
            self.notify("weights", f"reads the model that the run starts from: {self.model}")
            await asyncio.to_thread(self._hold_model, self.model)

    def _hold_model(self, model: Path) -> None:
        units = start_state(model, self.disk.signed.manifest, self.disk.stage)
        self.states.snapshots.hold(Weights(units, -1, START, tokens=0))

    def _first(self) -> Weights | None:
        """Return the newest own checkpoint, else the run's initial weights if they are here."""
        own = self._own
        self._own = None
        return own if own is not None else self.disk.first_weights(self.states.snapshots)
