"""A peer that holds routed experts, as others ask it: takes calls, computes them, answers, counts what it
added. `ExpertAnswers` decides what it takes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
from torch import Tensor

from peers.compute.executor import BACKWARD, FORWARD, Compute
from peers.network.neighbourhood import Neighbourhood
from peers.worker.pipeline.microbatch_compute import MicrobatchWork, Source, Trouble
from protocols.messages.table import AskExperts, ExpertsDecline, ExpertsSay
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.model.activation_codec import HiddenError
from swarmnet.model.experts.expert_compute import ExpertCompute
from swarmnet.model.stage_compute import StageError
from swarmnet.pipeline.expert_answers import Asked, ExpertAnswers
from swarmnet.pipeline.ledger import Ledger
from swarmnet.run.manifest import Manifest

SMOOTHING = 0.1
"""Weight of a new measurement of what a row takes."""


@dataclass(frozen=True, slots=True)
class Work:
    """A call, checked."""

    asked: Asked
    counts: Sequence[int]
    body: bytes
    exact: bool
    """From a sibling, as it was computed."""
    source: Source
    adds: bool
    """Its gradient was not added yet."""


@dataclass(frozen=True, slots=True)
class Done:
    encoded: bytes
    tokens: int | None = None
    """Of a gradient that was added, as the round counts them."""


class ExpertWork(MicrobatchWork):
    """The tensor side, in the compute thread."""

    def __init__(self, manifest: Manifest, stage: int, experts: ExpertCompute) -> None:
        super().__init__(manifest, stage, experts)
        held, shape = manifest.experts_at(stage), manifest.model.experts
        assert held is not None, "this is a stage of experts"
        self._manifest, self._experts, self._groups = manifest, experts, shape.groups
        self._rows_of_token = shape.active * manifest.stages[held.trunk]
        """That it sends to all groups together."""
        self._rest = 0

    def answer(self, work: Work) -> Done | Trouble:
        asked, source = work.asked, work.source
        rows, layer = sum(work.counts), asked.layer
        try:
            rows_SD, gradient_SD = self._read(work, rows)
            if trouble := self._far_off(source, _norm_of_a_row(rows_SD)):
                return trouble
            if gradient_SD is None:
                said_SD = self._experts.answer(layer, work.counts, rows_SD)
                return Done(self._encode("activation", said_SD, work.exact))
            judged = self._bounded(source, gradient_SD)
            if judged is not None:
                return judged
            found_SD = self._experts.answer_backward(
                layer, work.counts, rows_SD, gradient_SD, adds=work.adds
            )
        except (StageError, HiddenError) as error:
            return Trouble("not_finite" if isinstance(error, StageError) else "malformed", str(error))
        tokens = self._added(rows) if work.adds else None
        return Done(self._encode_gradient(asked.key, found_SD, work.exact), tokens)

    def _read(self, work: Work, rows: int) -> tuple[Tensor, Tensor | None]:
        shape = (1, rows, self.width)
        cut = self._manifest.call_bytes(rows, False, work.exact)
        rows_SD = self._decode("activation", work.body[:cut], shape, work.exact)[0]
        if not work.asked.backward:
            return rows_SD, None
        return rows_SD, self._decode("gradient", work.body[cut:], shape, work.exact)[0]

    def _bounded(self, source: Source, gradient_SD: Tensor) -> Trouble | None:
        """No call outweighs its round: scaled in place, or why it is not computed with."""
        judgement = self.gradient_sizes.judge(source.peer, _norm_of_a_row(gradient_SD), source.kind)
        if not judgement.gain or judgement.out_of_line:
            reason = f"gradients {judgement.ratio:.3g} times as large as is usual"
            code = "out_of_line" if judgement.out_of_line else "not_finite"
            return Trouble(code, reason, peer=source.peer, out_of_line=judgement.out_of_line)
        if judgement.gain < 1.0:
            self.scaled += 1
            gradient_SD *= judgement.gain
        return None

    def _added(self, rows: int) -> int:
        """Tokens whose layers' experts of one group get so many rows, if all get as many: what a gradient's
        sum is divided by, and a round waits for."""
        tokens, self._rest = divmod(self._rest + rows * self._groups, self._rows_of_token)
        self.gathered_tokens += tokens
        if self.after_gradient is not None:
            self.after_gradient()
        return tokens


class ExpertAnswering:
    """Of one peer."""

    def __init__(
        self, manifest: Manifest, stage: int, work: ExpertWork, compute: Compute,
        neighbourhood: Neighbourhood, slots: int, ledger: Ledger, committed: Callable[[int], None],
        tell: Callable[[PeerId], None],
    ) -> None:  # fmt: skip
        """`committed(tokens)` tells the update path; `tell(peer)` sends CREDIT."""
        held = manifest.experts_at(stage)
        assert held is not None, "this is a stage of experts"
        self.manifest, self.stage, self.held = manifest, stage, held
        self.work, self.compute, self.neighbourhood = work, compute, neighbourhood
        self.committed, self.tell = committed, tell
        self.answers = ExpertAnswers(slots, ledger)
        experts = manifest.model.experts
        layers = manifest.stages[held.trunk]
        self._rows = manifest.microbatch_tokens * experts.active * layers / experts.groups
        """Of a microbatch, on average."""
        self._row_seconds: dict[bool, float] = {}
        """Forward and backward."""

    @property
    def service_seconds(self) -> float:
        """That a microbatch takes here, in all its calls; 0: not measured yet."""
        return self._rows * sum(self._row_seconds.values()) if len(self._row_seconds) == 2 else 0.0

    def message(self, peer: PeerId, ask: AskExperts, body: bytes, serving: bool) -> None:
        key, alone = MicrobatchId(PeerId(ask.origin), ask.counter), 0 if ask.backward else ask.attempt
        asked = Asked(peer, key, ask.layer, ask.backward, alone)
        exact = self.neighbourhood.transport.is_near(peer)
        unfit = unfit_call(self.manifest, self.stage, self.neighbourhood, peer, ask, body, exact)
        if unfit is not None:
            self.neighbourhood.refused(peer, unfit.code, unfit.reason)
            self._decline(peer, ask, unfit)
            return
        if not serving:
            self._decline(peer, ask, Trouble("not_ready", "not in step yet"))
            return
        match self.answers.take(asked, ask.attempt):
            case "busy":
                self._decline(peer, ask, Trouble("busy", "no room"))
                self.tell(peer)
            case "compute":
                source = Source(peer, self.held.trunk, ask.layer)
                work = Work(asked, ask.counts, body, exact, source, self.answers.adds(asked))
                priority = BACKWARD if ask.backward else FORWARD
                self.compute.submit(priority, partial(self.work.answer, work), partial(self._done, work))

    def _decline(self, peer: PeerId, ask: AskExperts, why: Trouble) -> None:
        self.neighbourhood.post(peer, "data", ExpertsDecline(
            ask.origin, ask.counter, ask.attempt, ask.layer, ask.backward, why.code, why.reason
        ))  # fmt: skip

    def _done(self, work: Work, result: Done | Trouble, seconds: float) -> None:
        asked, peer = work.asked, work.asked.peer
        attempt = self.answers.done(asked, result.tokens if isinstance(result, Done) else None)
        named = (*asked.key, attempt, asked.layer, asked.backward)
        if isinstance(result, Trouble):
            self.neighbourhood.refused(peer, result.code, result.reason)
            self.neighbourhood.post(peer, "data", ExpertsDecline(*named, result.code, result.reason))
            if result.out_of_line:
                self.neighbourhood.part_from(peer, "out_of_line", result.reason)
            return
        known, each = self._row_seconds.get(asked.backward), seconds / sum(work.counts)
        self._row_seconds[asked.backward] = each if known is None else known + SMOOTHING * (each - known)
        self.neighbourhood.post(peer, "data", ExpertsSay(*named), result.encoded)
        self.tell(peer)
        if result.tokens is not None:
            self.committed(result.tokens)


def unfit_call(
    manifest: Manifest, stage: int, neighbourhood: Neighbourhood, peer: PeerId, ask: AskExperts, body: bytes,
    exact: bool,
) -> Trouble | None:  # fmt: skip
    """Why nothing is computed for it by a peer of this stage."""
    held, span, rows = manifest.experts_at(stage), manifest.span(stage), sum(ask.counts)
    known = neighbourhood.membership.peers.get(peer)
    if held is None or known is None or known.stage != held.trunk:
        trunk = "none" if held is None else f"those of stage {held.trunk}"
        return Trouble("wrong_stage", f"the experts here are {trunk}")
    if not span.first <= ask.layer < span.stop:
        return Trouble("wrong_stage", f"these experts are not those of layer {ask.layer}")
    if len(ask.counts) != manifest.model.experts.of_group or not 0 < rows <= manifest.call_rows:
        return Trouble("malformed", f"{rows} rows for {len(ask.counts)} experts")
    if len(body) != manifest.call_bytes(rows, ask.backward, exact):
        return Trouble("malformed", f"a body of {len(body)} bytes for {rows} rows")
    return None


def _norm_of_a_row(rows_SD: Tensor) -> float:
    """Whatever their number, and however many they are."""
    return float(torch.linalg.vector_norm(rows_SD)) / sqrt(len(rows_SD))
