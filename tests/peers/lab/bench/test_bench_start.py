"""`swarmnet bench learning` from a model that exists: LoRA beside all weights, on answers alone."""

import json
from dataclasses import replace

import pytest
import torch
from chats import VOCABULARY, chat_folder, riddles, write_lines
from public_models import LLAMA, save

from peers.compute.stage_part import CPU
from peers.lab.bench.learning.bench import BenchConfig, bench
from peers.lab.bench.learning.played import TrialSubject
from swarmnet.model.fixed_point import to_floats

SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "base", replace(LLAMA, vocab_size=VOCABULARY))
    chat_folder(tmp_path)
    write_lines(tmp_path / "talks.jsonl", riddles(120))
    write_lines(tmp_path / "held.jsonl", riddles(10, seed=1))
    data = {
        "format": "messages", "tokenizer": "tokenizer.json", "seq_len": 32, "micro_batch_size": 4,
        "sources": [{"name": "talks", "path": "talks.jsonl"}],
    }  # fmt: skip
    for name, lora in (("dense", {}), ("lora", {"lora": {"rank": 2, "alpha": 8}})):
        keys = {
            "stages": [2, 1], "init_checkpoint": {"path": "base"}, "data": data, "model": {**SHAPE, **lora},
            "activation_codec": "fp32",
        }  # fmt: skip
        text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items())
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def test_factors_are_trained_and_sent_alone_and_both_begin_at_the_loss_of_the_model(folder):
    def subject(name):
        return TrialSubject(folder / f"{name}.yaml", folder / "held.jsonl", None, CPU)

    dense, lora = subject("dense").ground(0), subject("lora").ground(0)
    assert lora.count < dense.count / 3
    assert all(".lora_" in each.name for each in lora.parameters)
    losses = [here.held_out_loss(here.initial_weights()) for here in (dense, lora)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5), "factors add nothing at first"
    found = lora.gradient(lora.initial_weights(), 0, 0)
    assert found.summed.isfinite().all()
    assert found.summed.any()
    flat = torch.cat([to_floats(units) for units in lora.initial_units()])
    assert torch.equal(flat, lora.initial_weights())


def test_the_report_has_loss_and_bytes_of_both(folder):
    outcomes = {}
    for name in ("dense", "lora"):
        config = BenchConfig(
            folder / f"{name}.yaml",
            methods=["sign-muon-4"],
            tokens=None,
            microbatches=24,
            seeds=1,
            peers=2,
            delay=1,
            out=folder / name,
            eval_text=folder / "held.jsonl",
            rate=2e-2,
        )
        (outcomes[name],) = bench(config, lambda _trial, _done: None).rows[0].outcomes
        assert bench(config, lambda *_: pytest.fail("it is kept")).rows[0].outcomes[0] == outcomes[name]
    here = TrialSubject(folder / "lora.yaml", folder / "held.jsonl", None, CPU).ground(0)
    began = here.held_out_loss(here.initial_weights())
    assert outcomes["lora"].loss < began - 0.5
    assert outcomes["dense"].loss < began - 0.5
    assert outcomes["lora"].sent_bytes < outcomes["dense"].sent_bytes / 2
