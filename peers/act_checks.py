"""Whether what came from above is a microbatch that this peer may compute: nothing of it is believed."""

from __future__ import annotations

import numpy as np

from peers.microbatch_work import Trouble
from protocols.messages import Act
from swarmnet.bodies import encoded_bytes
from swarmnet.identifiers import PeerId
from swarmnet.manifest import Manifest
from swarmnet.membership import Membership
from swarmnet.paths import Header, IllegalPath
from swarmnet.ways import Ways


def unfit_act(
    membership: Membership, ways: Ways, manifest: Manifest, peer: PeerId, act: Act, body: bytes
) -> Trouble | None:
    """Why it is not computed."""
    if act.stage != ways.stage:
        return Trouble("wrong_stage", f"this peer takes microbatches for stage {ways.stage} from above")
    way = unfit_way(membership, ways, peer, PeerId(act.origin), act.path.header())
    return way or unfit_body(manifest, act, body)


def unfit_way(
    membership: Membership, ways: Ways, peer: PeerId, origin: PeerId, header: Header
) -> Trouble | None:
    """Why a microbatch of this origin may not come from this peer with this header."""
    known = membership.peers.get(peer)
    beside = known is not None and known.stage != ways.stage and membership.concerns_us(known.stage)
    if ways.stage == 0 or known is None or not beside:
        return Trouble("wrong_stage", f"this peer takes microbatches for stage {ways.stage} from above")
    if header.visited[-2:-1] != (known.stage,):
        reason = f"visited {list(header.visited[:8])}, and its sender holds stage {known.stage}"
        return Trouble("illegal_path", reason)
    if known.stage == 0 and peer != origin:  # Else anybody could use up others' names.
        return Trouble("illegal_path", "only its origin sends a microbatch from the first stage")
    try:
        ways.check(header)
    except IllegalPath as error:
        return Trouble("illegal_path", str(error))
    return None


def unfit_body(manifest: Manifest, act: Act, body: bytes) -> Trouble | None:
    """Why it cannot be computed."""
    if act.shape != manifest.hidden_shape:
        return Trouble("malformed", f"hidden states of shape {act.shape}")
    if len(body) != manifest.body_bytes:
        return Trouble("malformed", f"a body of {len(body)} bytes")
    labels = np.frombuffer(body, np.int32, offset=encoded_bytes(act.shape, manifest.hidden_codec))
    if labels.min() < 0 or labels.max() >= manifest.model.vocabulary:
        # Else only the last stage would find it, and the honest peer that asked it would get the blame.
        return Trouble("malformed", "labels outside the vocabulary")
    if not 0.0 < act.deadline_seconds < 3600.0:
        return Trouble("malformed", f"a deadline of {act.deadline_seconds} s")
    return None
