"""An archivist that the run's owner does not let take part ends, as a worker does; a refusal has its code.

The real command is in tests/peers/cli/test_bad_input.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from archived import MANIFEST, SLOW, archived, trained
from clocks import on_virtual_clock
from swarm import OWNER, Swarm

from peers.config.errors import UserError
from peers.config.run_file import published_text
from peers.network.orders.gatekeeper import INVITE_GRACE_SECONDS
from peers.process.role import Network
from peers.stageless.archivist.archivist import Policy
from peers.stageless.archivist.role import ArchivistRole
from peers.telemetry.metrics import PeerMetrics
from protocols.errors import Unreachable
from protocols.messages.table import Refuse
from protocols.signed.identity import Identity
from protocols.signed.invites import seal_invite
from protocols.signed.orders import SignedOrder, seal_order
from swarmnet.membership.own_start import OwnStart
from swarmnet.run import owner_orders
from swarmnet.run.owner_orders import NO_ORDER

ARCHIVIST = Identity.from_seed(b"archivist")
BY_INVITE = replace(MANIFEST, access="invite", contact="owner@example.org")
BANNED = r"the run's owner has banned this peer: fills disks\. Ask the owner: owner@example\.org"
NOT_INVITED = r"the run takes peers by invite only; {}.*Ask the owner .*owner@example\.org"


def invite(swarm: Swarm, expires_seconds: float = 1e6) -> bytes:
    return seal_invite(OWNER, swarm.signed.run_id, None, expires_seconds, 0.0)


def ban(swarm: Swarm) -> SignedOrder:
    order = replace(owner_orders.ban(NO_ORDER, ARCHIVIST.peer_id, "fills disks"), sequence=1)
    return seal_order(OWNER, swarm.signed.run_id, order)


class Running:
    """The role in a swarm in memory."""

    def __init__(self, swarm: Swarm, folder: Path, invite: bytes = b"") -> None:
        self.swarm = swarm
        self.said: list[str] = []
        self.noted: list[tuple[str, dict]] = []
        (folder / "run.json").write_text(published_text(swarm.signed))
        config = SimpleNamespace(
            run=str(folder / "run.json"), archive=str(folder / "archive"), state=folder, name="",
            invite_bytes=invite, archiving=SimpleNamespace(seconds=5.0, newest=2, every=0),
            init_checkpoint=None,
        )  # fmt: skip
        log = SimpleNamespace(record=self.note, flush=lambda: None)
        process = SimpleNamespace(
            config=config, identity=ARCHIVIST, log=log, report=SimpleNamespace(status=lambda status: None),
            notify=lambda event, text, **_: self.said.append(text), known_as=lambda run: None,
            metrics=PeerMetrics(process=False), own_start=OwnStart(),
        )  # fmt: skip
        me = ARCHIVIST.peer_id
        self.network = SimpleNamespace(
            join=self.joined, transport=swarm.network.transport(me), directory=swarm.network.directory(me),
            announcer=lambda *given: Network.announcer(self.network, *given),
        )  # fmt: skip
        self.task = asyncio.create_task(ArchivistRole(process).run(self.network))

    async def joined(self, process) -> None:
        """There is nothing to join in memory."""

    def note(self, event) -> None:
        self.noted.append((event.name, event.fields))

    async def end(self, seconds: float) -> None:
        """Raises what it ended with; TimeoutError if it has not in time."""
        async with asyncio.timeout(seconds):
            await self.task


@on_virtual_clock
async def test_who_is_banned_before_it_begins_opens_nothing(tmp_path):
    swarm = Swarm(replace(MANIFEST, contact="owner@example.org"))
    swarm.open()
    await swarm.network.directory(OWNER.peer_id).put_order(swarm.signed.run_id, ban(swarm).data, 1.0)
    running = Running(swarm, tmp_path)
    with pytest.raises(UserError, match=BANNED):
        await running.end(1.0)
    assert running.said == []
    assert not (tmp_path / "archive" / "run.json").exists()


@on_virtual_clock
async def test_who_is_banned_while_it_archives_ends_when_a_peer_tells_it(tmp_path):
    swarm = Swarm(replace(MANIFEST, contact="owner@example.org"), seed=1)
    await trained(swarm, {"a": 0, "b": 1}, 5, compute=SLOW)
    running = Running(swarm, tmp_path)
    await swarm.until(lambda: [text for text in running.said if "archived stage 1" in text], 60.0)
    for name in swarm.living():  # The directory does not have it: peers send it with their refusal.
        swarm.members[name].worker.orders.book.take(ban(swarm).data)
    with pytest.raises(UserError, match=BANNED):
        await running.end(30.0)
    await swarm.close()


@on_virtual_clock
async def test_who_has_no_invite_ends_at_once_and_whose_invite_runs_out_soon_after_its_grace(tmp_path):
    swarm = Swarm(BY_INVITE)
    swarm.open()
    with pytest.raises(UserError, match=NOT_INVITED.format("this peer has none")):
        await Running(swarm, tmp_path).end(1.0)
    await swarm.network.transports[ARCHIVIST.peer_id].close()
    running = Running(swarm, tmp_path, invite(swarm, expires_seconds=100.0))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(90.0 + INVITE_GRACE_SECONDS):
            await asyncio.shield(running.task)
    with pytest.raises(UserError, match=NOT_INVITED.format(".*the invite has expired")):
        await running.end(71.0)


async def silent(*_):
    raise Unreachable("the directory did not answer")


@on_virtual_clock
async def test_a_directory_that_does_not_answer_keeps_nobody_out(tmp_path):
    swarm = Swarm(MANIFEST)
    swarm.open()
    running = Running(swarm, tmp_path)
    running.network.directory.get_order = silent
    with pytest.raises(TimeoutError):
        await running.end(200.0)
    assert "order_unknown" in {event for event, _ in running.noted}
    assert "archives the run" in running.said[0]


@on_virtual_clock
async def test_a_refusal_is_noted_with_its_own_code(tmp_path):
    swarm = Swarm(BY_INVITE, seed=1)
    swarm.open()
    await trained(swarm, {"a": 0, "b": 1}, 1, compute=SLOW, invite=invite(swarm))
    archivist, _, _ = await archived(swarm, str(tmp_path), Policy())
    circle, noted = archivist.circle, []
    circle.log_event = lambda event: noted.append((event.name, event.fields))

    def codes():
        return {fields["code"] for event, fields in noted if event == "refused_by"}

    await archivist.once()
    await swarm.during(2.0)
    assert codes() == {"not_invited"}
    noted.clear()
    for name in swarm.living():
        swarm.members[name].worker.orders.book.take(ban(swarm).data)
    await archivist.once()
    await swarm.during(2.0)
    assert codes() == {"banned"}
    assert archivist.book.order.banned(ARCHIVIST.peer_id).reason == "fills disks"
    noted.clear()
    await circle.gather(0)
    linked = swarm.members["a"].peer
    circle.received(linked, "group", Refuse("of_a_newer_version", "because"), b"", 0)
    assert codes() == {"other"}
    assert noted[-1][1]["reason"] == "because"
    circle.close()
    await swarm.close()
