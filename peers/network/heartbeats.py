"""Send this peer's heartbeats once a second, and evaluate those of its neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from peers.network.channels import LinkPool
from peers.network.ports import Listener
from peers.network.rtt_tracker import RttTracker
from peers.runtime.timer import Timer
from peers.telemetry.counters import Timings
from protocols.messages.table import Heartbeat
from swarmnet.identifiers import PeerId
from swarmnet.membership.membership import BEAT_SECONDS, Membership


class Heartbeats:
    """The heartbeats between a peer and its neighbours."""

    def __init__(
        self, *, membership: Membership, links: LinkPool, listener: Listener, sent: Callable[[], None]
    ) -> None:
        """`sent()` is called each time that the heartbeats of a second were sent."""
        self.timings = Timings()
        self.echoes = RttTracker(self.timings)
        self._membership = membership
        self._links = links
        self._listener = listener
        self._sent = sent
        self._loop = asyncio.get_running_loop()
        # On the plain clock: other peers do not know that this process was stopped.
        self._timer = Timer(self._tick)

    def start(self) -> None:
        self._timer.arm(self._loop.time())

    def close(self) -> None:
        self._timer.close()

    @property
    def next(self) -> int:
        return self.echoes.sequence + 1

    def _tick(self) -> None:
        now = self._loop.time()
        self._timer.arm(now + BEAT_SECONDS)
        self.echoes.beat(now)
        self.send_all()
        self._sent()

    def send_all(self) -> None:
        """Send all neighbours a heartbeat now."""
        for peer in self._links.peers():
            self.send(peer)

    def send(self, peer: PeerId) -> None:
        """Send one neighbour a heartbeat. It has this peer's load, echoes the neighbour's last heartbeat, and
        says whether this peer wants the link."""
        load = self._listener.load()
        echo, echo_delay = self.echoes.of(peer, self._loop.time())
        self._links.post(
            peer,
            "group",
            Heartbeat(
                self.echoes.sequence,
                echo,
                echo_delay,
                load.stage,
                load.ready,
                load.slots,
                load.service_seconds,
                load.round,
                peer in self._membership.wanted(),
                load.moving_to,
            ),
        )

    def received(self, peer: PeerId, beat: Heartbeat, now: float) -> None:
        """Measure the round trip of a neighbour's heartbeat, and pass on the neighbour's load. `now` is this
        peer's time."""
        self.echoes.on_echo(peer, beat.sequence, beat.echo, beat.echo_delay, self._loop.time())
        self._membership.beat(
            peer, beat.stage, beat.ready, beat.round, beat.service_seconds, now, beat.moving_to, beat.echo
        )
        self._membership.keeps_us(peer, beat.wanted)
        self._listener.beat(peer)
