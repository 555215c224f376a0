"""How many microbatches an origin keeps under way, in closed queueing networks on hand-set time."""

from __future__ import annotations

import heapq
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from swarm import Swarm, tiny_manifest

from peers.lab.world.virtual_time import run
from protocols.memory.transport import Conditions
from swarmnet.model.computing.choices import Computing
from swarmnet.model.decoder import forward
from swarmnet.model.parameters import parameter_shapes
from swarmnet.pipeline.flow_control import (
    FIRST_WINDOW,
    GRAPH_SHARE,
    MAX_SHARE,
    MAX_STRETCH,
    MAX_WAITING,
    MIN_ANSWERS,
    Flow,
    graph_bytes,
    graphs_that_fit,
)
from swarmnet.run.boundary_settings import Boundary
from swarmnet.run.schema import Experts, ModelShape


def play(flow, seconds, network, service=0.1, servers=1, lanes=0, seed=0):
    """An origin before `servers` FIFO servers of `service` seconds; `network(chance)` seconds each way. With
    `lanes`, so many microbatches are on the line at once, others wait for it. Returns how many were done per
    second in the later half, and the mean number that waited for a server."""
    chance, now, order = Random(seed), 0.0, 0
    due = []
    free, line = [0.0] * servers, [0.0] * max(1, lanes)
    under_way = done = 0
    waited = 0.0

    def send():
        nonlocal order, under_way
        while under_way < flow.window:
            under_way += 1
            order += 1
            took = network(chance)
            if lanes:
                at = line.index(min(line))
                line[at] = max(now, line[at]) + took
                heapq.heappush(due, (line[at], order, "arrives", now, 0.0))
            else:
                heapq.heappush(due, (now + took, order, "arrives", now, 0.0))

    send()
    while due and now < seconds:
        now, _, what, started, queued = heapq.heappop(due)
        if what == "arrives":
            at = free.index(min(free))
            begins = max(now, free[at])
            free[at] = begins + service * chance.uniform(0.7, 1.3)
            order += 1
            heapq.heappush(due, (free[at] + network(chance), order, "done", started, begins - now))
        else:
            if now > seconds / 2:
                done += 1
                waited += queued
            flow.done(now - started, service, queued, under_way)
            under_way -= 1
            send()
    return done / (seconds / 2), waited / (seconds / 2)


def near(_chance):
    return 0.001


def far(_chance):
    return 0.4


def lossy(chance):
    return 0.15 + (chance.random() < 0.4) * chance.expovariate(2.0)


def test_next_door_a_few_are_enough_and_the_queue_stays_short():
    flow = Flow(64)
    rate, waiting = play(flow, 120, near)
    assert rate > 0.97 / 0.1
    assert waiting <= MAX_WAITING + 0.5
    assert flow.window <= 6


MANY = 128
"""More than the way holds with the longest queue that is wanted."""


@pytest.mark.parametrize("network", [far, lossy])
@pytest.mark.parametrize("servers", [1, 3])
def test_far_away_as_many_are_under_way_as_keep_the_servers_busy(network, servers):
    flow = Flow(MANY)
    rate, waiting = play(flow, 240, network, servers=servers)
    fixed = Flow(MANY)
    fixed.window, fixed.done = MANY, lambda *_: None
    most, _ = play(fixed, 240, network, servers=servers)
    assert rate > 0.93 * most
    assert waiting <= MAX_SHARE * flow.window + 1
    assert FIRST_WINDOW < flow.window < MANY


def test_a_line_that_is_full_is_not_filled_further():
    flow = Flow(1000)
    rate, _ = play(flow, 600, lambda _chance: 0.2, service=0.01, lanes=1)
    assert rate > 0.95 / 0.2
    assert flow.window <= 3 * MAX_STRETCH * FIRST_WINDOW / 2


def test_a_line_that_has_become_slower_is_measured_again():
    flow = Flow(64)
    play(flow, 120, lambda _chance: 0.01)
    assert flow.window < 8
    play(flow, 600, lambda _chance: 0.6)
    fixed = play(flow, 60, lambda _chance: 0.6)[0]
    assert fixed > 0.93 / 0.1


