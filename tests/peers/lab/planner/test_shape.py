"""The shape that suits given peers: by the loss that it comes to and not by its tokens per second."""

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from typed import refused

from peers.config.errors import UserError
from peers.config.run_file import load_manifest
from peers.lab.planner.exchange import CARD, exchange_of, parameters_of
from peers.lab.planner.placing import placed
from peers.lab.planner.plan import lay_out
from peers.lab.planner.plan_request import PlanRequest
from peers.lab.planner.shape import laws
from peers.lab.planner.shape.candidates import COMMON_TOKENS, Judge, Shape, bottleneck, cuts, kinds, price
from peers.lab.planner.shape.shape_report import render, sentence
from peers.lab.planner.shape.shape_search import search
from peers.lab.planner.shape.writing import text_of
from peers.lab.planner.speeds import peer_classes
from swarmnet.identifiers import PeerId
from swarmnet.resources.memory_estimate import needs_of
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import ModelShape, Paths
from swarmnet.run.sync_methods import METHOD_CONFIGS

CONFIGS = Path(__file__).parents[4] / "configs"
NEAR = (0.001, 0.01)
LOSSES = (0.99, 1.0, 1.02, 1.05)
RUN = Manifest("run", PeerId("owner"), stages=(2, 2), model=ModelShape())
PARAMETERS = parameters_of(replace(RUN, stages=(4,)), 0)


def asked(peers: str, **keys) -> PlanRequest:
    return PlanRequest(peer_classes(peers), NEAR, **keys)


# -- what replicas and batches cost ------------------------------------------------------------------


def test_a_higher_loss_needs_more_tokens_and_too_high_a_loss_is_never_made_up_for():
    factors = [laws.tokens_factor(5 * 10**8, 10**10, lambda more, loss=loss: loss) for loss in LOSSES]
    assert factors[1] == pytest.approx(1.0, abs=2e-4)
    assert factors == sorted(factors)
    loss = laws.loss_of_one(5 * 10**8, 10**10 * factors[3]) * 1.05
    assert loss == pytest.approx(laws.loss_of_one(5 * 10**8, 10**10), rel=1e-4)
    assert laws.tokens_factor(10**6, 10**15, lambda more: 1.05) == inf


def test_tokens_that_make_up_for_a_loss_send_their_own_bits():
    fixed = laws.tokens_factor(5 * 10**8, 10**10, lambda more: 1.05)
    falling = laws.tokens_factor(5 * 10**8, 10**10, lambda more: 1.05 / more**0.02)
    assert 1 < falling < fixed


def test_a_larger_round_at_the_same_number_of_rounds_is_never_worse():
    law = METHOD_CONFIGS["sign-muon"].loss_law
    rounds = []
    for tokens in COMMON_TOKENS:
        shape = Shape((12,), 1, "sharded-reduce", tokens, parts=16)
        _, factor = price(
            law=law, parameters=9 * 10**7, target=18e8, shape=shape, replicas=100, contribution_bytes=7e5
        )
        rounds.append(factor * 18e8 / tokens)
    assert rounds == sorted(rounds, reverse=True)


# -- shapes by arithmetic ----------------------------------------------------------------------------


def test_a_model_is_cut_evenly_and_with_less_beside_a_heavy_head():
    assert cuts(RUN, 1) == {(4,)}
    assert (2, 2) in cuts(RUN, 2)
    heavy = replace(RUN, model=ModelShape(num_hidden_layers=8, vocab_size=4096))
    assert {sum(stages) for stages in cuts(heavy, 3)} == {8}
    assert any(stages[-1] < stages[0] for stages in cuts(heavy, 3))
    for count in range(1, 9):
        assert all(len(stages) == count and min(stages) > 0 for stages in cuts(heavy, count))


@pytest.mark.parametrize("peers", ["12x2ktps@1000/1000", "12x20ktps@20/2", "6x20ktps@100/10,6x2ktps@20/5"])
@pytest.mark.parametrize("stages", [(4,), (2, 2), (2, 1, 1)])
def test_the_arithmetic_of_thousands_is_that_of_the_plan(peers, stages):
    question, shape = asked(peers), Shape(stages, 2, "all-gather", 65_536)
    manifest = shape.manifest(RUN)
    how, placement = exchange_of(manifest), placed(manifest, question)
    _, (*_, beside) = lay_out(manifest, question, how, placement.peers, None)
    assert bottleneck(manifest, how, kinds(manifest, placement)) == pytest.approx(beside, rel=0.02)


