"""A stage that several processes hold together, beside the same on one device: real processes, gloo."""

import os
import signal
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from model_sizes import model_shape

from peers.compute.devices import device_processes as processes_module
from peers.compute.devices.part import not_divisible, spread_part
from peers.compute.stage_part import build_stage_part
from peers.config.errors import DevicesLost, UserError
from swarmnet.identifiers import ContributionId, MicrobatchId, PeerId
from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import views_of
from swarmnet.model.stage_compute import StageError
from swarmnet.model.state_layout import first_state
from swarmnet.optimizer.agreement.comparison import FULL_WEIGHT
from swarmnet.optimizer.agreement.ledger import LAG, AgreementLedger, votes_of
from swarmnet.optimizer.method import ContributionError
from swarmnet.optimizer.replica import NOT_HASHED
from swarmnet.rounds.result_table import Contributor, tag_key, tag_of
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Sync

CPU = torch.device("cpu")
SHAPE = model_shape(width=64, layers=4, heads=4, inner=192, vocab_size=256, max_position_embeddings=256)
REDUCED = {"topology": "sharded-reduce", "shards": 3}
RUN = Manifest("spread", PeerId("owner"), stages=(2, 2), model=SHAPE)
ME, OTHER = PeerId("me"), PeerId("other")


@contextmanager
def spread(manifest, stage, devices, computing=PLAIN):
    part, processes = spread_part(manifest, stage, [CPU] * devices, computing, 1)
    try:
        processes.ready()
        yield part, processes
    finally:
        processes.close()


def microbatch(number, sequences=3):
    drawn = torch.Generator().manual_seed(number)
    tokens = torch.randint(SHAPE.vocab_size, (sequences, 21), generator=drawn)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trained(first, last, number, sequences=3):
    """The loss of one microbatch through both stages."""
    key, (inputs, labels) = MicrobatchId(ME, number), microbatch(number, sequences)
    finished = last.compute.finish(key, first.compute.forward(key, inputs), labels)
    assert first.compute.backward(key, finished.hidden_gradient) is None
    assert finished.tokens == labels.numel()
    return finished.loss_sum / finished.tokens


def contributed(part, tokens, round):
    return part.compute.use_gradient(lambda gradient: part.method.contribute(gradient, tokens, round, ME))


def added(part, payloads):
    """What is added to a round: contributions, or the result of one reducer."""
    reduced = part.method.reduced
    if reduced is None:
        return payloads
    slices = {}
    for peer, payload in payloads.items():
        contributor = Contributor.of(peer, ContributionId(tag_of(peer)), 1)
        for shard, data in enumerate(reduced.slices(payload)):
            reduced.check_slice(shard, data)
            slices.setdefault(shard, {})[contributor] = data
    result = reduced.reduce(slices)
    assert all(reduced.follows(result, shard, of_shard) for shard, of_shard in slices.items())
    return {OTHER: result}


def round_of(part, replica, round, payloads):
    """Each contribution in, the round applied, the weights published; its digest once it is settled, but for
    one round's, and how many of this peer's votes were counted."""
    for peer, payload in payloads.items():
        replica.add(round, peer, payload)
    replica.apply(round)
    agreement = replica.vote_agreement(round, ME)
    counted = agreement and agreement.agreed + agreement.opposed + agreement.alone
    part.compute.publish(replica.live_tiles(False))
    return replica.settle(round, hashed=round != 1), counted


@pytest.mark.loopback
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sync", "devices"),
    [
        pytest.param(Sync(method="demo-sign"), 4, marks=pytest.mark.soak),
        (Sync(method="local-steps"), 2),
        (Sync(method="sign-muon"), 2),
        (Sync(method="local-steps", **REDUCED), 2),
        (Sync(method="sign-muon", **REDUCED), 2),
        (Sync(method="low-rank"), 2),
        pytest.param(Sync(method="hybrid"), 2, marks=pytest.mark.soak),
    ],
)
def test_losses_are_those_of_one_device_and_what_settles_is_equal_to_the_bit(sync, devices):
    manifest = replace(RUN, sync=sync)
    alone = [build_stage_part(manifest, stage) for stage in (0, 1)]
    with spread(manifest, 0, devices) as (first, _), spread(manifest, 1, devices) as (last, _):
        together = [first, last]
        for part in (*alone, *together):
            assert torch.equal(part.first_units(), alone[part in (alone[1], last)].first_units())
        held = [part.replica(part.first_units(), -1) for part in (*alone, *together)]
        for part, replica in zip((*alone, *together), held, strict=True):
            part.compute.publish(replica.live_tiles(False))
        for round in range(3):
            for number in range(4 * round, 4 * round + 4):
                ours, theirs = trained(*together, number), trained(*alone, number)
                assert abs(ours - theirs) < 1e-5
            for stage in (0, 1):
                own = contributed(together[stage], 240, round)
                others = contributed(alone[stage], 240, round)
                assert len(own) == together[stage].method.payload_bytes == alone[stage].method.payload_bytes
                payloads = {ME: own, OTHER: others}
                digests = [
                    round_of(parts[stage], held[at + stage], round, added(parts[stage], payloads))
                    for at, parts in ((0, alone), (2, together))
                ]
                assert digests[0] == digests[1]
                assert (digests[0][0] == NOT_HASHED) == (round == 1)
                assert torch.equal(held[stage].settled_units(), held[2 + stage].settled_units())
            with pytest.raises(ContributionError):
                held[2].add(round + 1, OTHER, payloads[ME][:-1])
        together[1].method.give_back(own, 2, ME, (1,) if sync.topology == "sharded-reduce" else ())


