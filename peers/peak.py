"""What a device can do at most: the fastest product of two matrices that it makes here and now."""

from __future__ import annotations

from time import perf_counter

import torch

from swarmnet.linear import linear

SIDES = {"cpu": 768, "cuda": 4096}
"""Of the matrices: large enough to fill the device, small enough for a few on one processor core."""
MOST_SECONDS = 0.25
MOST_PRODUCTS = 10


def measured_peak(device: torch.device) -> float:
    """Floating-point operations per second, in the arithmetic of a stage's layers (swarmnet/linear.py) and
    with as many threads. Takes MOST_SECONDS and a product more."""
    side = SIDES.get(device.type, SIDES["cpu"])
    matrix = torch.ones(side, side, device=device)
    began, fastest = perf_counter(), float("inf")
    for _ in range(MOST_PRODUCTS):
        at = perf_counter()
        with torch.no_grad():
            linear(matrix, matrix)[0, 0].item()  # Which waits until the product is there.
        fastest = min(fastest, perf_counter() - at)
        if perf_counter() - began > MOST_SECONDS:
            break
    return 2.0 * side**3 / fastest
