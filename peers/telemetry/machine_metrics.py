"""Metrics of the machine that a peer runs on: its compute thread's time and its GPU."""

from __future__ import annotations

from peers.telemetry.metric_kinds import Declare, Label

IDLE = (
    "microbatches",
    "answers",
    "stage_missing",
    "joining",
    "paused_by_owner",
    "paused",
    "leaving",
    "compute_duty_cycle",
    "other",
)
"""What the compute thread can wait for (peers/worker/compute_sampler.py)."""

GPU = {
    "gpu_memory_used_ratio": "Share of the GPU's memory in use, by whomever, 0 to 1. Only with a GPU.",
    "gpu_utilization_ratio":
        "Share of the time in which some program computed on the GPU, 0 to 1. Only with NVIDIA's library.",
    "gpu_temperature_celsius": "Temperature of the GPU, degrees Celsius. Only with NVIDIA's library.",
    "gpu_power_watts": "Power that the GPU draws, watts. Only with NVIDIA's library.",
}  # fmt: skip

EXPERTS = {
    "expert_load_imbalance":
        "Tokens of a layer's busiest expert over the mean of its experts, mean of the stage's layers, in the "
        "newest ten seconds; 1: even. Only where there are experts, computed on one device.",
}  # fmt: skip

PEAK = {
    "train_flops_utilization_ratio":
        "Model flops utilisation over the last 10 seconds: the model's operations by those that the declared "
        "peak allows, 0 to 1. Only with a declared peak.",
}  # fmt: skip


class ComputeSeconds:
    """Where the compute thread's time goes."""

    def __init__(self, declare: Declare) -> None:
        self.busy = declare.counter("compute_busy_seconds_total", "Computing, for visitors too, seconds.")
        self.idle = declare.counters(
            "compute_idle_seconds_total",
            "Not computing, by what was waited for when it was looked at (once a second), seconds; "
            "microbatches: nothing to do has come; answers: all microbatches here are on other stages; "
            "joining: not in step yet; held: the owner paused the run; compute_duty_cycle: rest that "
            "the peer file "
            "asks for.",
            Label("reason", IDLE),
        )
