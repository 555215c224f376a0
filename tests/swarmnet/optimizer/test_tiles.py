"""Tiles of matrices, as DeMo's paper cuts them: no number is lost, and no tile crosses an edge."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import layout_of
from swarmnet.optimizer.tiling import MatrixTiles, cut_of
from swarmnet.run.manifest import Manifest, ManifestError
from swarmnet.run.manifest_check import check
from swarmnet.run.schema import Sync

SIDES = st.integers(1, 150)


@settings(max_examples=50)
@given(st.lists(st.one_of(st.tuples(SIDES, SIDES), st.tuples(SIDES)), min_size=1, max_size=5))
def test_what_is_cut_in_tiles_comes_back(shapes):
    layout = layout_of({f"model.layers.{index}.weight": shape for index, shape in enumerate(shapes)})
    cut = MatrixTiles(layout)
    flat = torch.arange(1.0, layout.size + 1)
    for start, stop in layout.padding:
        flat[start:stop] = 0
    chunked = cut.chunked(flat)
    assert torch.equal(cut.flat(chunked), flat)
    assert int((chunked != 0).sum()) == layout.parameters
    for plane, (height, width) in zip(cut.layout.planes, cut.sides, strict=True):
        assert max(height, width) <= 64
        assert plane.chunk & (plane.chunk - 1) == 0
        assert height * width <= plane.chunk < 2 * height * width


def test_a_tile_is_a_part_of_its_matrix_and_its_sides_divide_the_matrixs():
    layout = layout_of({"lm_head.weight": (176, 100)})
    cut, matrix = MatrixTiles(layout), torch.arange(17600.0).view(176, 100)
    flat = torch.zeros(layout.size)
    flat[:17600] = matrix.flatten()
    assert cut.sides == ((44, 50),)
    tiles = cut.chunked(flat).view(-1, 4096)
    assert len(tiles) == 4 * 2
    assert torch.equal(tiles[3, : 44 * 50].view(44, 50), matrix[44:88, 50:])


def test_as_the_vector_lies_nothing_is_moved():
    layout = layout_of({"lm_head.weight": (70, 64)})
    flat = torch.ones(layout.size)
    assert cut_of("flat", layout).chunked(flat) is flat
    assert cut_of("flat", layout).layout is layout


def test_tiles_of_any_sides_cannot_go_through_hadamards_matrices():
    check(Manifest("test", PeerId("owner"), sync=Sync(chunking="tiled", transform="dct")))
    with pytest.raises(ManifestError, match=r"sync\.chunking"):
        check(Manifest("test", PeerId("owner"), sync=Sync(chunking="tiled")))
    with pytest.raises(ManifestError, match=r"sync\.rank"):
        check(Manifest("test", PeerId("owner"), sync=Sync(rank=0)))
