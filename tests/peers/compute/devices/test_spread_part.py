"""A stage that several processes hold together, beside the same on one device: real processes, gloo."""

import os
import signal
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from peers.compute.devices.part import spread_part
from peers.compute.stage_part import real_part
from peers.errors import DevicesLost
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.model.stage_compute import StageError
from swarmnet.optimizer.method import ContributionError
from swarmnet.run.manifest import Manifest, ModelShape, Sync

CPU = torch.device("cpu")
SHAPE = ModelShape(vocabulary=256, width=64, layers=4, heads=4, head_width=16, feed_forward=192, context=256)
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
    tokens = torch.randint(SHAPE.vocabulary, (sequences, 21), generator=drawn)
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


def round_of(part, replica, round, payloads):
    """Each contribution in, the round applied, the weights published; its digest once it is settled."""
    for peer, payload in payloads.items():
        replica.add(round, peer, payload)
    replica.apply(round)
    replica.concord(round, ME)
    part.compute.publish(replica.live_tiles(False))
    return replica.settle(round)


@pytest.mark.loopback
@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("method", ["demo-votes", "local-steps"])
def test_losses_are_those_of_one_device_and_what_settles_is_equal_to_the_bit(method, devices):
    manifest = replace(RUN, sync=Sync(method=method))
    alone = [real_part(manifest, stage) for stage in (0, 1)]
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
                    round_of(parts[stage], held[at + stage], round, payloads)
                    for at, parts in ((0, alone), (2, together))
                ]
                assert digests[0] == digests[1]
                assert torch.equal(held[stage].settled_units(), held[2 + stage].settled_units())
            with pytest.raises(ContributionError):
                held[2].add(round + 1, OTHER, payloads[ME][:-1])
