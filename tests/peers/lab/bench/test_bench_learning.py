"""`swarmnet bench learning`: every method learns on the same ground, and what is measured was meant."""

import json
import os
from concurrent.futures import Future
from dataclasses import replace
from math import log, log2
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from swarm import TINY_MODEL, corpus
from typed import typing

from peers.config.errors import UserError
from peers.lab.bench.learning import trials
from peers.lab.bench.learning.ground import BenchTexts, Ground
from peers.lab.bench.learning.learning_report import activation_bytes, render, row
from peers.lab.bench.learning.liars import Liars, LieKind, Lies
from peers.lab.bench.learning.plain_demo import PlainDemo
from peers.lab.bench.learning.play_rounds import BenchRounds
from peers.lab.bench.learning.played import player
from peers.lab.bench.learning.rate_search import MAX_PAIRS, carried_out, plan
from peers.lab.bench.learning.recipes import Setting, recipes
from peers.lab.bench.learning.text_split import TextSplit
from peers.lab.bench.learning.trials import Outcome, Rates, StoredTrials, Trial
from peers.tools.model.evaluate import cut
from swarmnet.identifiers import PeerId, RunId
from swarmnet.model.flat_layout import CHUNK
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data, Paths, Sync

STEPS = 6


def ground(stages=(1, 1, 1), codec="fp32", seed=0):
    manifest = Manifest(
        "tiny", "owner", stages=stages, activation_codec=codec, model=TINY_MODEL,
        data=Data(seq_len=16, micro_batch_size=2),
    )  # fmt: skip
    text = corpus()
    held_out = cut(bytes(text[-600:].tolist()), window=16, batch=8)
    return Ground(manifest=manifest, texts=BenchTexts((text[:-600],), held_out), seed=seed)


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


