from dataclasses import replace

import pytest
import torch

from swarmnet.identifiers import PeerId
from swarmnet.model.activation_codec import HiddenError
from swarmnet.model.carried_text import TextCodec
from swarmnet.model.sampling import IGNORE_INDEX
from swarmnet.run.activation_sizes import token_bytes
from swarmnet.run.boundary_settings import Boundary
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data, ModelShape

SEQUENCES, TOKENS = 3, 7


def manifest(vocabulary: int, narrow: bool = True) -> Manifest:
    boundary = Boundary("token-anchored", width=4, after=(1,)) if narrow else Boundary()
    data = Data(seq_len=TOKENS, micro_batch_size=SEQUENCES)
    model = ModelShape(vocab_size=vocabulary, num_hidden_layers=2, boundary=boundary)
    return Manifest("text", PeerId("owner"), stages=(1, 1), model=model, data=data)


def windows(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(vocabulary, (SEQUENCES, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    drawn[0, 0], drawn[-1, -1] = vocabulary - 1, vocabulary - 1
    return drawn[:, :-1], drawn[:, 1:]


@pytest.mark.parametrize(
    ("vocabulary", "each"),
    [(2, 1), (256, 1), (257, 2), (65_536, 2), (65_537, 3), (1 << 24, 3), ((1 << 31) - 1, 4)],
)
def test_behind_narrow_boundaries_tokens_and_labels_are_one_window_in_few_bytes(vocabulary, each):
    run = manifest(vocabulary)
    tokens, labels = windows(vocabulary)
    data = TextCodec(run).encode(tokens, labels).encoded
    assert token_bytes(vocabulary) == each
    assert len(data) == run.text_bytes == each * SEQUENCES * (TOKENS + 1)
    found = TextCodec(run).decode(data)
    assert found.encoded == data
    assert found.tokens is not None
    assert torch.equal(found.tokens, tokens)
    assert torch.equal(found.labels, labels)


def test_through_open_boundaries_go_labels_as_ever():
    run = manifest(300, narrow=False)
    tokens, labels = windows(300)
    data = TextCodec(run).encode(tokens, labels).encoded
    assert data == labels.to(torch.int32).numpy().tobytes()
    found = TextCodec(run).decode(data)
    assert found.encoded == data
    assert found.tokens is None
    assert torch.equal(found.labels, labels)


@pytest.mark.parametrize("narrow", [True, False])
def test_what_is_no_text_of_the_run_is_refused(narrow):
    run = manifest(1000, narrow)
    tokens, labels = windows(1000)
    data = TextCodec(run).encode(tokens, labels).encoded
    for wrong in (b"", data[:-1], data + b"\0"):
        with pytest.raises(HiddenError, match="bytes of tokens, 3 x 7 take"):
            TextCodec(run).decode(wrong)
    for place in (0, len(data) - 2):
        bent = bytearray(data)
        bent[place : place + 2] = b"\xff\xff"
        with pytest.raises(HiddenError, match="outside the vocabulary"):
            TextCodec(run).decode(bytes(bent))


def test_labels_of_context_travel_only_in_runs_that_have_some():
    run = manifest(300, narrow=False)
    tokens, labels = windows(300)
    labels = labels.masked_fill(labels % 2 == 0, IGNORE_INDEX)
    data = TextCodec(run).encode(tokens, labels).encoded
    with pytest.raises(HiddenError, match="labels outside the vocabulary"):
        TextCodec(run).decode(data)
    run = replace(run, data=replace(run.data, format="messages"))
    assert torch.equal(TextCodec(run).decode(data).labels, labels)
    low = TextCodec(run).encode(tokens, labels.masked_fill(labels == IGNORE_INDEX, -1)).encoded
    with pytest.raises(HiddenError, match="labels outside the vocabulary"):
        TextCodec(run).decode(low)
