"""What a peer does with contributions that come in, and how long it keeps its own."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from random import Random
from types import SimpleNamespace

import pytest
from clocks import on_virtual_clock
from reducer_world import nothing_observed
from swarm import tiny_manifest

from peers.network.message_router import MessageRouter
from peers.state.snapshot_store import Weights
from peers.worker.rounds import stored, update_compute
from peers.worker.rounds.operations import DecodeContribution, RoundSettled
from peers.worker.rounds.round_service import RoundService
from peers.worker.rounds.update_compute import UpdateWork
from protocols.messages.table import Announce, Contribution, GetContributions, GetIds, Progress
from protocols.messages.table import ContributionRef as WireReference
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, open_envelope, seal
from protocols.signed.identity import Identity
from swarmnet.identifiers import ContributionId, PeerId, RunId
from swarmnet.membership.membership import Membership
from swarmnet.rounds import events
from swarmnet.rounds.audits import Audits
from swarmnet.rounds.history import START
from swarmnet.rounds.own_contributions import OwnContributions
from swarmnet.rounds.result_table import tag_key, tag_of

RUN, ME, MAKER = RunId("ab" * 32), Identity.from_seed(b"me"), Identity.from_seed(b"maker")
PAYLOAD = b"vote"
DATA = seal(MAKER, RUN, EnvelopeKind.CONTRIBUTION, 0, 0, 0, PAYLOAD)
NAME = open_envelope(DATA, RUN, EnvelopeKind.CONTRIBUTION, len(PAYLOAD)).id
B, C = PeerId("b"), PeerId("c")


class World:
    """An `RoundService` whose neighbours are what the test says; `posted`, `refused`, `done`: what it did."""

    def __init__(self, settled=lambda settled: None, folder=None) -> None:
        loop = asyncio.get_running_loop()
        self.posted, self.refused, self.done = [], [], []
        manifest = tiny_manifest((3,))
        method = SimpleNamespace(payload_bytes=len(PAYLOAD), check=lambda payload: None, reduced=None)
        work = SimpleNamespace(
            replica=SimpleNamespace(settled_round=-1),
            counts=SimpleNamespace(applied=lambda *_: "completed", contributors=0),
            method=method,
            run_id=RUN,
            stage=0,
            closed=False,
            commits=False,
            run=lambda operations: self.done.extend(operations) or [],
        )
        around = SimpleNamespace(
            clock=SimpleNamespace(time=loop.time, call_at=loop.call_at),
            transport=SimpleNamespace(peer=ME.peer_id),
            post=lambda peer, lane, message, body=b"": self.posted.append((peer, message)),
            refused=lambda peer, code, reason: self.refused.append((peer, code)),
            queued_bytes=lambda peer, lane: 0,
            introduce=lambda contributors, peers: None,
            membership=Membership(me=ME.peer_id, stage=0, chance=Random(1)),
        )
        self.jobs = []
        compute = SimpleNamespace(submit=lambda kind, job, done: self.jobs.append(job))
        self.path = RoundService(
            manifest=manifest,
            work=work,
            compute=compute,
            neighbourhood=around,
            weights=Weights(None, -1, START),
            offers=OwnContributions(manifest.rounds),
            has_weight=lambda contributor, round: True,
            observers=nothing_observed(settled),
            audits=Audits(b"a secret", 2),
            folder=folder,
            log_event=lambda *_, **__: None,
        )
        self.router = MessageRouter()
        self.path.register(self.router)
        for peer in (B, C):
            self.path.joined(peer)
            self.router.dispatch(peer, Progress(9, 0, [], -1, True, -1, START, []), b"")

    def decoded(self) -> list[PeerId]:
        return [operation.peer for operation in self.done if isinstance(operation, DecodeContribution)]


@on_virtual_clock
async def test_a_body_that_left_the_set_enters_it_again_when_it_belongs_to_it_after_all():
    world = World()
    world.router.dispatch(B, Contribution(), DATA)
    assert world.path.rounds.rounds[0].held.keys() == {MAKER.peer_id}
    world.path.rounds.rounds[0].remove(MAKER.peer_id)  # As when others had settled the round without it.
    world.router.dispatch(C, Contribution(), DATA)
    assert world.path.rounds.rounds[0].held.keys() == {MAKER.peer_id}
    world.router.dispatch(B, Contribution(), DATA)
    assert world.path.outcomes == {"accepted": 2, "repeated": 1}
    world.path.close()


@on_virtual_clock
async def test_contributions_that_come_during_a_microbatch_are_decoded_together():
    world = World()
    other = seal(Identity.from_seed(b"other"), RUN, EnvelopeKind.CONTRIBUTION, 0, 0, 0, PAYLOAD)
    third = seal(Identity.from_seed(b"third"), RUN, EnvelopeKind.CONTRIBUTION, 0, 0, 0, PAYLOAD)
    world.router.dispatch(B, Contribution(), DATA)
    world.router.dispatch(B, Contribution(), other)
    (job,) = world.jobs
    job()
    assert world.decoded() == [MAKER.peer_id, Identity.from_seed(b"other").peer_id]
    world.router.dispatch(C, Contribution(), third)
    assert len(world.jobs) == 2
    world.jobs[1]()
    assert len(world.decoded()) == 3
    world.path.close()


@pytest.mark.parametrize("size", [0, ENVELOPE_BYTES + len(PAYLOAD) - 1, 10**9])
@on_virtual_clock
async def test_names_of_contributions_of_another_size_are_refused(size):
    world = World()
    world.router.dispatch(B, Announce([WireReference(0, MAKER.peer_id, b"i" * 16, size)], []), b"")
    assert world.refused == [(B, "malformed")]
    assert not len(world.path.rounds.pulls)
    right = WireReference(0, MAKER.peer_id, b"i" * 16, ENVELOPE_BYTES + len(PAYLOAD))
    world.router.dispatch(B, Announce([right], []), b"")
    assert len(world.path.rounds.pulls) == 1
    world.path.close()


@on_virtual_clock
async def test_who_asks_for_one_round_many_times_is_told_once():
    world = World()
    world.router.dispatch(B, Contribution(), DATA)
    world.posted.clear()
    world.router.dispatch(C, GetIds([0] * 256), b"")
    told = [message for peer, message in world.posted if isinstance(message, Announce) and peer == C]
    assert [len(message.references) for message in told] == [1]
    world.path.close()


def test_of_own_contributions_only_those_of_which_all_is_known_are_forgotten(monkeypatch):
    monkeypatch.setattr(update_compute, "OWN_BYTES_KEPT", 40)
    undecided = OrderedDict.fromkeys(ContributionId(bytes([n]) * 16) for n in (0, 3))
    method = SimpleNamespace(held=None, own=None, reduced=None)
    work = UpdateWork(
        run_id=RUN,
        stage=0,
        identity=ME,
        stage_compute=None,
        method=method,
        replica=None,
        gathered=None,
        settled=None,
        counts=None,
        undecided=undecided,
    )
    for number in range(8):
        newest = ContributionId(bytes([number]) * 16)
        work.own[newest] = bytes(10)
        work._forget_oldest(10, newest)
    assert [name[0] for name in work.own] == [0, 3, 6, 7], "four fit, and two are undecided"


@on_virtual_clock
async def test_what_takes_up_another_history_signs_nothing_of_the_old_one():
    told = []
    world = World(told.append)
    settled = RoundSettled(0, b"d" * 32, START, ())
    world.path._worked([settled], 0.0)
    world.path.close()
    world.path._worked([settled], 0.0)
    assert told == [settled]


@on_virtual_clock
async def test_contributors_have_worked_if_their_votes_have_weight():
    world = World()
    contributors = [PeerId(f"peer {number}") for number in range(6)]
    membership = world.path.neighbourhood.membership
    for peer in contributors:
        membership.recorded(peer, 0, "worker", (), 1, b"record", 0.0)
    votes = {tag_key(tag_of(peer)): peer != contributors[0] for peer in contributors[:-1]}
    world.path.feed(events.VotesWeighed(votes))
    settled = RoundSettled(0, b"d" * 32, START, (), contributors=tuple(contributors))
    world.path._worked([settled], 0.0)
    assert [peer for peer in contributors if membership.peers[peer].worked] == contributors[1:-1]
    world.path.close()


@on_virtual_clock
async def test_long_bodies_of_a_settled_round_are_read_from_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "MIN_ON_DISK", 1)
    world = World(folder=tmp_path)
    world.router.dispatch(B, Contribution(), DATA)
    (reference,) = references = tuple(world.path.rounds.rounds[0].held.values())
    world.path._carry_out(events.SettleRound(0, references, START), [])
    data = world.path.store.stored[reference.id].data
    assert isinstance(data, memoryview)
    assert data == DATA
    world.router.dispatch(C, GetContributions([reference.id]), b"")
    assert (C, Contribution()) in world.posted
    world.path.close()


def test_weights_lead_as_long_as_a_round_is_open_to_which_this_peer_has_contributed():
    published = []
    replica = SimpleNamespace(
        applied_round=-1,
        corrections=0,
        apply=lambda round: setattr(replica, "applied_round", round),
        vote_agreement=lambda round, me: None,
        live_tiles=lambda ahead: ahead,
    )
    method = SimpleNamespace(
        held=None,
        own=None,
        reduced=None,
        gradient_norm=1.0,
        momentum_norm=None,
        contribute=lambda gradient, tokens, round, peer: PAYLOAD,
    )
    work = UpdateWork(
        run_id=RUN,
        stage=0,
        identity=ME,
        stage_compute=SimpleNamespace(use_gradient=lambda use: use(None), publish=published.append),
        method=method,
        replica=replica,
        gathered=SimpleNamespace(gathered_tokens=1),
        settled=None,
        counts=SimpleNamespace(voted=lambda agreement: None, norms=None),
        undecided=(),
    )
    make = [events.MakeContribution(round, 1, ()) for round in range(3)]
    apply = [events.ApplyRound(round, (), 0.0) for round in range(3)]
    for operation in (make[0], apply[0], make[1], make[2], apply[1], apply[2]):
        work.run([operation])
    assert published == [True, False, True, True, True, False]
