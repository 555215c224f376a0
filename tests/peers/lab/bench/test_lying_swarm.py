"""Liars in a swarm of real workers, as `swarmnet bench work --swarm` plays it: small, and with every window
looked into."""

from __future__ import annotations

import pytest
import torch
from swarm import corpus

from peers.errors import UserError
from peers.lab.bench.learning.ground import Texts
from peers.lab.bench.work import price, swarm
from peers.lab.bench.work.price import bench as bench_price
from peers.lab.bench.work.swarm import COLLUDING, Question, bench, rows
from peers.tools.model.evaluate import Windows

RUN = """
name: liars
stages: [1]
model: {width: 32, layers: 1, heads: 2, key_value_heads: 2, head_width: 16, feed_forward: 64}
data: {sequence_tokens: 16, microbatch_sequences: 2}
rounds: {target_tokens: 512}
sync: {method: local-steps, learning_rate: 1e-2, afresh_rounds: 2, audits: 1.0, fee: 4}
"""


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    text = corpus()
    window = text[:17].long()[None]
    held_out = Windows(b"", 16, ((window[:, :-1], window[:, 1:]),))
    for module in (swarm, price):
        monkeypatch.setattr(module, "read_texts", lambda *_: Texts(text, held_out))
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_liars_are_out_by_what_settles_and_the_honest_are_not(run_file):
    honest, carrier, colluding = bench(Question(run_file, ("carrier", COLLUDING), 5, 1, 44, seed=2))
    assert (honest.liars, honest.honest_out, honest.out) == (0, 0, {})
    for played in (carrier, colluding):
        assert len(played.out) == 1, played
        assert played.honest_out == 0
        assert played.of_false["lied"] > 0
        assert played.of_false["agrees"] == 0, "whoever looks into a lie finds it"
        assert played.verdicts["lied"] == 0, "and nobody else is accused"
        assert played.verdicts["agrees"] > 0
    lines = list(rows([honest, carrier]))
    assert "| carrier | 1 of 1 |" in lines[-1]
    assert honest.head_bytes > 200


def test_who_lies_like_nobody_is_a_mistake(run_file):
    with pytest.raises(UserError, match="nobody lies like truth"):
        next(bench(Question(run_file, ("truth",), 5, 1, 10)))


def test_what_audits_cost_is_said_beside_the_same_swarm_without(run_file):
    none, some = bench_price(price.Question(run_file, 3, 6, 1))
    assert (none.audits, none.spent.audits, none.spent.replay_seconds) == (0.0, 0, 0.0)
    assert none.spent.sent["audit"] == 0
    assert some.spent.audits > 0
    assert 0 < some.spent.replay_seconds < some.spent.computing_seconds < some.spent.processor_seconds
    assert 0 < some.spent.sent["audit"] < some.spent.sent["contribution"]
    assert none.head_bytes < some.head_bytes < some.contribution_bytes
    *_, last = price.rows(iter([none, some]))
    assert "replays" in last


def test_where_nothing_is_audited_there_is_no_price(run_file):
    run_file.write_text(RUN.replace("audits: 1.0, fee: 4", "audits: 0"))
    with pytest.raises(UserError, match="nothing is audited there"):
        next(bench_price(price.Question(run_file, 3, 6, 1)))
