"""Real peers on the emulated WAN: `scripts/soak wan WHAT`. Needs root; minutes per figure.

    tokens      tokens/s of 6 peers in 2 stages at 10/100 Mbit/s, 50 ms round trip, 1 % loss, cubic, beside
                the same swarm on loopback
    partition   50/50 for a minute, then healed: seconds until every stage has one digest again
    join        a newcomer to a stage with four holders: how much of the lines its fetch of the state uses

    liar        100 newcomers where one of four holders lies; in memory on a virtual clock, without the WAN

Everything is read from the peers' event logs.
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path

import wan
from wan_join import join
from wan_liar import liar
from wan_partition import partition
from wan_swarm import MODELS
from wan_tokens import tokens

WORK = {"tokens": tokens, "partition": partition, "join": join, "liar": liar}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=list(WORK))
    parser.add_argument("--model", choices=list(MODELS), default="1M")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--warm-seconds", type=float, default=20.0)
    parser.add_argument("--in-flight", type=int, default=0, help="tokens: at most; 0: the default")
    parser.add_argument("--global-batch-tokens", type=int, default=8192)
    parser.add_argument("--peers", type=int, default=6, help="tokens")
    parser.add_argument("--stages", type=int, default=2, help="tokens: 1: the whole model on each peer")
    parser.add_argument("--sharded", action="store_true", help="tokens --stages 1: through reducers")
    parser.add_argument("--local-steps", action="store_true", help="tokens: own steps, in stages as well")
    parser.add_argument("--sign-muon", action="store_true", help="tokens: votes on polar factors")
    parser.add_argument("--parts", type=int, default=4, help="tokens: sync.fragments")
    parser.add_argument(
        "--boundary", type=int, default=0, help="tokens: model.boundary.width (token-anchored)"
    )
    parser.add_argument("--seq-len", type=int, default=0, help="tokens; 0: the default")
    parser.add_argument("--quic", action="store_true", help="tokens: QUIC instead of TCP on the WAN")
    parser.add_argument("--paced", type=float, default=0.0, help="tokens: scripts/soaks/wan/wan_paced.py")
    parser.add_argument("--subflows", type=int, default=2, help="tokens --paced: at most so many per link")
    parser.add_argument("--only-wan", action="store_true", help="tokens: without loopback")
    parser.add_argument("--training", action="store_true", help="join: while the others go on training")
    parser.add_argument("--holders", default="", help="join: what is wrong with the first: lies,stalls")
    parser.add_argument("--joins", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    reason = wan.why_not()
    if reason is not None and arguments.what != "liar":
        sys.exit(f"error: no emulated network here: {reason}")
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="swarmnet-wan-"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(json.dumps(asyncio.run(WORK[arguments.what](folder, arguments)), indent=1))


if __name__ == "__main__":
    main()
