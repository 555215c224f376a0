"""Decide whether a machine is idle, from periodic samples of how much of it other programs use.

Two thresholds and two delays make the decision stable. A game is noticed within seconds. A pause between two
of its levels does not resume the peer. The module does no IO. All times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IdleRules:
    """Thresholds and delays of the decision."""

    busy_cores: float = 0.5
    """Cores used by other processes from which on the machine is in use. An idle desktop uses 0.05 to 0.2."""
    quiet_cores: float = 0.3
    """Number of cores below which the machine may be idle again."""
    busy_gpu: float = 0.1
    """Share of the GPU's time used by other processes from which on it is in use."""
    quiet_gpu: float = 0.05
    busy_seconds: float = 5.0
    """Seconds of use after which the peer pauses."""
    quiet_seconds: float = 120.0
    """Seconds of idleness after which the peer resumes."""


class Idleness:
    """The decision over time. `idle` is the current state; a peer starts as if the machine were idle."""

    def __init__(self, rules: IdleRules | None = None) -> None:
        self.rules = rules if rules is not None else IdleRules()
        self.idle = True
        self._since: float | None = None
        """Time since when the samples contradict `idle`; None if they do not."""

    def look(self, other_cores: float, other_gpu: float | None, now: float) -> bool:
        """Add a sample of what other programs use: number of cores, and share of the GPU (None: unknown).
        Returns whether the machine counts as idle. The result changes only after all samples have
        contradicted it for `busy_seconds` (if idle) or `quiet_seconds` (if busy)."""
        rules = self.rules
        gpu = other_gpu if other_gpu is not None else 0.0
        if self.idle:
            contradicts = other_cores >= rules.busy_cores or gpu >= rules.busy_gpu
            delay = rules.busy_seconds
        else:
            contradicts = other_cores < rules.quiet_cores and gpu < rules.quiet_gpu
            delay = rules.quiet_seconds
        if not contradicts:
            self._since = None
            return self.idle
        if self._since is None:
            self._since = now
        if now - self._since >= delay:
            self.idle = not self.idle
            self._since = None
        return self.idle


class Steady:
    """A boolean that changes only if samples differ for some seconds. It starts with the first sample."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.says: bool | None = None
        self._since = 0.0
        """Time of the last sample that agreed with `says`."""

    def look(self, says: bool, now: float) -> bool:
        """Add a sample and return the stable value."""
        if self.says is None or says == self.says or now - self._since >= self.seconds:
            self.says = says
            self._since = now
        return self.says
