"""What may decide a bit of what this peer computes, in a few bytes: only who computes alike can tell a lie
from another rounding."""

from __future__ import annotations

import torch

from swarmnet.audits.commitment import settings_of
from swarmnet.model.computing.choices import Computing


def work_settings(computing: Computing, device: torch.device, kind: str, text: bytes = b"") -> bytes:
    """Threads are among it: how sums are cut hangs on them. `kind`: of several devices (StagePart.kind);
    `text`: names what it reads."""
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device), torch.version.cuda
    else:
        machine = torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())
    return settings_of(text, torch.__version__, device.type, *machine, kind, computing)