@pytest.mark.loopback
@pytest.mark.slow
@pytest.mark.parametrize("topology", [{}, REDUCED], ids=["all-gather", "sharded-reduce"])
def test_devices_weigh_votes_by_the_agreement_ledger_as_one_device_does(topology):
    sync = Sync(method="sign-muon", weights="agreement", fragments=2, **topology)
    manifest = replace(RUN, stages=(4,), sync=sync)
    names = [PeerId(f"peer {number}") for number in range(8)]
    liars = names[-2:]
    drawn = np.random.default_rng(1)

    def contributions(size):
        common = drawn.integers(0, 256, size, np.uint8)
        votes = {name: common ^ np.packbits(drawn.random((size, 8)) < 0.25, axis=1)[:, 0] for name in names}
        return {name: (~bits if name in liars else bits).tobytes() for name, bits in votes.items()}

    alone = build_stage_part(manifest, 0)
    with spread(manifest, 0, 2) as (together, _):
        held = [part.replica(part.first_units(), -1) for part in (alone, together)]
        late = LAG + 2  # So many rounds are open that the ledger by which one is weighed may not be settled.
        for round in range(2 * late):
            payloads = contributions(alone.method.payload_bytes)
            payloads, results = added(together, payloads), added(alone, payloads)
            assert payloads == results, "both weigh by the same ledger"
            for replica in held:
                for name, payload in payloads.items():
                    replica.add(round, name, payload)
                replica.apply(round)
            if round >= late:
                settled = [replica.settle(round - late, chain=bytes([round])) for replica in held]
                assert settled[0] == settled[1]
        assert held[0].corrections == held[1].corrections
        assert (held[0].corrections > 0) == (not topology), "reducers have weighed the votes"
        states = [replica.settled_units() for replica in held]
        assert torch.equal(*states)
        ledger = AgreementLedger()
        ledger.load(states[1][held[1].size :].numpy())
        assert ledger.weights(99, [tag_of(name) for name in names]) == [FULL_WEIGHT] * 6 + [0] * 2
        votes = {tag_key(tag_of(name)): name not in liars for name in names}
        assert [votes_of(part.method) for part in (alone, together)] == [votes, votes]

        settled_round = held[0].settled_round  # As after a restart: new replicas with what was settled.
        again = [
            part.replica(state, settled_round) for part, state in zip((alone, together), states, strict=True)
        ]
        for name, payload in added(together, contributions(alone.method.payload_bytes)).items():
            for replica in again:
                replica.add(settled_round + 1, name, payload)
        for replica in again:
            replica.apply(settled_round + 1)
        digests = [replica.settle(settled_round + 1, chain=b"next") for replica in again]
        assert digests[0] == digests[1]


@pytest.mark.loopback
@pytest.mark.slow
def test_a_tied_head_and_biases_learn_from_start_weights_on_several_devices_as_on_one():
    model = replace(SHAPE, tie_word_embeddings=True, attention_bias=True)
    manifest = replace(RUN, stages=(4,), model=model, sync=Sync(method="local-steps"))
    alone = build_stage_part(manifest, 0)
    with spread(manifest, 0, 2) as (together, _):
        drawn = views_of(1.5 * to_floats(alone.first_units()[: alone.layout.size]), alone.layout)
        start = first_state(manifest, 0, drawn.get)
        assert not torch.equal(start, alone.first_units())
        replicas = [part.replica(start, -1) for part in (alone, together)]
        for round in range(2):
            payloads, losses = {}, []
            for part, replica, peer in zip((alone, together), replicas, (ME, OTHER), strict=True):
                part.compute.publish(replica.live_tiles(False))
                for number in range(2):
                    finished = part.compute.finish(MicrobatchId(ME, 2 * round + number), *microbatch(number))
                    losses.append(finished.loss_sum)
                payloads[peer] = contributed(part, 120, round)
            torch.testing.assert_close(losses[:2], losses[2:], atol=1e-3, rtol=0)
            digests = [
                round_of(part, replica, round, payloads)
                for part, replica in zip((alone, together), replicas, strict=True)
            ]
            assert digests[0] == digests[1]


