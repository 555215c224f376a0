"""One process with all stages among peers with one each: it takes part, and its inner hops send nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from swarm import Swarm, nothing_is_committed_twice, shared_rounds, tiny_manifest

from peers.compute.executor import FORWARD, InlineCompute
from peers.compute.shared_executor import SharedCompute
from peers.lab.world.virtual_time import run
from peers.worker.pipeline.microbatch_compute import Bodies, MicrobatchWork
from protocols.framing.same_process import Near
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.model import activation_codec
from swarmnet.run.activation_sizes import encoded_bytes

RUN = tiny_manifest((1, 1, 1), hidden_codec="int4-tiles")


class Mixed(Swarm):
    """`w0` to `w2` are siblings that hold the whole model; a letter and a number is a peer of that stage."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(RUN, seed)

    def cost(self, priority: int) -> float:
        return 0.1 if priority == FORWARD else 0.02

    def hold(self, *stages: int) -> None:
        near, shared = Near(), SharedCompute(lambda: InlineCompute(self.cost))
        for stage in stages:
            self.start(f"w{stage}", stage, shared=shared, near=near, in_flight=4, slots=8)

    def chain(self, letter: str) -> None:
        for stage in range(3):
            self.start(f"{letter}{stage}", stage, compute=self.cost, in_flight=4, slots=8)

    def least(self) -> int:
        """Rounds that every peer has settled."""
        rounds = self.rounds()
        everybody = len(rounds) == len(self.members)
        return min(settled for _, settled in rounds.values()) if everybody else -1

    def sent(self, name: str) -> int:
        """Bytes of microbatches over its line."""
        counted = self.members[name].worker.neighbourhood.traffic.sent
        return sum(count for kind, count in counted.items() if kind in ("activation", "gradient"))

    def crossed(self, name: str) -> int:
        """Microbatches of the first sibling's that another peer than a sibling committed."""
        origin = self.members["w0"].peer
        return sum(note.fields["origin"] == origin for note in self.of("committed", name))


def test_a_whole_replica_and_a_chain_train_together_and_agree_and_the_replica_keeps_its_own_work_inside():
    swarm, seen = Mixed(), {}

    async def story() -> None:
        swarm.open()
        swarm.hold(0, 1, 2)
        swarm.chain("a")
        await swarm.until(lambda: swarm.least() > 3, 240.0)
        seen["inside"] = sum(swarm.crossed(f"w{stage}") for stage in range(3))
        seen["outside"] = sum(swarm.crossed(f"a{stage}") for stage in range(3))
        seen["shared"] = shared_rounds(swarm)
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    assert seen["shared"] >= 3 * 4, "digests of all three groups are equal"
    assert seen["inside"] > 20
    assert seen["outside"] <= 0.25 * seen["inside"], f"as many, if siblings did not come first: {seen}"
    assert swarm.losses()[-1] < swarm.losses()[0]


def test_a_whole_replica_alone_in_its_run_trains_and_sends_nothing_of_its_microbatches():
    swarm, sent = Mixed(1), Counter[str]()

    async def story() -> None:
        swarm.open()
        swarm.hold(0, 1, 2)
        await swarm.until(lambda: swarm.least() > 4, 120.0)
        for name in swarm.members:
            sent[name] = swarm.sent(name)
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    assert swarm.losses()[-1] < swarm.losses()[0]
    assert set(sent.values()) == {0}, sent


@pytest.mark.parametrize("exact_first", [True, False])
def test_what_was_made_for_a_sibling_is_made_anew_for_others_and_the_other_way_round(exact_first):
    work = MicrobatchWork(RUN, 1, stage_compute=Doubling())
    hidden_BTD = torch.randn(RUN.hidden_shape, generator=torch.Generator().manual_seed(1))
    key = MicrobatchId(PeerId("origin"), 0)
    for kind in ("activation", "gradient"):
        first = activation_codec.encode(hidden_BTD, "fp32" if exact_first else RUN.hidden_codec)
        again = work.recoded(kind, key, first, RUN.hidden_shape, not exact_first)
        assert len(again) == encoded_bytes(RUN.hidden_shape, RUN.hidden_codec if exact_first else "fp32")
        codec = RUN.hidden_codec if exact_first else "fp32"
        found = activation_codec.decode(again, RUN.hidden_shape, codec)
        assert torch.equal(found, activation_codec.decode(
            activation_codec.encode(hidden_BTD, RUN.hidden_codec), RUN.hidden_shape, RUN.hidden_codec
        ))  # fmt: skip


def test_siblings_pass_on_hidden_states_to_the_bit():
    work = MicrobatchWork(RUN, 1, stage_compute=Doubling())
    hidden_BTD = torch.randn(RUN.hidden_shape, generator=torch.Generator().manual_seed(2))
    sent = activation_codec.encode(hidden_BTD, "fp32")
    kept = Bodies(text=Text(), output=sent, output_exact=True, to_sibling=True, shape=RUN.hidden_shape)
    done = work.forward(MicrobatchId(PeerId("w"), 0), kept)
    assert torch.equal(activation_codec.decode(done.encoded, RUN.hidden_shape, "fp32"), 2 * hidden_BTD)


class Text:
    tokens = labels = None


class Doubling:
    """Of a stage, as far as a forward pass asks."""

    device = torch.device("cpu")

    def forward(self, _key: object, hidden_BTD: Any, _scale: float, _tokens: object) -> Any:
        return 2 * hidden_BTD
