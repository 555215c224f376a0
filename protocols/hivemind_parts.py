"""The parts of hivemind 1.1.12 that we use (its p2pd binding and its DHT), and nothing else of it.

hivemind's own `__init__` imports its optimizers, mixture-of-experts server and scipy: 2.6 s and 46 MiB in
each peer process, and a warning of torch's. So the package is entered without running that file; submodules
are found as usual. If something else has imported hivemind as a whole before, that one is used.
"""

from __future__ import annotations

import importlib.util
import sys


def _enter_package() -> None:
    if "hivemind" in sys.modules:
        return
    found = importlib.util.find_spec("hivemind")
    if found is None:
        raise ModuleNotFoundError("hivemind is not installed; run scripts/demo or: pip install -e .")
    sys.modules["hivemind"] = importlib.util.module_from_spec(found)


_enter_package()

from hivemind.dht.node import DHTNode  # noqa: E402
from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.dht.storage import DictionaryDHTValue  # noqa: E402
from hivemind.p2p import P2P, P2PContext, PeerID  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.utils import (  # noqa: E402
    P2PDaemonError,
    P2PHandlerError,
    read_pbmsg_safe,
    write_pbmsg,
)
from hivemind.proto import dht_pb2, p2pd_pb2  # noqa: E402
from hivemind.utils import MSGPackSerializer  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr  # noqa: E402

__all__ = [
    "DHTID",
    "P2P",
    "DHTNode",
    "DictionaryDHTValue",
    "MSGPackSerializer",
    "Multiaddr",
    "P2PContext",
    "P2PDaemonError",
    "P2PHandlerError",
    "PeerID",
    "StreamInfo",
    "dht_pb2",
    "p2pd_pb2",
    "read_pbmsg_safe",
    "write_pbmsg",
]