def test_the_limit_holds_and_a_limit_of_nothing_still_trains():
    for limit in (1, 2, 7):
        flow = Flow(limit)
        assert flow.window == min(limit, FIRST_WINDOW)
        play(flow, 60, far)
        assert flow.window <= limit
    assert Flow(0).window == 1


def test_it_does_not_grow_when_something_else_keeps_the_number_down():
    flow = Flow(64)
    for _ in range(50 * MIN_ANSWERS):
        flow.done(1.0, 0.1, 0.0, under_way=2)
    assert flow.window == FIRST_WINDOW


def test_it_follows_when_the_servers_become_slower_and_quicker_again():
    flow = Flow(64)
    play(flow, 120, far)
    quick = flow.window
    play(flow, 240, far, service=1.0)
    assert flow.window < quick
    play(flow, 240, far)
    assert flow.window >= 0.7 * quick


@given(
    st.integers(1, 100),
    st.lists(
        st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 200)), max_size=300
    ),
)
def test_whatever_is_told_the_window_stays_between_one_and_the_limit(limit, told):
    flow = Flow(limit)
    for total, compute, queue, under_way in told:
        flow.done(total, compute, queue, under_way)
        assert 1 <= flow.window <= limit


def test_fewer_microbatches_fit_in_less_memory_and_one_always_does():
    manifest = tiny_manifest()
    each = graph_bytes(manifest, 0)
    assert graphs_that_fit(manifest, 0, int(80 * each / GRAPH_SHARE)) == 80
    assert graphs_that_fit(manifest, 0, 1) == 1


@pytest.mark.parametrize(
    "features",
    [{}, {"qk_norm": True}, {"boundary": Boundary("token-anchored", 16, (1,))},
     {"boundary": Boundary("shared-subspace", 16, (1,))},
     {"qk_norm": True, "boundary": Boundary("token-anchored", 16, (1,))},
     {"qk_norm": True, "experts": Experts(num_experts=4, top_k=2)}],
    ids=["plain", "QK-norm", "anchored", "shared", "anchored QK-norm", "experts"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_autograd_keeps_is_about_what_was_foretold(features, dtype):
    model = ModelShape(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=192,
        **features,
    )
    manifest = tiny_manifest(stages=(1, 1), model=model)
    span, tokens = manifest.span(0), torch.zeros((2, 16), dtype=torch.int64)
    matrices = torch.float32 if dtype == "fp32" else torch.bfloat16
    weights = {name: torch.randn(shape, dtype=matrices if len(shape) > 1 else None, requires_grad=True)
               for name, shape in parameter_shapes(model, span).items()}  # fmt: skip
    own = {weight.untyped_storage().data_ptr() for weight in weights.values()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(weights, model, span, tokens)
    assert 0.8 < sum(kept.values()) / graph_bytes(manifest, 0, Computing(dtype)) < 1.25


def committed_per_second(latency, in_flight, seconds=24.0):
    """Of an origin whose two peers of the last stage are `latency` seconds away, and its window at last."""
    swarm = Swarm(tiny_manifest((1, 2)), conditions=Conditions(latency_seconds=latency), stub=True)
    window = []

    async def story():
        swarm.open()
        swarm.start("a", 0, in_flight=in_flight)
        for name in ("b", "c"):
            swarm.start(name, 1, slots=32)
        await swarm.until(lambda: swarm.committed(0) > 0, 30.0)
        await swarm.during(seconds)
        window.append(swarm.members["a"].worker.services.pipeline_service.origin.flow.window)
        await swarm.close()

    run(story())
    end = swarm.of("committed", "a")[-1].time
    late = [note for note in swarm.of("committed", "a") if end - seconds / 2 < note.time]
    return len(late) / (seconds / 2), window[0]


def test_a_far_stage_is_kept_as_busy_as_a_near_one():
    near, few = committed_per_second(0.001, 32)
    far, many = committed_per_second(0.15, 32)
    assert far > 0.9 * near
    assert few < many < 32
    assert far > 1.5 * committed_per_second(0.15, 4)[0], "or it would prove nothing"
