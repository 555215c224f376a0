"""Select the delta codec that a run configures."""

from __future__ import annotations

from swarmnet.optimizer.moved.bits import Bits
from swarmnet.optimizer.moved.code import Code
from swarmnet.optimizer.moved.largest import Largest
from swarmnet.optimizer.moved.levels import Levels
from swarmnet.optimizer.moved.powers import Powers
from swarmnet.run.manifest import Sync
from swarmnet.run.own_steps import SentName


def code_of(sent: SentName, sync: Sync) -> Code:
    codes: dict[SentName, Code] = {
        "bit": Bits(), "four-bits": Powers(), "eight-bits": Levels(), "largest": Largest(sync.sparse_kept),
    }  # fmt: skip
    return codes[sent]
