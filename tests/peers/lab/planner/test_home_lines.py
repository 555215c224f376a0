"""Plans of swarms on home lines: what lines carry, what memory holds, whether one peer alone is faster."""

from dataclasses import replace

import pytest

from peers.config.errors import UserError
from peers.lab.planner.exchange import MAX_OF_A_LINE, exchange_of
from peers.lab.planner.placing import placed
from peers.lab.planner.plan import plan
from peers.lab.planner.plan_report import render
from peers.lab.planner.plan_request import PlanRequest
from peers.lab.planner.shape.candidates import bottleneck, kinds
from peers.lab.planner.speeds import MEGABIT, peer_classes
from peers.lab.processes.demo_report import contribution_bytes
from swarmnet.identifiers import PeerId
from swarmnet.resources.bandwidth_estimate import contribution_bytes as contribution_estimate
from swarmnet.resources.bandwidth_estimate import result_bytes as result_estimate
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data, Experts, ModelShape, Rounds, Sync

NEAR = (0.001, 0.01)
THREE = Manifest("run", PeerId("owner"), stages=(2, 1, 1), model=ModelShape())
ONE = replace(THREE, stages=(4,))
WIDE = ModelShape(
    hidden_size=1024,
    num_hidden_layers=8,
    num_attention_heads=8,
    intermediate_size=1024,
    max_position_embeddings=4096,
)
"""Of which a microbatch of 4,096 tokens takes 8.4 MB from stage to stage."""
EIGHT = Manifest("run", PeerId("owner"), stages=(1,) * 8, model=WIDE,
                 data=Data(seq_len=2048, micro_batch_size=2),
                 rounds=Rounds(global_batch_tokens=10**7, max_seconds=3600.0))  # fmt: skip

SMALL = replace(EIGHT, data=Data())
"""The same with little of text at a time, so that its weights are what takes memory."""


def asked(peers: str, **keys) -> PlanRequest:
    return PlanRequest(peer_classes(peers), NEAR, **keys)


# -- beside what all could compute, and beside one alone ---------------------------------------------


def test_a_plan_says_what_part_of_the_summed_compute_comes_out_and_what_one_alone_does():
    answer = plan(THREE, asked("6x2ktps@1000/1000,3x500tps@1000/1000"))
    assert answer.bounds.summed == 6 * 2000 + 3 * 500
    assert answer.utilisation == answer.churned / 13_500
    assert answer.alone.tokens_per_second == 2000
    text = render(answer)
    assert "13,500 that all could compute" in text
    assert "one of these alone  2,000 tokens per second" in text
    assert "SLOWER" not in text


def test_whoever_cannot_hold_the_whole_model_is_not_what_the_swarm_is_compared_with():
    needs = max(plan(SMALL, asked("8x20ktps@10/1")).memory) / 1e9
    answer = plan(SMALL, asked(f"8x20ktps@10/1:{needs + 0.01:.2f}GB"))
    assert not answer.alone.fits
    assert not answer.slower_than_one
    assert "cannot: the whole model takes" in render(answer)
    either = plan(SMALL, asked(f"6x20ktps@10/1:{needs + 0.01:.2f}GB,3x1ktps@10/1:8GB"))
    assert either.alone.tokens_per_second == 1000, "the fastest of those that can"


# -- contributions on the lines ----------------------------------------------------------------------


def test_a_run_of_one_stage_sends_no_microbatch_and_computes_with_all():
    answer = plan(ONE, asked("8x500tps@100/40"))
    assert answer.data_bytes == (0.0,)
    assert answer.bounds.compute == pytest.approx(4000)
    assert answer.tokens_per_second == pytest.approx(4000, rel=0.03)


def test_a_run_of_one_stage_is_as_fast_as_its_exchange_where_that_fills_the_line():
    peers, up = 20, 1.0
    answer = plan(ONE, asked(f"{peers}x20ktps@100/{up}"))
    rounds = MAX_OF_A_LINE * up * MEGABIT / (4 * (peers - 1) / peers * contribution_bytes(ONE, 0))
    assert answer.bounds.exchange == pytest.approx(rounds * ONE.rounds.global_batch_tokens, rel=0.01)
    assert answer.bounds.strongest == "links: bytes of contributions"
    assert answer.tokens_per_second == pytest.approx(answer.bounds.exchange, rel=0.03)


def test_what_reducers_add_up_costs_each_line_the_same_in_a_group_of_any_size():
    rounds = Rounds(global_batch_tokens=10**6, max_seconds=3600.0)
    manifest = replace(ONE, rounds=rounds, sync=Sync(method="local-steps", inner_batch_tokens=1024))
    reduced = replace(manifest, sync=replace(manifest.sync, topology="sharded-reduce"))
    sharded, everyone = exchange_of(reduced), exchange_of(manifest)
    one, results = sharded.contribution[0], sharded.results[0]
    assert results == pytest.approx(4 * one, rel=0.02), "means have four bits, contributions one"
    assert sharded.per_round(0, 10) == sharded.per_round(0, 1000) == one + results
    assert everyone.per_round(0, 1000) == pytest.approx(999 * one)
    assert sharded.per_round(0, 1) == 0
    busy = sharded.per_second(manifest, 0, 10_000.0, 10)
    assert busy == pytest.approx(sharded.per_round(0, 10) / 100)


