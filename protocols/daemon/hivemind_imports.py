"""Import only the parts of hivemind 1.1.12 that are used: its p2pd binding and its DHT.

The `__init__` of hivemind imports its optimizers, its mixture-of-experts server and scipy. That costs 2.6 s
and 46 MiB in each peer process and prints a torch warning. The `__init__` files of its `dht` and `utils`
import torch for a future shared between processes; a bootstrap and an observer need no torch otherwise. This
module therefore registers these packages without running their `__init__` files. Submodules are found as
usual. If hivemind was already imported as a whole, that import is used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec

UTILITIES = {
    "logging": ("get_logger",),
    "serializer": ("MSGPackSerializer", "SerializerBase"),
    "timed_storage": ("get_dht_time",),
}
"""Names that hivemind's DHT needs from `hivemind.utils`, by the submodule that defines them."""


def _register(package: str) -> bool:
    """Put a package into `sys.modules` without running its `__init__`. Returns False if it was there before.
    Raises ModuleNotFoundError if hivemind is not installed."""
    if package in sys.modules:
        return False
    spec = find_spec(package)
    if spec is None:
        raise ModuleNotFoundError("hivemind is not installed; run scripts/demo or: pip install -e .")
    module = module_from_spec(spec)
    sys.modules[package] = module
    parent, _, name = package.rpartition(".")
    if parent:
        setattr(sys.modules[parent], name, module)
    return True


def _register_packages() -> None:
    """Register hivemind's packages, and give `hivemind.utils` the names that its `__init__` would import."""
    _register("hivemind")
    _register("hivemind.dht")
    if _register("hivemind.utils"):
        for submodule, names in UTILITIES.items():
            loaded = import_module(f"hivemind.utils.{submodule}")
            for name in names:
                setattr(sys.modules["hivemind.utils"], name, getattr(loaded, name))


_register_packages()

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
from hivemind.utils.timed_storage import ValueWithExpiration  # noqa: E402

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
    "ValueWithExpiration",
    "dht_pb2",
    "p2pd_pb2",
    "read_pbmsg_safe",
    "write_pbmsg",
]
