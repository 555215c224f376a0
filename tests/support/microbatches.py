"""A pipeline with one microbatch, on hand-set time, for the tests of what becomes of it."""

from __future__ import annotations

from random import Random

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.pipeline.events import ActArrived, ComputeForward, ForwardDone, SendAct
from swarmnet.pipeline.ledger import MicrobatchLedger
from swarmnet.pipeline.pipeline import Pipeline
from swarmnet.pipeline.timeouts import FIRST_DEADLINE_SECONDS
from swarmnet.routing.load_balancer import Router

UP, UP2, X, Y = (PeerId(name) for name in ("up", "up2", "x", "y"))
KEY = MicrobatchId(PeerId("origin"), 7)


def machine(*below: PeerId, stages_below: int = 1, slots: int = 2) -> Pipeline:
    return Pipeline(
        stages_below=stages_below,
        router=Router(Random(1)),
        candidates=lambda _key, _tried: below,
        slots=slots,
        ledger=MicrobatchLedger(),
    )


def waiting(*below: PeerId) -> tuple[Pipeline, SendAct]:
    """A machine whose microbatch has just been sent down."""
    pipeline = machine(*below)
    assert pipeline.handle(ActArrived(UP, KEY, 1, 2 * FIRST_DEADLINE_SECONDS), 0.0) == [ComputeForward(KEY)]
    (act,) = pipeline.handle(ForwardDone(KEY), 1.0)
    assert isinstance(act, SendAct)
    return pipeline, act
