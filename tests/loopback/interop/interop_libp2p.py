"""Run by test_interop.py in a process of its own: py-libp2p, none of our code, greets a peer.

interop_libp2p.py MULTIADDR    prints one JSON object: what identify says, and a ping's microseconds.
"""

import json
import sys
import warnings

warnings.simplefilter("ignore")

import trio  # noqa: E402 - these warn while they load
from libp2p import new_host  # noqa: E402
from libp2p.crypto.ed25519 import create_new_key_pair  # noqa: E402
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key  # noqa: E402
from libp2p.custom_types import TProtocol  # noqa: E402
from libp2p.host.ping import PingService  # noqa: E402
from libp2p.identity.identify.identify import ID as IDENTIFY  # noqa: E402
from libp2p.identity.identify.identify import parse_identify_response  # noqa: E402
from libp2p.peer.peerinfo import info_from_p2p_addr  # noqa: E402
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE  # noqa: E402
from libp2p.security.noise.transport import Transport as Noise  # noqa: E402
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX  # noqa: E402
from libp2p.stream_muxer.yamux.yamux import Yamux  # noqa: E402
from libp2p.utils.varint import read_length_prefixed_protobuf  # noqa: E402
from multiaddr import Multiaddr  # noqa: E402

SECONDS = 90


async def main() -> None:
    address = Multiaddr(sys.argv[1])
    keys = create_new_key_pair()
    # Only Noise: py-libp2p's defaults also offer plain text.
    noise = Noise(keys, noise_privkey=create_noise_key().private_key)
    host = new_host(key_pair=keys, sec_opt={NOISE: noise}, muxer_opt={TProtocol(YAMUX): Yamux})
    with trio.fail_after(SECONDS):
        async with host.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]):
            info = info_from_p2p_addr(address)
            await host.connect(info)
            stream = await host.new_stream(info.peer_id, (IDENTIFY,))
            identity = parse_identify_response(
                await read_length_prefixed_protobuf(stream, use_varint_format=True)
            )
            round_trips = await PingService(host).ping(info.peer_id, 2)
            print(
                json.dumps(
                    {
                        "agent": identity.agent_version,
                        "public_key": identity.public_key.hex(),
                        "protocols": list(identity.protocols),
                        "addresses": [str(Multiaddr(each)) for each in identity.listen_addrs],
                        "round_trips": round_trips,
                        "host": str(host.get_id()),
                    }
                )
            )


if __name__ == "__main__":
    trio.run(main)
