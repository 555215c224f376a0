"""A roll-back of one liar among three peers, and a return to the snapshot before it lied: the loss before and
after it, and in a run without lies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from owned_swarm import OwnedSwarm
from swarm import TINY_MODEL, corpus, shared_rounds, tiny_manifest

from peers.lab.world.virtual_time import run
from peers.tools.model.evaluate import score_weights
from swarmnet.lineage import era_of
from swarmnet.model.flat_layout import views_of
from swarmnet.run import owner_orders
from swarmnet.run.owner_orders import NO_ORDER
from swarmnet.run.schema import Sync

HELD_OUT = bytes(corpus(seed=99).numpy())[:8192]
"""Text of the kind that the peers train on."""
TRAINED_ROUNDS = 40
LYING_ROUNDS = 14
"""Rounds in which the liar lies before the order; less than the rounds that stay open."""
NAMES = ("a", "b", "liar")
TINY = tiny_manifest(
    (1,),
    model=replace(TINY_MODEL, num_hidden_layers=1),
    sync=Sync(method="sign-muon", fragments=1, learning_rate=8e-3, warmup_rounds=1, weights="equal"),
)
MANIFEST = replace(TINY, rounds=replace(TINY.rounds, window=16, finality_timeout_seconds=30.0))


RETURN_AFTER = 24
"""Rounds in which the liar lies before the return; more than stay open, so that no roll-back helps."""
CLOSED = replace(MANIFEST, rounds=replace(TINY.rounds, window=4))


def rounds_of(swarm, name):
    return swarm.members[name].worker.services.round_service.rounds


def loss_of(swarm, name):
    """The loss of held-out text, in nats per byte, by all rounds that are applied."""
    services = swarm.members[name].worker.services
    replica = services.round_service.work.replica
    weights = views_of(replica.live_floats(ahead=False), services.part.layout)
    return score_weights(weights, MANIFEST.model, HELD_OUT, window=16).loss


def lie(worker):
    """Let a peer vote against everything that it found, from now on."""
    method = worker.services.part.method
    contribute = method.contribute
    method.contribute = lambda *of: bytes(byte ^ 255 for byte in contribute(*of))


async def play(lies: bool, rolls_back: bool) -> tuple[dict[str, float], int]:
    """The losses of an honest peer before the lies, with them, at once after the order, and ten rounds later;
    and how many open rounds lost a contribution."""
    swarm = OwnedSwarm(MANIFEST, seed=5)
    swarm.open()
    for name in NAMES:
        swarm.start(name, 0, in_flight=1)
    await swarm.until(lambda: len(swarm.rounds()) == len(NAMES), 60.0)
    await swarm.until(lambda: rounds_of(swarm, "a").applied >= TRAINED_ROUNDS, 300.0)
    losses = {"before": loss_of(swarm, "a")}
    if lies:
        lie(swarm.members["liar"].worker)
    begun = rounds_of(swarm, "a").applied
    await swarm.until(lambda: rounds_of(swarm, "a").applied >= begun + LYING_ROUNDS, 60.0)
    losses["with lies"] = loss_of(swarm, "a")
    liar = swarm.members["liar"]
    held = [number for number, state in rounds_of(swarm, "a").rounds.items() if liar.peer in state.held]
    if rolls_back:
        liar.dead = True
        await swarm.give(owner_orders.roll_back(NO_ORDER, liar.peer, "it votes against all"), "a")
        await swarm.during(0.3)  # The compute thread takes the votes out of the applied rounds.
        losses["after"] = loss_of(swarm, "a")
    await swarm.until(lambda: rounds_of(swarm, "a").applied >= begun + LYING_ROUNDS + 10, 120.0)
    losses["later"] = loss_of(swarm, "a")
    honest = [name for name in NAMES if name != "liar" or not rolls_back]
    await swarm.until(lambda: min(rounds_of(swarm, name).settled for name in honest) >= begun + 12, 120.0)
    await swarm.close()
    assert shared_rounds(swarm) > TRAINED_ROUNDS
    return losses, len(held)


def test_a_liar_that_is_rolled_back_leaves_the_loss_as_if_it_had_not_lied():
    rolled_back, open_rounds = run(play(lies=True, rolls_back=True))
    kept, _ = run(play(lies=True, rolls_back=False))
    without, _ = run(play(lies=False, rolls_back=False))
    assert open_rounds >= LYING_ROUNDS
    assert rolled_back["before"] == kept["before"] == without["before"]
    assert rolled_back["with lies"] == kept["with lies"] > without["with lies"]
    assert rolled_back["after"] < rolled_back["with lies"]
    assert rolled_back["later"] < kept["later"]


def tokens_of(swarm, name):
    """The tokens in all rounds that a peer has settled."""
    return swarm.members[name].worker.services.round_service.tokens


def has_returned(swarm, name):
    """Whether a peer has begun its rounds after the newest return."""
    services = swarm.members[name].worker.services
    if services is None or not services.round_service.has_weights:
        return False
    return era_of(services.round_service.rounds.chain.value) == swarm.order.lineage(0).era


async def play_return(folder: Path, lies: bool, tokens: int = 0) -> dict[str, float]:
    """The losses of an honest peer before the lies, after them, right after a return, and once its settled
    rounds have as many `tokens` again (0: without a return); and the tokens of the settled rounds then."""
    swarm = OwnedSwarm(CLOSED, seed=5)
    swarm.open()
    for name in NAMES:
        swarm.start(name, 0, in_flight=1, checkpoints=folder / name)
    await swarm.until(lambda: len(swarm.rounds()) == len(NAMES), 60.0)
    await swarm.until(lambda: rounds_of(swarm, "a").settled >= TRAINED_ROUNDS, 300.0)
    losses = {"before": loss_of(swarm, "a")}
    snapshots = swarm.members["a"].worker.services.snapshots
    snapshot = snapshots.held[0].root
    assert snapshots.find(snapshot.digest), "what was requested last is kept, as an archive would keep it"
    last = rounds_of(swarm, "a").applied + RETURN_AFTER
    if lies:
        lie(swarm.members["liar"].worker)
    await swarm.until(lambda: rounds_of(swarm, "a").applied >= last, 120.0)
    losses["with lies"] = loss_of(swarm, "a")
    if tokens:
        swarm.members["liar"].dead = True
        banned = owner_orders.ban(NO_ORDER, swarm.members["liar"].peer, "it votes against all")
        points = ((snapshot.round, snapshot.digest.hex()),)
        await swarm.give(owner_orders.return_to(banned, points, "it votes against all"), "a")
        await swarm.until(lambda: has_returned(swarm, "a"), 60.0)
        losses["after"] = loss_of(swarm, "a")
        await swarm.until(lambda: tokens_of(swarm, "a") >= tokens, 300.0)
        losses["later"] = loss_of(swarm, "a")
    losses["tokens"] = tokens_of(swarm, "a")
    await swarm.close()
    return losses


@pytest.mark.slow
def test_after_a_return_training_goes_on_as_if_there_had_been_no_lies(tmp_path):
    without = run(play_return(tmp_path / "honest", lies=False))
    returned = run(play_return(tmp_path / "returned", lies=True, tokens=int(without["tokens"])))
    assert returned["before"] == without["before"]
    assert without["with lies"] < returned["later"] < returned["with lies"]
    assert returned["after"] > returned["with lies"], "what was learnt meanwhile is given up too"