@pytest.mark.loopback
@pytest.mark.slow
@pytest.mark.parametrize(
    "recompute", [*(pytest.param(each, marks=pytest.mark.soak) for each in ("none", "stage")), "layer"]
)
def test_graphs_keep_the_weights_that_they_were_begun_with(recompute):
    computing = Computing(activation_checkpointing=recompute)
    alone = build_stage_part(RUN, 0, computing=computing)
    with spread(RUN, 0, 2, computing) as (together, _):
        gradients = []
        for part in (alone, together):
            part.compute.publish(part.replica(part.first_units(), -1).live_tiles(False))
            old, new = MicrobatchId(ME, 0), MicrobatchId(ME, 1)
            before = part.compute.forward(old, microbatch(0)[0])
            part.compute.publish(part.replica(part.first_units() * 2, -1).live_tiles(False))
            after = part.compute.forward(new, microbatch(0)[0])
            assert not torch.equal(before, after)
            below = torch.ones_like(before)
            for key in (old, new):
                part.compute.backward(key, below)
            gradients.append((before, after, contributed(part, 60, 0)))
        (before, after, payload), (there, later, told) = gradients
        assert torch.equal(before, there)
        assert torch.equal(after, later)
        same = sum(one == other for one, other in zip(payload, told, strict=True))
        assert same > 0.99 * len(payload), "sums in another order may turn a vote that is nearly none"


@pytest.mark.loopback
@pytest.mark.slow
def test_what_cannot_be_computed_is_refused_by_all_and_they_go_on():
    with spread(RUN, 0, 2) as (part, _):
        part.compute.publish(part.replica(part.first_units(), -1).live_tiles(False))
        inputs, _ = microbatch(0, sequences=1)
        key = MicrobatchId(ME, 0)
        with pytest.raises(StageError, match="the vocabulary is 0 to 255"):
            part.compute.forward(key, inputs + 250)
        output = part.compute.forward(key, inputs)
        assert output.shape == (1, 20, 64), "one device has nothing to do"
        with pytest.raises(StageError, match="gradient not finite"):
            part.compute.backward(key, torch.full_like(output, float("inf")))
        with pytest.raises(StageError, match="not open"):
            part.compute.backward(key, output)
        part.compute.forward(key, inputs)
        part.compute.drop(key)
        assert torch.equal(part.compute.forward(key, inputs), output)


@pytest.mark.loopback
@pytest.mark.slow
def test_a_device_that_dies_is_named_at_once_and_nothing_is_asked_any_more():
    with spread(RUN, 0, 2) as (part, processes):
        part.compute.publish(part.replica(part.first_units(), -1).live_tiles(False))
        os.kill(processes.pids[1], signal.SIGKILL)
        inputs, _ = microbatch(0)
        for _ in range(2):
            with pytest.raises(DevicesLost, match="device 1 of 2: ended by signal 9"):
                part.compute.forward(MicrobatchId(ME, 0), inputs)
        assert not any(psutil.pid_exists(pid) for pid in processes.pids), "nor is the other left alone"


@pytest.mark.loopback
@pytest.mark.slow
def test_a_device_that_hangs_is_given_up_after_the_deadline(monkeypatch):
    monkeypatch.setattr(processes_module, "ANSWER_SECONDS", 20.0)
    with spread(RUN, 0, 2) as (part, processes):
        replica = part.replica(part.first_units(), -1)
        part.compute.publish(replica.live_tiles(False))
        os.kill(processes.pids[0], signal.SIGSTOP)
        with pytest.raises(DevicesLost, match=r"device 0 of 2: .*(has not answered for 20 s|timed out)"):
            replica.settled_units()


@pytest.mark.parametrize(
    ("sync", "words"),
    [
        (Sync(chunking="tiled", transform="dct"), "sync.chunking"),
    ],
)
def test_runs_whose_contributions_need_a_whole_stage_are_refused_in_words(sync, words):
    manifest = replace(RUN, stages=(4,), sync=sync)
    assert words in not_divisible(manifest)
    with pytest.raises(UserError, match=r"compute\.devices"):
        spread_part(manifest, 0, [CPU, CPU], PLAIN, 1)
