"""What a private run may be: everything else is refused, with the key and what to write."""

from dataclasses import replace

import pytest
from swarm import TINY_MODEL

from swarmnet.run.boundary_settings import Boundary
from swarmnet.run.manifest import Manifest, ManifestError
from swarmnet.run.manifest_check import check
from swarmnet.run.schema import Data, DocumentPrivacy, Experts, Paths, Sync, TextSource

OWN = TextSource("own", "own")
PRIVATE = Manifest(
    "private",
    "owner",
    stages=(3,),
    model=TINY_MODEL,
    data=Data((OWN,), seq_len=16, private=True, privacy=DocumentPrivacy(8.0)),
    sync=Sync("diloco", outer_lr=1.0, outer_momentum=0.0, weights="tokens"),
)


U_SHAPED = replace(
    PRIVATE, stages=(2, 1), data=replace(PRIVATE.data, privacy=DocumentPrivacy(), u_shaped_layers=1)
)


def u_shaped(stages=(2, 1), manifest=U_SHAPED, **data):
    return replace(manifest, stages=stages, data=replace(manifest.data, **data))


def with_source(**facts):
    return replace(PRIVATE, data=replace(PRIVATE.data, sources=(replace(OWN, **facts),)))


def with_privacy(*values, **data):
    return replace(PRIVATE, data=replace(PRIVATE.data, privacy=DocumentPrivacy(*values), **data))


def test_federated_averaging_is_a_private_run():
    check(PRIVATE)
    check(replace(PRIVATE, sync=Sync("sign-muon")))
    check(replace(PRIVATE, sync=Sync("sign-muon", weights="agreement")))
    check(replace(PRIVATE, access="invite", sync=Sync("sign-muon", secure_owners=255)))
    check(replace(PRIVATE, sync=replace(PRIVATE.sync, weights="equal", topology="sharded-reduce")))


def test_owners_may_hold_both_ends_of_a_model_that_is_split():
    check(U_SHAPED)
    check(u_shaped((2, 1), replace(U_SHAPED, model=replace(TINY_MODEL, tie_word_embeddings=True))))
    spans = [U_SHAPED.span(stage) for stage in (0, 1, 2)]
    assert [(span.first, span.stop, span.layers) for span in spans] == [
        (0, 1, (0, 2)),
        (1, 2, (1,)),
        (2, 3, (2,)),
    ]
    assert [U_SHAPED.neighbour_stages(stage) for stage in (0, 1)] == [(1,), (0,)]
    four = u_shaped((2, 1, 1, 1), replace(U_SHAPED, model=replace(TINY_MODEL, num_hidden_layers=5)))
    check(four)
    assert [four.neighbour_stages(stage) for stage in range(4)] == [(1, 3), (0, 2), (1, 3), (0, 2)]
    assert four.body_bytes == 2 * 4 * 16 * 32, "hidden states in bf16 and no label"


@pytest.mark.parametrize(
    ("manifest", "told"),
    [
        (replace(PRIVATE, stages=(1, 2)), r"with 2 stages, .* set stages: \[3\], or keep the labels with"),
        (u_shaped(private=False), "keeps private text with its owners; set data.private: true"),
        (u_shaped((3,)), r"there is only one stage; set stages to two or more, such as \[2, 1\]"),
        (u_shaped((1, 2)), "u_shaped_layers is 1, and stage 0 has 1 layers; .* bare embeddings would name"),
        (u_shaped(u_shaped_layers=2), "it must lie in 1 to 1"),
        (
            u_shaped((2, 1, 1, 1), replace(U_SHAPED, model=replace(TINY_MODEL, num_hidden_layers=5),
                                           paths=Paths(skip_ratio=0.25))),
            "the way back to the owner skips no stage; set paths.skip_ratio: 0",
        ),
        (
            u_shaped(manifest=replace(U_SHAPED, model=replace(
                TINY_MODEL, boundary=Boundary("token-anchored", width=8, after=(2,), anchor_rows=32)))),
            "narrow boundaries send the tokens to every stage; set model.boundary.kind: full",
        ),
        (u_shaped(privacy=DocumentPrivacy(8.0)), "leave without the noise of data.privacy; leave"),
        (
            u_shaped(manifest=replace(U_SHAPED, access="invite", sync=Sync("sign-muon", secure_owners=3))),
            "masks votes of a single stage; set sync.secure_owners: 0",
        ),
        (
            u_shaped(manifest=replace(
                U_SHAPED, sync=replace(U_SHAPED.sync, weights="equal", topology="sharded-reduce"))),
            "could take the owners' stage; set sync.topology: all-gather",
        ),
        (with_source(sha256="0" * 64), "no peer names or hashes a private text; leave index, sha256"),
        (with_source(index="0" * 64), "no peer names or hashes a private text"),
        (with_source(documents=9), "no peer names or hashes a private text"),
        (with_source(bytes=9), "no peer names or hashes a private text"),
        (with_source(shared="peers", licence="cc0-1.0"), "no peer names or hashes a private text"),
        (with_source(path="python-stdlib"), "each peer file names one text of its owner; write one source"),
        (
            replace(PRIVATE, data=replace(PRIVATE.data, sources=(OWN, TextSource("b", "b")))),
            "each peer file names one text of its owner",
        ),
        (replace(PRIVATE, data=replace(PRIVATE.data, tokenizer_sha256="0" * 64)), "leave .*tokenizer_sha256"),
        (with_privacy(8.0, private=False), "protects private text only; set data.private: true"),
        (with_privacy(0.0, 1e-6), "epsilon must lie above 0, up to 100"),
        (with_privacy(8.0, 1.0), "delta in .0, 1."),
        (with_privacy(8.0, 1e-5, 0), "data.privacy.epochs is 0; it must lie in 1 to 1000"),
        (with_privacy(8.0, 1e-5, 1, float("inf")), "max_norm above 0"),
        (
            replace(PRIVATE, model=replace(TINY_MODEL, qk_norm=True, experts=Experts(4, 1))),
            "works without model.experts only",
        ),
        (replace(PRIVATE, sync=Sync("sign-muon", weights="tokens")), "tokens works with local-step methods"),
        (replace(PRIVATE, sync=Sync("sign-muon", secure_owners=3)), "one person's keys .* access: invite"),
        (
            replace(PRIVATE, access="invite", sync=replace(PRIVATE.sync, secure_owners=3)),
            "set sync.method: sign-muon",
        ),
        (
            replace(PRIVATE, access="invite", sync=Sync("sign-muon", secure_owners=2)),
            "must lie in 3 to 255, or be 0: with two, each knows",
        ),
        (
            replace(
                PRIVATE, access="invite", sync=Sync("sign-muon", secure_owners=3, topology="sharded-reduce")
            ),
            "masked votes can be neither compared nor cut among reducers",
        ),
        (
            replace(PRIVATE, sync=replace(PRIVATE.sync, topology="sharded-reduce")),
            "a reducer's mean of four bits has no weights by tokens",
        ),
    ],
)  # fmt: skip
def test_what_the_form_forbids_is_refused_with_what_to_write(manifest, told):
    with pytest.raises(ManifestError, match=told):
        check(manifest)