def test_results_speak_of_all_experts_and_a_contribution_of_one_group():
    shape = ModelShape(qk_norm=True, intermediate_size=512, experts=Experts(num_experts=8, top_k=2, groups=4))
    manifest = replace(ONE, model=shape, sync=Sync(method="local-steps", topology="sharded-reduce"))
    ungrouped = replace(manifest, model=replace(shape, experts=replace(shape.experts, groups=1)))
    of_groups, of_all = exchange_of(manifest), exchange_of(ungrouped)
    assert of_groups.results == of_all.results
    assert of_groups.contribution[0] < 0.35 * of_all.contribution[0]
    for found, how in ((manifest, of_groups), (ungrouped, of_all)):  # What a peer reckons before it begins.
        assert contribution_estimate(found, 0) == pytest.approx(how.contribution[0], rel=0.01)
        assert result_estimate(found, 0) == pytest.approx(how.results[0], rel=0.01)
    direct = exchange_of(replace(manifest, sync=replace(manifest.sync, topology="all-gather")))
    assert direct.per_round(0, 8) < of_groups.per_round(0, 8), "few hear everybody for less"
    assert of_groups.per_round(0, 64) < 0.5 * direct.per_round(0, 64)


def test_who_has_not_enough_tokens_of_its_own_contributes_nothing_to_a_round():
    rounds = Rounds(global_batch_tokens=40_000, max_seconds=3600.0)
    everyone = exchange_of(
        replace(ONE, rounds=rounds, sync=Sync(method="local-steps", inner_batch_tokens=4000))
    )
    manifest = replace(ONE, rounds=rounds)
    assert everyone.contributions(manifest, 4000.0, 100) == 1.0, "ten of a hundred, each tenth second"
    assert everyone.contributions(manifest, 4000.0, 5) == pytest.approx(0.5)


# -- memory ------------------------------------------------------------------------------------------


def test_memory_and_regions_are_told_apart():
    lines = {"eu": (100.0, 40.0), "24GBs": (1.0, 1.0)}
    plain, both = peer_classes("8x2ktps@100/40:24GB,8x2ktps:8GiB")
    assert (plain.memory, both.memory) == (24 * 10**9, 8 << 30)
    there, odd = peer_classes("8x2ktps:1.5GB:eu,8x2ktps:24GBs", lines)
    assert (there.memory, there.region) == (1.5e9, "eu")
    assert (odd.memory, odd.region) == (0, "24GBs")
    for wrong in ("8x2ktps:0GB", "8x2ktps:24GB:8GB", "8x2ktps:24MB"):
        with pytest.raises(ValueError, match=r"peers|nothing|--links"):
            peer_classes(wrong)


def test_peers_hold_stages_that_fit_and_whoever_fits_nowhere_is_named():
    question = asked("4x500tps:0.6GB,4x500tps:1GB,4x500tps:0.4GB")
    memory = [int(0.9e9), int(0.5e9)]
    two = replace(THREE, stages=(3, 1))
    placement = placed(two, question, memory)
    assert [one.memory for one in placement.left_out] == [4 * 10**8]
    assert len(placement.peers) == 8
    assert {peer.stage for peer in placement.peers[:4]} == {1}, "the small ones, where they fit"
    answer = plan(THREE, asked("6x500tps@1000/1000:1GB,3x2ktps@1000/1000:0.005GB"))
    assert sum(answer.peers) == 6
    assert "NOT TAKING PART: 3 peers of 2,000 tokens/s with 0.005 GB" in render(answer)


def test_a_stage_that_nobody_has_memory_for_is_said():
    with pytest.raises(UserError, match=r"no peer has memory .*: 6 peers of 500 tokens/s with 0\.005 GB"):
        plan(THREE, asked("6x500tps:0.005GB"))
    with pytest.raises(UserError, match=r"stage 0, which takes 0\.9 GB"):
        placed(replace(THREE, stages=(3, 1)), asked("4x500tps:0.6GB"), [int(0.9e9), int(0.5e9)])


# -- bodies that take their time ---------------------------------------------------------------------


# -- lines ------------------------------------------------------------------------------------------

FOUR = replace(
    THREE, stages=(1, 1, 1, 1), model=ModelShape(hidden_size=512, num_attention_heads=8, head_dim=64),
    data=Data(seq_len=512, micro_batch_size=1),
    rounds=Rounds(global_batch_tokens=10**8, max_seconds=36_000.0),
)  # fmt: skip
"""Of which lines carry little, and contributions take next to nothing of them."""


def carried(peers: str, run: Manifest = FOUR) -> float:
    """Tokens per second, by arithmetic."""
    found = placed(run, asked(peers))
    return bottleneck(run, exchange_of(run), kinds(run, found))


def test_a_plan_puts_more_peers_into_the_middle_and_thin_lines_to_the_ends():
    stages = [peer.stage for peer in placed(FOUR, asked("24x9ktps@100/10")).peers]
    assert [stages.count(stage) for stage in range(4)] == [4, 8, 8, 4]
    mixed = placed(FOUR, asked("16x500tps@100/1,8x500tps@1000/100")).peers
    thin = [peer.stage for peer in mixed if peer.up <= MEGABIT]
    assert sum(stage in (0, 3) for stage in thin) > len(thin) / 2, "a thin line brings twice as much there"
