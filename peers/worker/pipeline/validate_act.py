"""Decide whether an incoming ACT message is a microbatch that this peer may compute. No field is trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from peers.worker.pipeline.microbatch_compute import ComputeError
from protocols.messages.table import Act, Check
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.membership.membership import Membership
from swarmnet.model.activation_codec import HiddenError
from swarmnet.model.carried_text import CarriedText, TextCodec
from swarmnet.routing.next_hop import NextHop
from swarmnet.run.activation_sizes import encoded_bytes
from swarmnet.run.manifest import Manifest
from swarmnet.run.path_rules import IllegalPath, PathHeader


@dataclass(frozen=True, slots=True)
class Arrival:
    """A valid microbatch, decoded once."""

    key: MicrobatchId
    header: PathHeader
    hidden: bytes
    """Hidden states, encoded with the run's codec."""
    text: CarriedText
    """Labels, and the tokens where a stage needs them."""


@dataclass(frozen=True, slots=True)
class ActForm:
    """The form that every ACT message of a run has."""

    shape: tuple[int, int, int]
    """Shape [B, T, D] of its hidden states."""
    hidden_bytes: int
    text: TextCodec
    gradient_bytes: int
    """Bytes of the gradient that answers it."""

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        shape = manifest.hidden_shape
        hidden_bytes = encoded_bytes(shape, manifest.activation_codec)
        return cls(shape, hidden_bytes, TextCodec(manifest), manifest.gradient_bytes)


def checked_act(
    membership: Membership, ways: NextHop, form: ActForm, peer: PeerId, act: Act | Check, body: bytes
) -> Arrival | ComputeError:
    """Return the decoded microbatch, or the reason why it is not computed."""
    if act.stage != ways.stage:
        return ComputeError("wrong_stage", f"this peer takes microbatches for stage {ways.stage} from above")
    key, header = MicrobatchId(PeerId(act.origin), act.counter), act.path.header()
    unfit = unfit_way(membership, ways, peer, key.origin, header)
    return unfit or arrival_of(form, key, header, act, body)


def unfit_way(
    membership: Membership, ways: NextHop, peer: PeerId, origin: PeerId, header: PathHeader
) -> ComputeError | None:
    """Return why a microbatch of this origin may not come from this peer with this header; None if it may."""
    known = membership.peers.get(peer)
    beside = known is not None and known.stage != ways.stage and membership.concerns_us(known.stage)
    if ways.stage == 0 or known is None or not beside:
        return ComputeError("wrong_stage", f"this peer takes microbatches for stage {ways.stage} from above")
    if header.visited[-2:-1] != (known.stage,):
        reason = f"visited {list(header.visited[:8])}, and its sender holds stage {known.stage}"
        return ComputeError("illegal_path", reason)
    if known.stage == 0 and peer != origin:  # Else a peer could use up another's microbatch names.
        return ComputeError("illegal_path", "only its origin sends a microbatch from the first stage")
    try:
        ways.check(header)
    except IllegalPath as error:
        return ComputeError("illegal_path", str(error))
    return None


def arrival_of(
    form: ActForm, key: MicrobatchId, header: PathHeader, act: Act | Check, body: bytes
) -> Arrival | ComputeError:
    """Return the decoded body, or the reason why it cannot be computed."""
    if act.shape != form.shape:
        return ComputeError("malformed", f"hidden states of shape {act.shape}")
    if len(body) != form.hidden_bytes + form.text.size:
        return ComputeError("malformed", f"a body of {len(body)} bytes")
    try:  # Otherwise only the last stage would find it and blame the honest peer that sent it on.
        text = form.text.decode(body[form.hidden_bytes :])
    except HiddenError as error:
        return ComputeError("malformed", str(error))
    if not 0.0 < act.deadline_seconds < 3600.0:
        return ComputeError("malformed", f"a deadline of {act.deadline_seconds} s")
    return Arrival(key, header, body[: form.hidden_bytes], text)
