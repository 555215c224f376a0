"""What many keys of one attacker cost a stage: a newcomer's time to join, throughput, processor time of each
honest peer (in cores), and weights of votes.

Eight honest peers on a virtual clock, whose votes are weighed by agreement, before and during the attack. All
keys, which have 16 address ranges together, announce records and greet every honest peer again and again.
Prints a row for each way of the attack.
"""

from __future__ import annotations

import argparse

from false_keys import WAYS, manifest, story
from swarm import Swarm

from peers.lab.world.virtual_time import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=40.0, help="virtual seconds of the attack")
    parser.add_argument("--way", choices=WAYS, action="append", help="what the keys do; all by default")
    given = parser.parse_args()
    print("| keys | what they do | joins, s | microbatches/s | rounds/s | cores | honest weight | false |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for keys, way in [(0, "joins"), *((given.keys, way) for way in given.way or WAYS)]:
        print(run(story(Swarm(manifest()), keys, way, given.seconds)).row(), flush=True)


if __name__ == "__main__":
    main()
