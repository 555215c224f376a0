"""Fragments have each number once, are about equally long, and concern few of the matrices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.model.flat_layout import Entry, block_of
from swarmnet.model.fragments import MAX_GROUPS, cut_fragments


def model(layers, width=64, wide=172, shared=64, table=True):
    """Names and shapes of a Llama-like model."""
    shapes = {"model.embed_tokens.weight": (256, width)} if table else {}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{name}_proj.weight": (width, width) for name in "qo"}
        shapes |= {f"{at}self_attn.{name}_proj.weight": (shared, width) for name in "kv"}
        shapes |= {f"{at}mlp.{name}_proj.weight": (wide, width) for name in ("gate", "up", "down")}
        shapes[f"{at}input_layernorm.weight"] = (width,)
    return shapes | ({"lm_head.weight": (256, width)} if table else {})


def cut(shapes, fragments):
    entries = [Entry(name, shape, 0, block_of(name)) for name, shape in shapes.items()]
    return cut_fragments(entries, list(shapes.values()), fragments)


def lengths(fragments):
    return [sum(len(piece.numbers) for piece in fragment) for fragment in fragments]


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=2), min_size=1, max_size=30),
    st.sampled_from([1, 2, 4, 16, 64]),
)
def test_each_number_is_in_one_fragment_once(shapes, fragments):
    named = {f"model.layers.{number // 3}.m{number}": tuple(shape) for number, shape in enumerate(shapes)}
    found = cut(named, fragments)
    assert len(found) == fragments
    numbers = [
        (piece.parameter, number) for fragment in found for piece in fragment for number in piece.numbers
    ]
    assert len(numbers) == len(set(numbers))
    assert len(numbers) == sum(shape[0] * (shape[1:] or [1])[0] for shape in shapes)


@pytest.mark.parametrize("fragments", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    ("layers", "table", "shared", "longer"),
    [(2, True, 64, 0.2), (4, False, 64, 0.1), (12, False, 64, 0.05), (1, False, 64, 0.3), (1, False, 9, 0.1)],
)
def test_fragments_are_little_longer_than_their_mean(layers, table, shared, longer, fragments):
    found = lengths(cut(model(layers, table=table, shared=shared), fragments))
    assert max(found) <= (1 + longer) * sum(found) / fragments + 64 * layers


@pytest.mark.parametrize("fragments", [2, 4, 8, 16])
def test_a_round_takes_the_polar_factors_of_a_part_of_the_matrices(fragments):
    shapes = model(12, table=False)
    sizes = [shape[0] * shape[1] if len(shape) > 1 else 0 for shape in shapes.values()]
    found = cut(shapes, fragments)
    work = sum(sizes[piece.parameter] for fragment in found for piece in fragment)
    assert work == max(1, fragments // MAX_GROUPS) * sum(sizes), "all rounds together"
