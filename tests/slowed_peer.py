"""A peer whose computer becomes slower: `slowed_peer.py TIMES PYTHON -m peers.cli run FILE`.

It trains like everybody until it gets SIGUSR2. From then on each piece of compute takes TIMES as long as it
would have, as on a machine that something else has begun to use. Messages are as quick as before.
"""

import signal
import sys

from peers import cli
from peers.compute import ThreadCompute

computes: list[ThreadCompute] = []
quick = ThreadCompute.__init__


def remembered(compute: ThreadCompute, share: float = 1.0) -> None:
    quick(compute, share)
    computes.append(compute)


if __name__ == "__main__":
    times, _, _, _, *arguments = sys.argv[1:]

    def slow_down(*_: object) -> None:
        for compute in computes:
            compute.pause = float(times) * (1.0 + compute.pause) - 1.0

    ThreadCompute.__init__ = remembered  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR2, slow_down)
    sys.argv = ["swarmnet", *arguments]
    cli.main()
