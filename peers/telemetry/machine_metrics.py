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
"""What the compute thread can wait for (peers/worker/watch/compute_sampler.py)."""

GPU = {
    "gpu_memory_used_ratio": "GPU memory in use by any program, 0 to 1. Only with a GPU.",
    "gpu_utilization_ratio": "Fraction of time in which any program used the GPU, 0 to 1. Only with NVML.",
    "gpu_temperature_celsius": "GPU temperature. Only with NVML.",
    "gpu_power_watts": "GPU power draw. Only with NVML.",
}

EXPERTS = {
    "expert_load_imbalance_ratio": "Tokens of a layer's busiest expert over the mean of its experts, "
    "averaged over layers and 10 seconds; 1: even. Only with experts on one device.",
}

PEAK = {
    "train_flops_utilization_ratio": "Model FLOPs utilization over 10 seconds, 0 to 1. Only with "
    "`metrics.peak_flops`.",
}


class ComputeSeconds:
    """The compute thread's time."""

    def __init__(self, declare: Declare) -> None:
        self.busy = declare.counter("compute_busy_seconds_total", "Seconds of computing, inference included.")
        self.idle = declare.counters(
            "compute_idle_seconds_total",
            "Idle seconds by reason, sampled once a second; microbatches: none has arrived; answers: all are "
            "on other stages; joining: not in step yet; paused_by_owner: the owner paused the run; "
            "compute_duty_cycle: limited by the peer file.",
            Label("reason", IDLE),
        )
