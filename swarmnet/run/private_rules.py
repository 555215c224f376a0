"""Check the keys of private runs, as rows of `manifest_check.py`."""

from __future__ import annotations

from math import inf

from swarmnet.run.manifest import Manifest
from swarmnet.run.method_config import Problem
from swarmnet.run.schema import STANDARD_LIBRARY, DocumentPrivacy

MAX_EPSILON = 100.0
"""Maximum of `data.privacy.epsilon`: more protects nothing, so it is a typing error."""
MAX_PRIVATE_EPOCHS = 1000
"""Maximum of `data.privacy.epochs`: the noise grows with their root."""


def private_rows(manifest: Manifest) -> list[Problem]:
    """Return the rules about `data.private` and `data.privacy`."""
    data, privacy = manifest.data, manifest.data.privacy
    facts = [(each.shared == "peers", each.index, each.sha256, each.bytes, each.documents, each.files)
             for each in data.sources]  # fmt: skip
    rows: list[Problem] = [
        (
            len(manifest.stages) > 1 and not manifest.is_u_shaped,
            f"data.private: with {len(manifest.stages)} stages, hidden states and labels of the text would "
            f"go to other peers; set stages: [{manifest.model.num_hidden_layers}], or keep the labels with "
            "data.u_shaped_layers: 1",
        ),
        (
            len(data.sources) != 1 or data.sources[0].path == STANDARD_LIBRARY,
            "data.private: each peer file names one text of its owner; write one source such as "
            "{name: own, path: own}",
        ),
        (
            any(any(each) for each in facts),
            "data.private: no peer names or hashes a private text; leave index, sha256, bytes, documents, "
            "files and shared out of data.sources",
        ),
        (
            bool(data.tokenizer_sha256),
            "data.private: a private run shares no text and no tokenizer; leave data.tokenizer_sha256 out",
        ),
    ]
    noise: list[Problem] = [
        (not data.private, "data.privacy: protects private text only; set data.private: true"),
        (
            not 0 < privacy.epsilon <= MAX_EPSILON
            or not 0 < privacy.delta < 1
            or not 0 < privacy.max_norm < inf,
            f"data.privacy: epsilon is {privacy.epsilon:g}, delta {privacy.delta:g}, max_norm "
            f"{privacy.max_norm:g}; epsilon must lie above 0, up to {MAX_EPSILON:g}, delta in (0, 1), and "
            "max_norm above 0",
        ),
        (
            not 1 <= privacy.epochs <= MAX_PRIVATE_EPOCHS,
            f"data.privacy.epochs is {privacy.epochs}; it must lie in 1 to {MAX_PRIVATE_EPOCHS}",
        ),
        (
            data.format != "text",
            f"data.privacy: documents of data.format: {data.format} are not excerpted; set format: text",
        ),
        (
            manifest.model.experts.num_experts > 0,
            "data.privacy: works without model.experts only, whose load would show what a document is about; "
            "leave model.experts out",
        ),
    ]
    secure = (
        manifest.sync.secure_owners > 0 and not (data.private and manifest.access == "invite"),
        "sync.secure_owners: works in a private run by invite only, because one person's keys could be all "
        "other owners; set data.private: true and access: invite",
    )
    return [
        *(_u_shape_rows(manifest) if data.u_shaped_layers else []),
        secure,
        *(rows if data.private else []),
        *(noise if privacy != DocumentPrivacy() else []),
    ]


def _u_shape_rows(manifest: Manifest) -> list[Problem]:
    """Return the rules about `data.u_shaped_layers`."""
    returned, stages = manifest.data.u_shaped_layers, manifest.stages
    return [
        (
            not manifest.data.private,
            "data.u_shaped_layers: keeps private text with its owners; set data.private: true",
        ),
        (
            len(stages) < 2,
            "data.u_shaped_layers: needs stages between the model's two ends, and there is only one stage; "
            "set stages to two or more, such as [2, 1], or u_shaped_layers: 0",
        ),
        (
            not 1 <= returned < stages[0],
            f"data.u_shaped_layers is {returned}, and stage 0 has {stages[0]} layers; it must lie in 1 to "
            f"{stages[0] - 1}, because bare embeddings would name the tokens; enlarge the first "
            "number of stages",
        ),
        (
            manifest.paths.skip_ratio > 0.0,
            "data.u_shaped_layers: the way back to the owner skips no stage; set paths.skip_ratio: 0",
        ),
        (
            manifest.model.boundary.is_narrow,
            "data.u_shaped_layers: narrow boundaries send the tokens to every stage; set "
            "model.boundary.kind: full",
        ),
        (
            manifest.data.adds_noise,
            "data.u_shaped_layers: hidden states would leave without the noise of data.privacy; leave "
            f"data.privacy out, or set u_shaped_layers: 0 and stages: [{manifest.model.num_hidden_layers}]",
        ),
        (
            manifest.sync.secure_owners > 0,
            "data.u_shaped_layers: sync.secure_owners masks votes of a single stage; set "
            "sync.secure_owners: 0",
        ),
        (
            manifest.sync.topology == "sharded-reduce",
            "data.u_shaped_layers: a reducer needs no text and could take the owners' stage; set "
            "sync.topology: all-gather",
        ),
    ]
