"""Run by test_interop.py in a process of its own: hivemind's public DHT client, none of our code.

interop_hivemind.py BOOTSTRAP KEY...    prints one JSON object: key -> subkey -> value, in hexadecimal; the
subkey is "" where a value has none.
"""

import json
import sys
import warnings

warnings.simplefilter("ignore")

from hivemind import DHT  # noqa: E402 - it warns while it loads


def main() -> None:
    bootstrap, *keys = sys.argv[1:]
    dht = DHT(
        start=True, initial_peers=[bootstrap], host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        use_relay=False, use_auto_relay=False, use_ipfs=False,
    )  # fmt: skip
    found = {}
    try:
        for key in keys:
            answer = dht.get(bytes.fromhex(key), latest=True)
            value = answer.value if answer is not None else {}
            if isinstance(value, bytes):
                found[key] = {"": value.hex()}
            else:
                found[key] = {subkey: entry.value.hex() for subkey, entry in value.items()}
    finally:
        dht.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":  # hivemind starts its DHT in a process that loads this file again
    main()
