"""Whether a machine has nothing else to do, from how much of it others use, looked at now and then.

Two thresholds and two patiences: a game is noticed within seconds, and a pause between two of its levels does
not bring the peer back. No IO. Times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IdleRules:
    busy_cores: float = 0.5
    """Cores that other processes use from which on the machine is in use. A desktop at rest takes 0.05
    to 0.2."""
    quiet_cores: float = 0.3
    """Below which it may be idle again."""
    busy_gpu: float = 0.1
    """Share of the GPU's time that other processes use, from which on it is in use."""
    quiet_gpu: float = 0.05
    busy_seconds: float = 5.0
    """In use for so long, it pauses."""
    quiet_seconds: float = 120.0
    """Idle for so long, it goes on."""


class Idleness:
    """`idle` is what to go by. A peer begins as if the machine were idle."""

    def __init__(self, rules: IdleRules | None = None) -> None:
        self.rules = rules if rules is not None else IdleRules()
        self.idle = True
        self._since: float | None = None
        """When the looks began to say the other thing."""

    def look(self, other_cores: float, other_gpu: float | None, now: float) -> bool:
        """Take in one look: cores, and share of the GPU, that other processes use (None: cannot be told)."""
        rules = self.rules
        gpu = other_gpu if other_gpu is not None else 0.0
        if self.idle:
            differs = other_cores >= rules.busy_cores or gpu >= rules.busy_gpu
            patience = rules.busy_seconds
        else:
            differs = other_cores < rules.quiet_cores and gpu < rules.quiet_gpu
            patience = rules.quiet_seconds
        if not differs:
            self._since = None
            return self.idle
        self._since = now if self._since is None else self._since
        if now - self._since >= patience:
            self.idle, self._since = not self.idle, None
        return self.idle


class Steady:
    """A yes or no that changes when the looks have said so for some seconds. It begins with the first one."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.says: bool | None = None
        self._since = 0.0
        """When the looks last said what it says."""

    def look(self, says: bool, now: float) -> bool:
        """Take in one look; what to go by."""
        if self.says is None or says == self.says or now - self._since >= self.seconds:
            self.says, self._since = says, now
        return self.says