VARIANTS = {
    "votes-group", "float-demo-paper", "local-steps-2", "local-steps-1", "local-steps-1-gain",
    "local-steps-adamw", "local-steps-feedback", "average-h8", "average-h8-muon", "diloco-h8-muon",
    "diloco-h30", "diloco-h30-muon", "sign-muon-1", "sign-muon-8", "sign-muon-16",
    "sparse-loco-h30", "sparse-loco-h30-muon",
}  # fmt: skip
"""Of a method that learns here anyway, in other settings."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.soak] * (name in VARIANTS)) for name in recipes(Sync())],
)
def test_every_method_learns_and_counts_what_it_sends(name):
    here = ground(codec="bf16")
    untrained = here.held_out_loss(here.initial_weights())
    recipe = recipes(here.manifest.sync)[name]
    steps = 32 if recipe.local_steps > 8 else 16  # Rounds of thirty steps need one.
    learner = recipe.make(here, Setting(peers=2, steps=steps), recipe.begin_rate)
    for step in range(steps):
        learner.step(step)
    assert here.held_out_loss(learner.weights()) < untrained - 0.05
    assert learner.sent_bytes > 0


def test_the_variants_are_recipes():
    assert recipes(Sync()).keys() >= VARIANTS


@pytest.mark.slow
def test_signs_of_a_quarter_of_muons_direction_learn_more_in_as_many_rounds_than_votes_on_coefficients():
    """Four peers, each method at its best of three rates: 3.75 and 3.88 after 64 rounds."""
    here = ground(stages=(3,))
    losses = {}
    for name, rate in (("sign-muon-4", 3.2e-2), ("votes-group", 1.6e-2)):
        learner = recipes(here.manifest.sync)[name].make(here, Setting(peers=4, steps=64), rate)
        for step in range(64):
            learner.step(step)
        losses[name] = here.held_out_loss(learner.weights())
    assert losses["sign-muon-4"] < losses["votes-group"] - 0.05


def test_demo_of_one_peer_that_sends_everything_is_signed_descent():
    here = ground()
    learner = PlainDemo(ground=here, peers=1, rate=lambda _: 1e-3, kept=CHUNK)
    before = learner.weights()
    gradient = here.gradient(before, 0, 0).summed
    learner.step(0)
    moved = learner.weights() - before
    large = gradient.abs() > gradient.abs().mean()  # Of the others the transform rounds the sign away.
    assert (moved[large].sign() == -gradient[large].sign()).float().mean() > 0.99


def test_the_products_rounds_are_those_of_a_replica_and_wait_for_their_delay():
    here = ground()
    at_once, later = (
        BenchRounds(ground=here, peers=2, sync=here.manifest.sync, peak=4e-3, steps=STEPS, delay=delay)
        for delay in (0, 1)
    )
    began = at_once.weights()
    for learner in (at_once, later):
        learner.step(0)
    assert not torch.equal(at_once.weights(), began)
    assert torch.equal(later.weights(), began)
    later.step(1)
    assert not torch.equal(later.weights(), began)


def test_who_is_away_computes_nothing_for_a_third_and_comes_back():
    here = ground()
    learner, computed, gradient = (
        BenchRounds(ground=here, peers=2, sync=here.manifest.sync, peak=4e-3, steps=STEPS, away=1),
        [],
        here.gradient,
    )

    def noted(weights, peer, counter):
        computed.append((peer, counter))
        return gradient(weights, peer, counter)

    here.gradient = noted
    for step in range(STEPS):
        learner.step(step)
    assert computed == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (0, 3), (0, 4), (1, 4), (0, 5), (1, 5)]


def test_what_comes_late_moves_the_weights_a_round_later():
    here = ground()
    in_time, late = (
        BenchRounds(ground=here, peers=2, sync=here.manifest.sync, peak=4e-3, steps=STEPS, late=share)
        for share in (0.0, 1.0)
    )
    began = late.weights()
    in_time.step(0)
    late.step(0)
    assert torch.equal(late.weights(), began)
    late.step(1)
    assert not torch.equal(late.weights(), began)
    torch.testing.assert_close(late.weights(), in_time.weights(), rtol=0, atol=0)


def test_microbatches_leave_out_as_many_stages_as_the_run_says():
    here = ground(stages=(1, 1, 1))
    skipping = Ground(
        manifest=replace(here.manifest, paths=Paths(skip_ratio=0.34)), texts=here._texts, seed=0
    )
    found = skipping.gradient(here.initial_weights(), 0, 0).summed
    assert not found[skipping.slices[1]].any(), "nobody visited it"
    assert found[skipping.slices[0]].any()
    assert found[skipping.slices[2]].any()


def test_an_own_step_is_of_as_many_microbatches_as_the_run_says_and_a_round_of_as_many_steps():
    here = ground()
    sync = Sync(method="local-steps", inner_batch_tokens=2 * here.manifest.microbatch_tokens)
    learner = recipes(sync)["local-steps"].make(here, Setting(peers=1, steps=32), 4e-3)
    own, stepped = learner._methods[0][0].own, []
    step = own.step

    def noted(gradient, tokens, *more):
        stepped.append(tokens)
        step(gradient, tokens, *more)

    own.step = noted
    for number in range(16):
        learner.step(number)
    assert stepped == [sync.inner_batch_tokens] * 8
    assert learner.sent_bytes == sum(method.payload_bytes for method in learner._methods[0]), "one round"


def outcome_of(rates, loss, name="x", seed=0):
    trial = Trial(
        run_id="run", text="text", peers=2, steps=10,
        method=name, rate=rates.rate, outer_lr=rates.outer, seed=seed,
    )  # fmt: skip
    return Outcome(trial, loss, 1.0, 100, 1000, 1.0, ())


def far(value, best):
    """In doublings."""
    return abs(log2(value / best))


def carried_out_alone(plan, losses):
    """What comes of a plan whose trials have the loss of their rates, and in what order it asked for them."""
    asked = []

    def begin(name, rates, seed):
        asked.append((rates, seed))
        future = Future()
        future.set_result(outcome_of(rates, losses(rates), name, seed))
        return future

    return carried_out({"x": plan}, 1, begin)["x"], asked


def test_the_best_rate_has_worse_neighbours_on_both_sides_and_all_seeds_are_played_at_it():
    found, asked = carried_out_alone(
        plan(Rates(4e-3), 2, searches=True), lambda rates: far(rates.rate, 0.016)
    )
    assert [rates.rate for rates, _ in asked[:-2]] == [0.004, 0.008, 0.016, 0.032]
    assert asked[-2:] == [(Rates(0.016), 0), (Rates(0.016), 1)]
    assert found.rates_tried == 4
    assert [(each.trial.rate, each.trial.seed) for each in found.outcomes] == [(0.016, 0), (0.016, 1)]


def test_the_rates_inside_and_outside_are_searched_for_together():
    """The loss depends mostly on their product: along either rate alone, a start in the valley looks best."""
    found, asked = carried_out_alone(
        plan(Rates(2e-3, 0.7), 1, searches=True),
        lambda rates: 4 * far(rates.rate * rates.outer, 1.4e-3) + far(rates.rate, 16e-3),
    )
    assert found.outcomes[0].trial.rate == 16e-3
    assert found.outcomes[0].trial.outer_lr == pytest.approx(0.0875)
    assert found.rates_tried == len({rates for rates, _ in asked}) <= MAX_PAIRS


def test_many_plans_at_a_time_ask_for_what_each_would_alone():
    wanted = {"low": 2e-3, "high": 0.032, "there": 4e-3}
    under_way = []

    def begin(name, rates, seed):
        under_way.append((name, rates, seed, Future()))
        return under_way[-1][-1]

    def end_some():
        """The newest first, so that nothing ends in the order in which it began."""
        while not ended.is_set() or under_way:
            if not under_way:
                ended.wait(0.001)
                continue
            name, rates, seed, future = under_way.pop()
            future.set_result(outcome_of(rates, far(rates.rate, wanted[name]), name, seed))

    ended, ends = Event(), Thread(target=end_some)
    ends.start()
    try:
        found = carried_out({name: plan(Rates(4e-3), 2, searches=True) for name in wanted}, 2, begin)
    finally:
        ended.set()
        ends.join()
    for name, best in wanted.items():
        alone, _ = carried_out_alone(
            plan(Rates(4e-3), 2, searches=True), lambda rates, best=best: far(rates.rate, best)
        )
        assert found[name].rates_tried == alone.rates_tried, name
        assert [each.loss for each in found[name].outcomes] == [each.loss for each in alone.outcomes], name


def test_what_was_kept_is_found_again_and_half_a_line_is_no_trial(tmp_path):
    first = outcome_of(Rates(1.0), 2.0)
    StoredTrials(tmp_path / "t.jsonl").keep(first)
    with (tmp_path / "t.jsonl").open("a") as file:
        file.write('{"trial": {"run_id"')
    again = StoredTrials(tmp_path / "t.jsonl")
    assert again.find(first.trial) == first
    assert again.find(replace(first.trial, seed=1)) is None


def test_the_table_names_what_each_method_costs_beside_adamw():
    rows = [
        row(name, "what it is", 8, 1, [outcome_of(Rates(1.0), loss, name, seed) for seed in (0, 1)])
        for name, loss in (("adamw", 2.0), ("ours", 2.2))
    ]
    from peers.lab.bench.learning.learning_report import LearningReport

    activations = activation_bytes(ground().manifest)
    told = render(LearningReport("tiny", 100, 1000, 2, 0, 0, 0.0, "", "", 1, 2, activations, tuple(rows)))
    assert "+10.0%" in told
    assert told.index("adamw") < told.index("ours")


def test_the_table_says_what_votes_weigh_for_honest_peers_liars_and_owners():
    from peers.lab.bench.learning.learning_report import LearningReport

    trial = outcome_of(Rates(1.0), 2.0, "sign-muon-4")
    seeds = [replace(trial, vote_weights=weights) for weights in ((1.0, 0.8, 1.0, 0.1), (1.0, 0.9, 0.8, 0.3))]
    rows = (row("sign-muon-4", "", 0, 1, seeds), row("adamw", "", 0, 1, [trial]))
    told = render(LearningReport("tiny", 100, 1000, 4, 1, 0, 0.0, "1:flip", "1:9", 2, 2, 0.0, rows))
    assert "text of 2 owners: 1:9" in told
    assert told.endswith(
        "weights of votes, sign-muon-4: honest peers 0.917, lowest 0.850, liars 0.200, "
        "peers of each owner 0.950, 0.850"
    )


def test_on_the_front_is_who_learns_more_than_all_that_send_as_little():
    from peers.lab.bench.learning.learning_report import LearningReport, _front

    told = {"adamw": (2.0, 1000), "ours": (1.9, 10), "less": (2.1, 1), "more": (2.2, 99), "muon": (1.8, 1000)}
    rows = [
        row(name, "", 0, 1, [replace(outcome_of(Rates(1.0), loss, name), sent_bytes=sent)])
        for name, (loss, sent) in told.items()
    ]
    found = _front(LearningReport("tiny", 100, 1000, 2, 0, 0, 0.0, "", "", 1, 1, 0.0, tuple(rows)))
    assert [each.method for each in found] == ["less", "ours", "muon"]


TINY_RUN = (
    "name: tiny\nstages: [1]\nmodel: "
    "{hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 16,"
    " intermediate_size: 64, max_position_embeddings: 32}\ndata: {seq_len: 32, micro_batch_size: 1}\n"
)


def asking(tmp_path, *words):
    return [
        "bench",
        "learning",
        tmp_path / "tiny.yaml",
        "--tokens",
        "128",
        "--peers",
        "2",
        "--rate",
        "4e-3",
        "--method",
        "adamw",
        "--method",
        "run",
        *words,
    ]


def test_the_command_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    command = typing(capsys, monkeypatch)
    (tmp_path / "tiny.yaml").write_text(TINY_RUN)
    words = asking(tmp_path, "--seeds", "1", "--out", tmp_path / "out")
    code, told, _ = command(*words)
    assert (code, "adamw" in told) == (0, True)
    kept = (tmp_path / "out/tiny/trials.jsonl").read_text()
    assert command(*words)[1] == told
    assert (tmp_path / "out/tiny/trials.jsonl").read_text() == kept
    rows = json.loads((tmp_path / "out/tiny/report.json").read_text())["rows"]
    assert [each["method"] for each in rows] == ["adamw", "run"]


def test_a_process_that_is_killed_is_said_in_words():
    dying = SimpleNamespace(ground=os._exit)  # Of the trial's seed.
    with pytest.raises(UserError, match="a smaller --jobs"), player(dying, 2, lambda *_: None) as play:
        play(outcome_of(Rates(1.0), 0.0, seed=1).trial).result()


def test_a_method_that_there_is_not_is_bad_input(tmp_path, monkeypatch, capsys):
    command = typing(capsys, monkeypatch)
    (tmp_path / "tiny.yaml").write_text("name: tiny\n")
    code, _, told = command("bench", "learning", tmp_path / "tiny.yaml", "--method", "adamW")
    assert code == 2
    assert "no method is called adamW; there are adamw, muon, demo" in told
    assert [each.name for each in tmp_path.iterdir()] == ["tiny.yaml"]


def test_the_curve_of_a_demo_is_read_from_its_report_and_nothing_else_is_one(tmp_path):
    from peers.lab.bench.learning.learning_report import demo_curve

    file = tmp_path / "calm.json"
    file.write_text(json.dumps({"curve": [[512, 5.0], [1024, 4.5]]}))
    assert demo_curve(file) == [(512, 5.0), (1024, 4.5)]
    for other in ("{}", "[]", "no JSON", '{"curve": [[1]]}'):
        file.write_text(other)
        with pytest.raises(UserError, match="is no report of a demo"):
            demo_curve(file)


def test_a_trial_keeps_what_training_cost_on_its_way():
    here = ground(stages=(3,))
    recipe = recipes(here.manifest.sync)["adamw"]
    trial = Trial(run_id="run", text="text", method="adamw", rate=4e-3, seed=0, peers=2, steps=32)
    outcome = trials.play(trial, recipe, here, lambda done: None)
    told = [point.trained for point in outcome.curve]
    assert len(told) == trials.POINTS
    assert told[0] == pytest.approx(log(256), rel=0.1)
    assert told[-1] < told[0], "it learns"


def test_a_trial_has_one_length(swarmnet, tmp_path):
    run, out = Path(__file__).parents[4] / "configs" / "demo-run.yaml", tmp_path / "out"
    lengths = "--tokens", "1000", "--microbatches", "10"
    code, _, said = swarmnet("bench", "learning", str(run), *lengths, "--out", str(out))
    assert code == 2
    assert "leave one of them out" in said
    assert not out.exists()


LIE_KINDS = get_args(LieKind)


@pytest.mark.parametrize("kind", LIE_KINDS)
def test_liars_replace_their_own_contributions_only(kind):
    names = [PeerId(f"peer {number}") for number in range(4)]
    lies = Lies(Liars.parse(f"2:{kind}", 4), names, rounds=8, fragments=2, seed=0)
    honest = {peer: bytes([number] * 64) for number, peer in enumerate(names)}
    made = [
        lies.replace(0, round, {who: bytes([round]) + of for who, of in honest.items()}) for round in range(8)
    ]
    assert all(made[round][who] == bytes([round]) + honest[who] for round in range(8) for who in names[:2])
    told = [made[round][names[2]] for round in range(8)]
    own = [bytes([round]) + honest[names[2]] for round in range(8)]
    assert (told[0] == own[0]) == (kind in ("lazy", "repeat", "honest-first"))
    assert (told[7] == own[7]) == (kind == "lazy")
    assert len({*map(len, told)}) == 1
    if kind == "slow-flip":
        wrong = [
            sum((a ^ b).bit_count() for a, b in zip(*pair, strict=True)) / (8 * len(pair[0]))
            for pair in zip(told, own, strict=True)
        ]
        assert wrong == sorted(wrong)
        assert 0 < wrong[0] < 0.25 < wrong[4] < 0.85 < wrong[7] == 1
    assert (told[7] == made[7][names[3]]) == (kind in ("zero", "copy", "collude"))


def test_owners_have_unequal_text_and_their_peers_train_on_it_in_turn():
    sources = [torch.arange(1110), torch.arange(5000, 5200)]
    assert [len(part) for part in TextSplit.parse("").cut(sources, 17)] == [1310]
    small, middle, large = TextSplit.parse("1:10:100").cut(sources[:1], 10)
    assert (len(small), len(middle), len(large)) == (10, 100, 1000)
    assert torch.equal(torch.cat([small, middle, large]), sources[0])
    assert TextSplit.parse("kinds").cut(sources, 17) == tuple(sources)
    first, second = TextSplit.parse("kinds:1:10").cut(sources, 17)
    assert (first.tolist(), second.tolist()) == (list(range(20)), list(range(5000, 5200)))

    here = ground(stages=(3,))
    halves = TextSplit.parse("1:1").cut([*here._texts.owners], 17)
    apart = Ground(manifest=here.manifest, texts=BenchTexts(halves, here._texts.held_out), seed=0)
    weights = here.initial_weights()
    for peer in range(4):
        alone = Ground(
            manifest=here.manifest, texts=BenchTexts((halves[peer % 2],), here._texts.held_out), seed=0
        )
        assert torch.equal(apart.gradient(weights, peer, 3).summed, alone.gradient(weights, peer, 3).summed)


def test_all_peers_may_train_on_the_pool_or_on_one_owners_text():
    texts = [torch.arange(100), torch.arange(1000, 1300)]
    owners = TextSplit.parse("kinds:1:2").cut(texts, 17)
    assert [len(tokens) for tokens in owners] == [100, 200]
    (pool,) = TextSplit.parse("kinds:1:2/pooled").cut(texts, 17)
    assert torch.equal(pool, torch.cat(owners))
    (alone,) = TextSplit.parse("kinds:1:2/1").cut(texts, 17)
    assert torch.equal(alone, owners[1])
    with pytest.raises(UserError, match="there is no owner 2, only 0 to 1"):
        TextSplit.parse("kinds:1:2/2").cut(texts, 17)


@pytest.mark.parametrize(
    "text", ["1", "1:0", "kind", "kinds:3", "1:x", "1::2", "/pooled", "1:2/", "1:2/all", "kinds/-1"]
)
def test_a_split_that_cannot_be_says_how_one_is_written(text):
    with pytest.raises(UserError, match=f"--split {text}: write the sizes of the owners' texts, such as"):
        TextSplit.parse(text)


def test_a_split_that_does_not_fit_the_text_is_refused():
    with pytest.raises(UserError, match="owner 0 has 9 tokens where one sequence takes 17"):
        TextSplit.parse("1:10").cut([torch.arange(100)], 17)
    with pytest.raises(UserError, match="2 sizes where the run has 1 sources"):
        TextSplit.parse("kinds:1:10").cut([torch.arange(100)], 17)


@pytest.mark.parametrize("text", ["2", "0:flip", "4:flip", "two:flip", "2:shout"])
def test_liars_that_cannot_be_are_named_with_those_that_can(text):
    with pytest.raises(UserError, match="write N:KIND, with N below the 4 peers and KIND one of flip, noise"):
        Liars.parse(text, 4)


@pytest.mark.parametrize("peers", [1, 2, 3, 4])
def test_small_groups_learn_with_weights_by_agreement_as_without_to_the_bit(peers, monkeypatch):
    monkeypatch.setattr(
        Manifest, "run_id", lambda _: RunId("0" * 64)
    )  # It seeds the votes that chance decides.
    here, learned = ground(stages=(1, 2)), []
    for weights in ("equal", "agreement"):
        sync = replace(here.manifest.sync, method="sign-muon", weights=weights)
        learner = recipes(sync)["sign-muon-1"].make(here, Setting(peers=peers, steps=16, delay=1), 3.2e-2)
        for step in range(16):
            learner.step(step)
        learned.append(learner.weights())
    assert torch.equal(*learned)
    assert learner.vote_weights == (1.0,) * peers
    assert not torch.equal(learned[0], here.initial_weights())


@pytest.mark.soak
@pytest.mark.parametrize("topology", ["all-gather", "sharded-reduce"])
def test_with_weights_by_agreement_liars_cost_less(topology):
    """Eight peers, three of which turn their signs: the loss is nearer to that of the five."""
    here, losses = ground(stages=(3,)), {}
    for name, weights, peers, liars in (
        ("equal", "equal", 8, "3:flip"),
        ("agreement", "agreement", 8, "3:flip"),
        ("honest", "equal", 5, ""),
    ):
        sync = replace(here.manifest.sync, method="sign-muon", topology=topology, weights=weights, shards=3)
        learner = recipes(sync)["sign-muon-1"].make(here, Setting(peers=peers, steps=40, liars=liars), 3.2e-2)
        for step in range(40):
            learner.step(step)
        losses[name] = here.held_out_loss(learner.weights())
        if name == "agreement":  # All count in full in the first rounds, a quarter of this trial.
            assert min(learner.vote_weights[:5]) > 0.9
            assert max(learner.vote_weights[5:]) < 0.5
        else:
            assert not learner.vote_weights
    assert losses["agreement"] - losses["honest"] < (losses["equal"] - losses["honest"]) / 2
