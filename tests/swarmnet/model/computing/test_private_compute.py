"""Clipped and noised gradients: no document adds more than its norm, and every sum that leaves has noise."""

from dataclasses import replace

import pytest
import torch
from swarm import TINY_MODEL

from swarmnet.model.computing.choices import PLAIN
from swarmnet.model.computing.privacy_loss import noise_multiplier
from swarmnet.model.computing.private_compute import DocumentNoise, PrivateStageCompute
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import NOTHING, trained_layout, views_of
from swarmnet.model.stage_compute import StageCompute, StageError, copied
from swarmnet.model.state_layout import first_state
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data, DocumentPrivacy

MANIFEST = Manifest(
    "tiny", "owner", stages=(3,), model=TINY_MODEL,
    data=Data(seq_len=16, micro_batch_size=2, private=True, privacy=DocumentPrivacy(8.0)),
)  # fmt: skip
LAYOUT = trained_layout(MANIFEST, 0)
PARAMETERS = sum(view.numel() for view in views_of(torch.zeros(LAYOUT.size), LAYOUT).values())


def compute(max_norm, deviation=0.0, documents_per_sum=1000):
    noise = DocumentNoise(max_norm, deviation, torch.Generator().manual_seed(7), lambda: documents_per_sum)
    made = PrivateStageCompute(
        noise, MANIFEST, layout=LAYOUT, frozen=NOTHING, computing=PLAIN, device=torch.device("cpu")
    )
    made.publish(copied(to_floats(first_state(MANIFEST, 0))[: LAYOUT.size]))
    return made


def texts(count, seed=0):
    tokens = torch.randint(256, (count, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def plain_gradient(inputs, labels):
    plain = StageCompute(shape=MANIFEST.model, span=MANIFEST.span(0), layout=LAYOUT)
    plain.publish(copied(to_floats(first_state(MANIFEST, 0))[: LAYOUT.size]))
    plain.finish("one", inputs, labels)
    return plain.use_gradient(torch.clone)


def test_without_noise_and_with_room_the_sum_is_that_of_the_plain_compute():
    inputs, labels = texts(4)
    private = compute(1e9)
    result = private.finish("one", inputs, labels)
    assert result.tokens == 64
    torch.testing.assert_close(
        private.use_gradient(torch.clone), plain_gradient(inputs, labels), rtol=1e-4, atol=1e-5
    )
    assert not private.use_gradient(torch.clone).any(), "the sum is zero afterwards"


def test_a_document_changes_the_sum_by_its_norm_at_most():
    inputs, labels = texts(6)
    bound = 0.1 * float(plain_gradient(inputs[:1], labels[:1]).norm())
    empty = labels.clone()
    empty[2] = -100
    private = compute(bound)
    private.finish("one", inputs, labels)
    whole = private.use_gradient(torch.clone)
    private.finish("two", inputs, empty)
    without = private.use_gradient(torch.clone)
    assert float((whole - without).norm()) == pytest.approx(bound, rel=1e-3)
    one = plain_gradient(inputs[2:3], labels[2:3])
    torch.testing.assert_close(whole - without, one * bound / one.norm(), rtol=1e-2, atol=1e-5)


def test_noise_has_its_deviation_everywhere_but_in_the_padding():
    private = compute(1.0, deviation=0.5)
    noise = private.use_gradient(torch.clone)
    assert float(noise.square().sum() / PARAMETERS) == pytest.approx(0.25, rel=0.05)
    assert int((noise != 0).sum()) == PARAMETERS
    assert not torch.equal(noise, private.use_gradient(torch.clone)), "each sum has its own"


def test_noise_comes_after_so_many_documents_at_the_latest():
    inputs, labels = texts(6)
    labels[:] = -100
    private = compute(1.0, deviation=0.5, documents_per_sum=2)
    private.finish("one", inputs, labels)
    noise = private.use_gradient(torch.clone)
    assert float(noise.square().sum() / PARAMETERS) == pytest.approx(4 * 0.25, rel=0.05), (
        "3 times, and at last"
    )


def test_a_document_that_cannot_be_computed_changes_nothing_of_the_others():
    inputs, labels = texts(3)
    private = compute(1e9)
    broken = labels.clone()
    broken[1, 0] = 999  # No token of the vocabulary.
    private.finish("one", inputs, broken)
    expected = plain_gradient(inputs[::2].contiguous(), labels[::2].contiguous())
    torch.testing.assert_close(private.use_gradient(torch.clone), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(StageError):
        private.finish("two", inputs[:1], broken[1:2])
    assert not private.use_gradient(torch.clone).any()


def test_the_noise_follows_from_the_manifest():
    data = replace(MANIFEST.data, privacy=DocumentPrivacy(3.0, 1e-6, 4, 0.5))
    noise = DocumentNoise.from_manifest(replace(MANIFEST, data=data), torch.Generator(), lambda: 1)
    assert noise.max_norm == 8.0, "half a nat's gradient, over 16 tokens"
    assert noise.deviation == pytest.approx(8.0 * noise_multiplier(data.privacy))
