"""A holder of a state that is no use: `wan_holder.py lies|stalls PYTHON -m peers.cli.main run FILE`.

It trains like everybody and signs the same roots. It differs when somebody fetches the state: `lies` sends
chunks with one bit turned, `stalls` takes the questions and answers none.
"""

import asyncio
import sys

from peers.cli import main as cli
from peers.state.snapshot_service import SnapshotService
from protocols.p2pd.chunk_streams import ChunkService

honest = SnapshotService.chunk


def lie(states, digest, index):
    chunk = honest(states, digest, index)
    return None if chunk is None else memoryview(bytes([chunk[0] ^ 1]) + chunk[1:])


async def stall(service, info, reader, writer):
    await asyncio.sleep(600)


if __name__ == "__main__":
    what, _, _, _, *arguments = sys.argv[1:]
    if what == "lies":
        SnapshotService.chunk = lie
    else:
        ChunkService.accept = stall
        SnapshotService._send_chunk = lambda *_: None
    sys.argv = ["swarmnet", *arguments]
    cli.main()