def test_shapes_that_no_peer_can_hold_are_left_out():
    judge = Judge(run=RUN, question=asked("8x2ktps:0.01GB"), parameters=PARAMETERS, target=1e8)
    assert judge.judged(Shape((4,), 1, "all-gather", 65_536)) is None
    judge = Judge(run=RUN, question=asked("8x2ktps:8GB"), parameters=PARAMETERS, target=1e8)
    assert judge.judged(Shape((4,), 1, "all-gather", 65_536)).tokens_per_second == pytest.approx(16_000)


# -- the search --------------------------------------------------------------------------------------


def test_on_thin_lines_the_whole_model_on_each_peer_wins_and_comes_sooner_than_one_alone():
    run = replace(RUN, paths=Paths())
    found = search(run, asked("12x20ktps@20/2", tokens=10**8))
    best = found.found[0]
    assert best.shape.stages == (4,)
    assert best.answer.utilisation > 0.8, "rounds of a few seconds on thin lines"
    assert best.days < found.alone_days / 3
    assert found.as_it_is.days > 5 * best.days
    assert [one.days for one in found.found] == sorted(one.days for one in found.found)
    assert "to the loss of one alone" in sentence(found)
    text = render(found)
    assert "as it is" in text
    assert "an error of about" in text


def test_a_model_that_fits_nobody_is_cut_in_as_few_stages_as_fit():
    wide = ModelShape(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048)
    run = Manifest("run", PeerId("owner"), stages=(8,), model=wide)
    halves = Shape((4, 4), 4, "all-gather", 65_536, inner_batch_tokens=512).manifest(run)
    memory = max(needs_of(halves, stage, 0, CARD).least for stage in range(2))
    found = search(run, asked(f"16x2ktps@20/2:{memory / 1e9:.3f}GB"))
    assert len(found.found[0].shape.stages) == 2
    assert max(found.found[0].answer.memory) <= 1.001 * memory
    assert found.as_it_is is None
    assert "memory" in found.why_not


def test_what_no_shape_helps_is_said():
    with pytest.raises(UserError, match="no shape"):
        search(RUN, asked("8x2ktps:0.005GB"))


# -- the run file ------------------------------------------------------------------------------------


def test_the_written_run_is_the_creators_own_in_the_shape_that_was_found(tmp_path):
    typed = tmp_path / "mine.yaml"
    typed.write_text((CONFIGS / "demo-run.yaml").read_text() + "# my own remark\n")
    run = load_manifest(typed, PeerId(""), {})
    found = search(run, asked("12x20ktps@20/2", tokens=10**8))
    best = found.found[0]
    text = text_of(found, run, typed)
    written = tmp_path / "written.yaml"
    written.write_text(text)
    again = load_manifest(written, PeerId(""), {})
    assert again.stages == best.shape.stages
    assert again.rounds.global_batch_tokens == best.shape.round_tokens
    assert again.rounds.max_seconds > 2 * best.answer.round_seconds[0]
    assert again.rounds.contribution_timeout_seconds >= best.exchange_seconds
    assert again.sync.decay_rounds == found.rounds
    assert (again.sync.method == "local-steps") == best.shape.local
    assert again.sync.inner_batch_tokens == best.shape.inner_batch_tokens
    assert (again.model, again.data.sources) == (run.model, run.data.sources)
    assert sentence(found) in text
    assert "my own remark" in text


def test_the_command_writes_once_and_never_over_anything(swarmnet, tmp_path):
    run, out = str(CONFIGS / "demo-run.yaml"), tmp_path / "found.yaml"
    shape = "plan", run, "--peers", "6x2ktps@100/10:8GB", "--tokens", "1000000", "--shape"
    code, said, _ = swarmnet(*shape, "--out", str(out))
    assert code == 0
    assert said.startswith("alone ")
    before = out.read_text()
    refused(swarmnet(*shape, "--out", str(out)), "never overwritten")
    assert out.read_text() == before
    refused(swarmnet("plan", run, "--peers", "6x2ktps", "--out", str(out)), "--shape")
