import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import MicrobatchId, PeerId, RunId
from swarmnet.model.sampling import SamplingError, window_starts, windows

RUN = RunId("a" * 64)


def starts(counter: int, *, run: RunId = RUN, seed: int = 0, origin: str = "12D3KooA", tokens: int = 10_000):
    return window_starts(run, seed, MicrobatchId(PeerId(origin), counter), tokens, 4, 128)


def test_the_same_microbatch_holds_the_same_text_everywhere() -> None:
    assert starts(0) == starts(0) == (8071, 5971, 4572, 8276)


def test_run_seed_origin_and_counter_each_change_the_text() -> None:
    others = [starts(1), starts(0, seed=1), starts(0, origin="12D3KooB"), starts(0, run=RunId("b" * 64))]
    assert len({starts(0), *others}) == 5


@given(st.integers(0, 2**40), st.integers(130, 2**50))
def test_every_window_lies_inside_the_corpus(counter: int, tokens: int) -> None:
    assert all(0 <= start <= tokens - 129 for start in starts(counter, tokens=tokens))


def test_every_start_is_equally_likely() -> None:
    choices = 16
    drawn = [start for counter in range(2000) for start in starts(counter, tokens=128 + choices)]
    expected = len(drawn) / choices
    counts = [drawn.count(start) for start in range(choices)]
    # Chi-squared with 15 degrees of freedom: 37.7 is passed once in a thousand; the draw is fixed.
    assert sum((count - expected) ** 2 / expected for count in counts) < 37.7


def test_a_corpus_of_one_window_is_enough_and_less_is_refused() -> None:
    assert starts(0, tokens=129) == (0, 0, 0, 0)
    with pytest.raises(SamplingError, match="the text has 128 tokens, one window takes 129"):
        starts(0, tokens=128)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_are_the_inputs_moved_on_by_one(dtype: torch.dtype) -> None:
    corpus = torch.arange(200).to(dtype)
    inputs, labels = windows(corpus, (0, 50, 195), 4)
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs.tolist() == [[0, 1, 2, 3], [50, 51, 52, 53], [195, 196, 197, 198]]
    assert torch.equal(labels, inputs + 1)
