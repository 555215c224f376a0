"""The peer file of each peer of a process that holds several stages, made from the one that was typed."""

from __future__ import annotations

from pathlib import Path

from peers.config.peer_file import PeerFile
from peers.errors import ConfigError

FOLDER = "sibling-"
"""With a number from 1 on, in the state folder: what each peer but the first keeps."""
HIGHEST_PORT = 65535


def sibling_file(config: PeerFile, number: int) -> PeerFile:
    """The peer file of one of the peers of a process: of the first, number 0, as it was typed. The others
    have their folder and their key in the first one's, and listen on the ports behind its. ConfigError where
    there is no such port."""
    if number == 0:
        return config.model_copy(update={"moves": False})
    state = sibling_folder(config.state, number)
    invites = config.invite.split() or [""]
    first_watches = {"hours": None, "only_when_idle": False, "only_when_plugged_in": False}
    limits = config.limits.model_copy(update=first_watches)
    return config.model_copy(update={
        "moves": False, "state": state, "identity": state / "identity.key", "lan": False, "limits": limits,
        "invite": invites[min(number, len(invites) - 1)],
        "listen": tuple(with_later_port(address, number, "listen") for address in config.listen),
        "announce": tuple(with_later_port(address, number, "announce") for address in config.announce),
    })  # fmt: skip


def sibling_folder(state: Path, number: int) -> Path:
    return state / f"{FOLDER}{number}"


def with_later_port(address: str, number: int, key: str) -> str:
    """The multiaddr with a port so much higher; 0 stays 0. ConfigError where ports end."""
    parts = address.split("/")
    for index, part in enumerate(parts[:-1]):
        if part in ("tcp", "udp") and parts[index + 1].isdecimal() and parts[index + 1] != "0":
            port = int(parts[index + 1]) + number
            if port > HIGHEST_PORT:
                raise ConfigError(
                    [f"{key}: {address}: each further stage listens on the next port, and {port} is none"]
                )
            parts[index + 1] = str(port)
    return "/".join(parts)
