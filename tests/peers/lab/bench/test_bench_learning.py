"""`swarmnet bench learning`: every method learns on the same ground, and what is measured was meant."""

import json
from dataclasses import replace
from math import log

import pytest
import torch
from swarm import TINY_MODEL, corpus
from typed import typing

from peers.lab.bench.learning import trials
from peers.lab.bench.learning.ground import Ground, Texts
from peers.lab.bench.learning.learner import MeanGradient, schedule
from peers.lab.bench.learning.local_steps import (
    Exchange,
    Levels,
    LocalSteps,
    Nesterov,
    Powers,
    Signs,
    TwoMagnitudes,
)
from peers.lab.bench.learning.plain_demo import PlainDemo, _Tiles
from peers.lab.bench.learning.recipes import Recipe, Setting, recipes
from peers.lab.bench.learning.report import activation_bytes, render, row
from peers.lab.bench.learning.rounds import Rounds
from peers.lab.bench.learning.trials import Bench, Kept, Outcome
from peers.tools.model.evaluate import cut
from swarmnet.model.flat_layout import CHUNK
from swarmnet.run.manifest import Data, Manifest

STEPS = 6


def ground(stages=(1, 1, 1), codec="fp32", seed=0):
    manifest = Manifest(
        "tiny", "owner", stages=stages, hidden_codec=codec, model=TINY_MODEL,
        data=Data(sequence_tokens=16, microbatch_sequences=2),
    )  # fmt: skip
    text = corpus()
    held_out = cut(bytes(text[-600:].tolist()), window=16, batch=8)
    return Ground(manifest, Texts(text[:-600], held_out), seed)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_gradient_is_the_same_however_the_model_is_cut():
    cut_in_three, whole = ground(), ground(stages=(3,))
    ours = cut_in_three.gradient(cut_in_three.initial_weights(), peer=1, counter=2)
    theirs = whole.gradient(whole.initial_weights(), peer=1, counter=2)
    assert (ours.tokens, ours.loss) == (theirs.tokens, pytest.approx(theirs.loss, rel=1e-5))
    by_name = {each.name: each for each in whole.parameters}
    for each in cut_in_three.parameters:
        other = by_name[each.name]
        torch.testing.assert_close(
            ours.summed[each.offset : each.offset + each.size],
            theirs.summed[other.offset : other.offset + other.size],
            rtol=1e-3,
            atol=1e-4,
        )


def test_the_held_out_loss_of_untrained_weights_is_that_of_chance():
    here = ground()
    loss = here.held_out_loss(here.initial_weights())
    assert loss == pytest.approx(log(256), rel=0.05)
    assert here.bits_per_byte(loss) == pytest.approx(loss / 0.6931, rel=1e-3), "a token is a byte"


def test_every_method_learns_and_counts_what_it_sends():
    here = ground(codec="bf16")
    untrained = here.held_out_loss(here.initial_weights())
    for name, recipe in recipes(here.manifest.sync).items():
        learner = recipe.make(here, Setting(peers=2, steps=32), recipe.begin_rate)
        for step in range(32):
            learner.step(step)
        assert here.held_out_loss(learner.weights()) < untrained - 0.05, name
        assert learner.sent_bytes > 0, name


