"""A peer beside a plain loop: both do the same work, and the command says how fast."""

import re

import pytest
import torch
from model_sizes import model_shape
from swarm import OWNER

from peers.cli import main as cli
from peers.lab.bench.training import Plain, StagesInOneThread, bench, texts_of
from swarmnet.model.state_layout import first_state
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data, Rounds, Sync

SHAPE = model_shape(width=16, layers=2, heads=2, kv_heads=2, inner=32)


def run(stages=(1, 1), **sync):
    return Manifest(
        "m", OWNER.peer_id, stages=stages, model=SHAPE, data=Data(seq_len=16, micro_batch_size=2),
        rounds=Rounds(global_batch_tokens=64), sync=Sync(**sync),
    )  # fmt: skip


def test_the_plain_loop_and_the_peer_find_the_same_gradient():
    manifest = run((2,))
    plain, peer = (
        Plain(manifest=manifest, first=first_state(manifest, 0), inner_batch_tokens=1 << 20),
        StagesInOneThread(manifest),
    )
    for tokens, labels in texts_of(manifest)[:1]:
        plain.microbatch(tokens, labels)
        peer.microbatch(tokens, labels)
    ((work, update),) = peer.stages
    summed = update.stage_compute.use_gradient(torch.clone)
    for entry in update.method.state.entries:
        found = plain.leaves[entry.name].grad * (1 << 20)
        assert torch.allclose(found.flatten(), summed[entry.place], rtol=1e-4, atol=1e-4), entry.name
    assert work.gathered_tokens == 32


@pytest.mark.parametrize("method", ["demo-sign", "local-steps"])
def test_rounds_are_played_and_settle(method):
    peer = StagesInOneThread(run(method=method))
    manifest = run(method=method)
    for tokens, labels in texts_of(manifest)[:12]:
        peer.microbatch(tokens, labels)
    for _, update in peer.stages:
        assert update.replica.applied_round == 5
        assert update.replica.settled_round == 5 - manifest.rounds.window
        assert update.counts.not_finite == 0


def test_its_ratios_are_of_neighbours():
    report = bench(run(method="local-steps"), microbatches=1, repeats=3)
    assert set(report.seconds) == {"plain", "plain-muon", "peer", "stages"}
    first = report.seconds["plain"][0] / report.seconds["peer"][0]
    assert report.ratios("plain", "peer")[0] == first
    for parts in report.parts.values():
        assert 0 < parts.steps < 1
        assert parts.microbatches + parts.steps + parts.rounds == pytest.approx(1.0)


def test_the_command_prints_a_row_for_each_loop(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(
        "stages: [1, 1]\nmodel: "
        "{hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, "
        "num_key_value_heads: 2, head_dim: 8, "
        "intermediate_size: 32}\ndata: {seq_len: 16, micro_batch_size: 2}\n"
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "training", str(tmp_path / "run.yaml"), "--microbatches", "1", "--repeats", "1"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"tokens/s  \d\.\d{3} of plain \(", out)) == 2
