"""The configurations of sync methods: they read the keys of `sync`, and estimate a contribution."""

from dataclasses import fields, replace

import pytest

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import sizes_of, trained_layout
from swarmnet.optimizer.method import method_of
from swarmnet.run.manifest import Manifest
from swarmnet.run.method_config import StageSizes
from swarmnet.run.schema import ModelShape, Sync
from swarmnet.run.sync_methods import (
    DEFAULT_METHOD,
    METHOD_CONFIGS,
    OUTER_METHODS,
    PRESETS,
    meaning_of_methods,
)

FACTS = {"meaning", "value_bits", "votes_on_matrices", "is_steady", "small_model_rate"}
"""Fields of configurations that no run file can set."""
OF_METHODS = {"inner_optimizer", "fragments", "delta_codec", "residual", "outer_lr"}
"""Keys whose default stands for the method's own value."""
KEYS = {key.name: key.default for key in fields(Sync)}


@pytest.mark.parametrize("config", METHOD_CONFIGS.values(), ids=METHOD_CONFIGS)
def test_a_field_of_a_configuration_is_a_fact_of_the_method_or_a_key_with_its_default(config):
    read = config.read(Sync().keys)
    names = {field.name for field in fields(config)}
    assert names - FACTS <= set(KEYS)
    for name in names - FACTS - OF_METHODS:
        assert getattr(read, name) == KEYS[name]
    assert config.read(Sync().keys) == read == config, "the defaults of keys are those of the method"


def test_a_run_file_sets_the_fields_of_its_method():
    assert Sync(method="hybrid", rank=8).config.rank == 8
    assert Sync(method="sparta", fragments=2).config.fragments == 2
    assert Sync(method="diloco", outer_momentum=0.0).config.outer_momentum == 0.0
    assert Sync(method="local-steps", outer_lr=1.4).local_steps.outer_thousandths == (1400, 0)
    assert Sync().config == METHOD_CONFIGS[DEFAULT_METHOD]


@pytest.mark.parametrize("name", METHOD_CONFIGS)
def test_the_estimate_of_a_contribution_is_close_to_its_bytes(name):
    """With four layers, the unequal fragments of `sign-muon` level out."""
    shape = ModelShape(hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8)
    run = Manifest("size", PeerId("owner"), stages=(4,), model=shape, sync=Sync(method=name))
    layout = trained_layout(run, 0)
    estimated = run.sync.config.contribution_bytes(sizes_of(layout, run.model.experts))
    assert estimated == pytest.approx(method_of(run, layout).payload_bytes, rel=0.1)


@pytest.mark.parametrize(
    ("keys", "is_small", "expected"),
    [
        ({}, True, 1000),
        ({}, False, 400 + 2 * 600),
        ({"delta_codec": "int8"}, True, 400 + 4 * 600),
        ({"topology": "sharded-reduce"}, False, 1000 + 1000 / 2),
        ({"residual": "drop"}, False, 4 * 500 + 500),
        ({"residual": "drop", "topology": "sharded-reduce"}, False, 4 * 500 + 500 + 1000 / 2),
    ],
)
def test_an_open_round_of_local_steps_takes_one_byte_for_sums_of_few_and_a_float_for_own_deltas(
    keys, is_small, expected
):
    sizes = StageSizes(all=1000, trained=500, few=400, matrices=())
    config = Sync(method="local-steps", **keys).config
    for fragments in (1, 4):
        kept = replace(config, fragments=fragments).kept_bytes(sizes, 4, is_small)
        assert kept == 4 * expected / fragments, "a round covers one fragment"


def test_the_documentation_has_each_method_and_says_once_what_local_steps_are():
    meaning = meaning_of_methods()
    assert all(f"`{name}`: " in meaning for name in METHOD_CONFIGS)
    assert meaning.count("The others are local-step methods") == 1
    assert set(OUTER_METHODS) <= set(PRESETS) <= set(METHOD_CONFIGS)