def test_peers_that_send_all_they_moved_stand_where_their_mean_stands():
    here = ground()
    learner = LocalSteps(here, 3, "adamw", schedule(4e-3, STEPS), Exchange(2))
    for step in range(STEPS):
        learner.step(step)
        met = step % 2 == 1
        equal = all(torch.equal(live_P, learner.weights()) for live_P in learner._live)
        assert equal == met
    assert learner.sent_bytes == 4 * here.count * (STEPS // 2)


@pytest.mark.parametrize("quantizer", [Signs(), Powers(), TwoMagnitudes(64)])
def test_what_was_not_sent_stays_in_the_live_weights(quantizer):
    here = ground()
    exchange = Exchange(1, kept=64, quantizer=quantizer)
    learner = LocalSteps(here, 2, "adamw", schedule(4e-3, STEPS), exchange)
    for step in range(STEPS):
        before = [live_P.clone() for live_P in learner._live]
        settled = learner.weights()
        learner.step(step)
        moved = learner.weights() - settled
        sent = [live_P + moved - after_P for live_P, after_P in zip(before, learner._live, strict=True)]
        assert all(torch.isfinite(each).all() for each in sent)
        assert not torch.equal(learner._live[0], learner._live[1]), "each has a residual of its own"


@pytest.mark.parametrize("quantizer", [Signs(), Powers(), TwoMagnitudes(64)])
def test_the_live_weights_are_the_settled_ones_and_what_was_not_sent(quantizer):
    learner = LocalSteps(ground(), 2, "adamw", schedule(4e-3, 2), Exchange(2, kept=64, quantizer=quantizer))
    learner.step(0)
    part_N = learner._numbers_P
    deltas = [(live_P - learner.weights())[part_N] for live_P in learner._live]
    learner._meet(0)
    for delta_N, live_P in zip(deltas, learner._live, strict=True):
        rest_N = (live_P - learner.weights())[part_N]
        torch.testing.assert_close(rest_N, delta_N - learner._carried(delta_N), rtol=1e-3, atol=1e-6)


def test_the_parts_of_a_cycle_are_all_numbers_once():
    here = ground()
    for by_layer in (False, True):
        learner = LocalSteps(here, 1, "adamw", schedule(4e-3, 1), Exchange(1, parts=4, by_layer=by_layer))
        parts = torch.cat([learner._part(number) for number in range(4, 8)])
        assert torch.equal(parts.sort().values, learner._numbers_P.sort().values)
    learner = LocalSteps(here, 1, "adamw", schedule(4e-3, 1), Exchange(1, parts=4))
    assert not torch.equal(learner._part(0), learner._part(4)), "another cycle cuts anew"


def test_signs_carry_one_power_of_two_for_each_chunk():
    values = torch.randn(CHUNK + 100, generator=torch.Generator().manual_seed(0))
    carried = Signs().carried(values)
    assert torch.equal(carried.sign(), values.sign())
    for part in (carried[:CHUNK], carried[CHUNK:]):
        (size,) = part.abs().unique().tolist()
        assert size == 0.5 or size == 1.0, "the mean magnitude is 0.8"
    assert Signs().bytes(CHUNK + 100) == -(-(CHUNK + 100 + 2 * 5) // 8)


def test_powers_of_two_are_the_nearest_ones_and_what_is_far_below_is_nothing():
    carried = Powers().carried(torch.tensor([1.0, -0.3, 3.0, 2.0**-9, 0.0]))
    assert carried.tolist() == [1.0, -0.25, 4.0, 0.0, 0.0]


def test_levels_are_whole_multiples_of_a_power_of_two_and_the_more_the_finer():
    drawn = torch.randn(2 * CHUNK, generator=torch.Generator().manual_seed(0))
    coarse, fine = Levels(2).carried(drawn), Levels(4).carried(drawn)
    assert len(fine[:CHUNK].unique()) <= 15
    assert len(coarse[:CHUNK].unique()) <= 3
    step = fine[:CHUNK].abs()[fine[:CHUNK] != 0].min()
    assert float(torch.log2(step)).is_integer()
    assert torch.equal(fine[:CHUNK] / step, torch.round(fine[:CHUNK] / step))
    assert (fine - drawn).norm() < 0.5 * (coarse - drawn).norm()
    assert Levels(4).bytes(CHUNK) < 4 * Signs().bytes(CHUNK)
    assert not Levels(4).carried(torch.zeros(10)).any()


def test_the_outer_step_is_that_of_nesterov():
    outer, part = Nesterov(4), torch.tensor([1, 3])
    first = outer.moved(torch.tensor([1.0, 2.0]), part)
    torch.testing.assert_close(first, torch.tensor([1.0, 2.0]) * 0.7 * 1.9)
    second = outer.moved(torch.tensor([1.0, 2.0]), part)
    torch.testing.assert_close(second, torch.tensor([1.0, 2.0]) * 0.7 * (1 + 0.9 * 1.9))


def test_a_tile_and_its_coefficients_are_one_another():
    here = ground()
    for parameter in here.parameters:
        tiles = _Tiles(parameter, 32)
        values = torch.randn(parameter.size, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(tiles.backward(tiles.forward(values)), values, rtol=1e-4, atol=1e-5)


def test_demo_of_one_peer_that_sends_everything_is_signed_descent():
    here = ground()
    learner = PlainDemo(here, 1, lambda _: 1e-3, kept=CHUNK)
    before = learner.weights()
    gradient = here.gradient(before, 0, 0).summed
    learner.step(0)
    moved = learner.weights() - before
    large = gradient.abs() > gradient.abs().mean()  # Of the others the transform rounds the sign away.
    assert (moved[large].sign() == -gradient[large].sign()).float().mean() > 0.99


def test_the_products_rounds_are_those_of_a_replica_and_wait_for_their_delay():
    here = ground()
    at_once, later = (Rounds(here, 2, here.manifest.sync, 4e-3, STEPS, delay) for delay in (0, 1))
    began = at_once.weights()
    for learner in (at_once, later):
        learner.step(0)
    assert not torch.equal(at_once.weights(), began)
    assert torch.equal(later.weights(), began)
    later.step(1)
    assert not torch.equal(later.weights(), began)


def test_a_mean_gradient_of_equal_peers_is_that_of_one():
    here = ground()
    one, two = (MeanGradient(here, peers, "adamw", schedule(4e-3, 2)) for peers in (1, 2))
    here.gradient, theirs = lambda weights_P, peer, counter: theirs(weights_P, 0, counter), here.gradient
    for learner in (one, two):
        learner.step(0)
    torch.testing.assert_close(one.weights(), two.weights(), rtol=1e-5, atol=1e-7)


def bench_of(tmp_path, monkeypatch, losses):
    """A bench whose trials end at once with the loss of their rate."""
    played = []

    def play(trial, recipe, ground, said):
        played.append(trial.rate)
        return Outcome(trial, losses(trial.rate), 1.0, 100, 1000, 1.0, ())

    monkeypatch.setattr(trials, "play", play)
    here = Bench(lambda seed: None, Kept(tmp_path / "t.jsonl"), "run", "text", 2, 10, 0, lambda *_: None)
    return here, played


def test_the_best_rate_has_worse_neighbours_on_both_sides(tmp_path, monkeypatch):
    here, played = bench_of(tmp_path, monkeypatch, lambda rate: abs(torch.tensor(rate / 0.016).log2().item()))
    rate, tried = here.best_rate("x", Recipe(lambda *_: None, 4e-3, ""))
    assert rate == 0.016
    assert sorted(played) == [0.002, 0.004, 0.008, 0.016, 0.032] or sorted(played) == [
        0.004,
        0.008,
        0.016,
        0.032,
    ]
    assert len(tried) == len(played)


def test_what_was_played_is_not_played_again_and_half_a_line_is_no_trial(tmp_path, monkeypatch):
    here, played = bench_of(tmp_path, monkeypatch, lambda rate: rate)
    first = here.played("x", Recipe(lambda *_: None, 1.0, ""), 1.0, 0)
    with (tmp_path / "t.jsonl").open("a") as file:
        file.write('{"trial": {"run_id"')
    again = replace(here, kept=Kept(tmp_path / "t.jsonl"))
    assert again.played("x", Recipe(lambda *_: None, 1.0, ""), 1.0, 0) == first
    assert played == [1.0]


def test_the_table_names_what_each_method_costs_beside_adamw(tmp_path, monkeypatch):
    here, _ = bench_of(tmp_path, monkeypatch, lambda rate: 2.0 + rate)
    rows = [
        row(
            name,
            "what it is",
            1,
            [here.played(name, Recipe(lambda *_: None, rate, ""), rate, seed) for seed in (0, 1)],
        )
        for name, rate in (("adamw", 0.0), ("ours", 0.2))
    ]
    from peers.lab.bench.learning.report import Report

    told = render(Report("tiny", 100, 1000, 2, 0, 2, activation_bytes(ground().manifest), tuple(rows)))
    assert "+10.0%" in told
    assert told.index("adamw") < told.index("ours")


def test_the_command_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    command = typing(capsys, monkeypatch)
    (tmp_path / "tiny.yaml").write_text(
        "name: tiny\nstages: [1]\nmodel: {width: 32, layers: 1, heads: 2, key_value_heads: 2, head_width: 16,"
        " feed_forward: 64, context: 32}\ndata: {sequence_tokens: 32, microbatch_sequences: 1}\n"
    )
    words = ["bench", "learning", tmp_path / "tiny.yaml", "--tokens", "128", "--seeds", "1", "--peers", "2",
             "--rate", "4e-3", "--method", "adamw", "--method", "run", "--out", tmp_path / "out"]  # fmt: skip
    code, told, _ = command(*words)
    assert (code, "adamw" in told) == (0, True)
    kept = (tmp_path / "out/tiny/trials.jsonl").read_text()
    assert command(*words)[1] == told
    assert (tmp_path / "out/tiny/trials.jsonl").read_text() == kept
    rows = json.loads((tmp_path / "out/tiny/report.json").read_text())["rows"]
    assert [each["method"] for each in rows] == ["adamw", "run"]


def test_a_method_that_there_is_not_is_bad_input(tmp_path, monkeypatch, capsys):
    command = typing(capsys, monkeypatch)
    (tmp_path / "tiny.yaml").write_text("name: tiny\n")
    code, _, told = command("bench", "learning", tmp_path / "tiny.yaml", "--method", "adamW")
    assert code == 2
    assert "no method is called adamW; there are adamw, muon, demo" in told
    assert [each.name for each in tmp_path.iterdir()] == ["tiny.yaml"]
