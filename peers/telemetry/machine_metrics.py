"""Metrics of the machine that a peer runs on: its compute thread's time, its GPU, what it can do at most."""

from __future__ import annotations

from peers.telemetry.metric_kinds import Declare, Label

IDLE = ("microbatches", "answers", "stage_missing", "joining", "held", "paused", "leaving", "work_share",
        "other")  # fmt: skip
"""What the compute thread can wait for (peers/worker/compute_sampler.py)."""

GPU = {
    "gpu_memory_used_bytes": "Bytes of GPU memory in use, by whomever. Only with a GPU.",
    "gpu_memory_total_bytes": "Bytes of GPU memory. Only with a GPU.",
    "gpu_memory_reserved_bytes": "Bytes of GPU memory that this peer holds. Only with a GPU.",
    "gpu_utilization_ratio":
        "Share of the time in which some program computed on the GPU, 0 to 1. Only with NVIDIA's library.",
    "gpu_temperature_celsius": "Temperature of the GPU, degrees Celsius. Only with NVIDIA's library.",
    "gpu_power_watts": "Power that the GPU draws, watts. Only with NVIDIA's library.",
}  # fmt: skip

PEAK = {
    "declared_peak_operations_per_second":
        "What this peer's file says that its device can do, floating-point operations per second. "
        "Only if it does.",
    "train_flops_utilization_ratio":
        "Model flops utilisation over the last 10 seconds: the model's operations by those that the declared "
        "peak allows, 0 to 1. Only with a declared peak.",
}  # fmt: skip


EVALUATION = {
    "eval_loss":
        "Loss on held-out text, by the run's newest settled weights, nats per token. Only of an observer "
        "that evaluates.",
    "eval_round":
        "Round of the weights that were scored, number; of stages that differ, the oldest. Only of an "
        "observer that evaluates.",
    "eval_timestamp_seconds":
        "When the newest score was made, Unix time in seconds. Only of an observer that evaluates.",
}  # fmt: skip


class ComputeSeconds:
    """Where the compute thread's time goes."""

    def __init__(self, declare: Declare) -> None:
        self.busy = declare.counter("compute_busy_seconds_total", "Computing, for visitors too, seconds.")
        self.idle = declare.counters(
            "compute_idle_seconds_total",
            "Not computing, by what was waited for when it was looked at (once a second), seconds; "
            "microbatches: nothing to do has come; answers: all microbatches here are on other stages; "
            "joining: not in step yet; held: the owner paused the run; work_share: rest that the peer file "
            "asks for.",
            Label("reason", IDLE),
        )
