"""Parse durations, sizes, rates, addresses and paths as people write them. Inside the program they are
seconds, bytes and checked text."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ValidationInfo

from peers.config.schema import TypeLabel
from swarmnet.identifiers import PeerId

_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
MAX_NUMBER = 2**60
"""Largest number before a unit: an exbibyte in bytes. A larger one is a mistake, and might overflow a
float."""

_BYTES = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_BYTES["KiB"] = _BYTES["kiB"]
_BITS = {"bit": 1, "kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9}
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*\.?", re.IGNORECASE)


def seconds(value: object) -> object:
    """Return seconds from `30`, `1.5` or `30s`, `500ms`, `5min`, `2h`, `1d`. Values that are not text are
    returned unchanged, for pydantic to check. Raises ValueError."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value)
    unit = _SECONDS.get(match[2] or "s") if match else None
    if match is None or unit is None or float(match[1]) > MAX_NUMBER:
        raise ValueError(f"is {value!r}; expected a duration such as 30s, 500ms, 5min or 2h")
    return float(match[1]) * unit


def byte_count(value: object) -> object:
    """Return bytes from `1024`, `64MiB` or `1.5GB`. Values that are not text are returned unchanged. Raises
    ValueError."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    unit = _BYTES.get(match[2]) if match else None
    if match is None or unit is None or float(match[1]) > MAX_NUMBER:
        raise ValueError(f"is {value!r}; expected a size such as 64MiB, 1.5GB or a number of bytes")
    return round(float(match[1]) * unit)


def size_text(count: int) -> str:
    """Return a number of bytes as text, in the largest binary unit that divides it: 134217728 is `128MiB`."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count and count % (1 << power) == 0:
            return f"{count >> power}{unit}"
    return f"{count} bytes"


def at_least_bytes(least: int, example: str) -> AfterValidator:
    """Return a pydantic validator that refuses sizes below `least` bytes. Its error shows bytes and an
    example, because the usual mistake is a missing unit."""

    def check(value: int | None) -> int | None:
        if value is not None and value < least:
            raise ValueError(f"is {value} bytes; it must be at least {size_text(least)}, such as {example}")
        return value

    return AfterValidator(check)


def at_least_rate(least: float, example: str) -> AfterValidator:
    """Return a pydantic validator that refuses rates below `least` bytes per second. `least` is a multiple of
    125, so that the error can name it in whole kbit/s."""

    def check(value: float | None) -> float | None:
        if value is not None and value < least:
            shown = f"is {value:g} bytes per second; it must be at least {least * 8 / 1000:g}kbit/s"
            raise ValueError(f"{shown}, such as {example}")
        return value

    return AfterValidator(check)


def byte_rate(value: object) -> object:
    """Return bytes per second from `20Mbit/s`, `2.5MB/s` or `1MiB/s`. Values that are not text are returned
    unchanged. Raises ValueError."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)/s\s*", value)
    unit: float | None = None  # In bytes.
    if match is not None and match[2] in _BITS:
        unit = _BITS[match[2]] / 8
    elif match is not None:
        unit = _BYTES.get(match[2])
    if match is None or unit is None or float(match[1]) > MAX_NUMBER:
        raise ValueError(f"is {value!r}; expected a rate such as 20Mbit/s or 2.5MB/s")
    return float(match[1]) * unit


EXAMPLE = "/ip4/203.0.113.5/tcp/31330"


def multiaddr(value: str) -> str:
    """Return a libp2p address such as `/ip4/0.0.0.0/tcp/31330` unchanged; `/p2p/...` may follow. Raises
    ValueError if `value` is no such address."""
    _require_multiaddr(value, EXAMPLE)
    return value


def _require_multiaddr(value: str, example: str) -> None:
    """Raise ValueError unless `value` is a multiaddr: a libp2p address with an IP or DNS name and a TCP or
    UDP port. The error shows `example`."""
    parts = value.split("/")  # /ip4/1.2.3.4/tcp/4001: "", "ip4", "1.2.3.4", "tcp", "4001".
    problem = None
    if len(parts) < 5 or parts[0] or parts[1] not in ("ip4", "ip6", "dns", "dns4", "dns6"):
        problem = "is no multiaddr"
    elif parts[1] in ("ip4", "ip6") and not _is_ip(parts[2], int(parts[1][2])):
        problem = f"has no IPv{parts[1][2]} address in it"
    elif parts[1].startswith("dns") and not _NAME.fullmatch(parts[2]):
        problem = f"has no host name in it ({parts[2]!r})"
    elif parts[3] not in ("tcp", "udp") or not parts[4].isdecimal():
        problem = "has no /tcp/PORT or /udp/PORT in it"
    elif not is_port(parts[4]):
        raise ValueError(f"port {parts[4][:20]}: 1 to 65535, in {value!r}")
    if problem:
        raise ValueError(f"{value!r} {problem}; expected for instance {example}")


def bootstrap_multiaddr(value: str) -> str:
    """Return a multiaddr unchanged. Raises ValueError unless it ends in `/p2p/` and a peer id."""
    from protocols.signed.identity import public_key_bytes  # Loads the cryptography library.

    _require_multiaddr(value, f"{EXAMPLE}/p2p/12D3Koo...")
    _, named, peer = value.rpartition("/p2p/")
    if not named:
        raise ValueError(f"{value!r} does not name the peer; expected /p2p/12D3Koo... at its end")
    try:
        public_key_bytes(PeerId(peer))
    except ValueError:
        raise ValueError(
            f"{value!r} ends in no peer id: {peer[:64]!r} was mistyped or cut; expected 12D3Koo..., 52 long"
        ) from None
    return value


def host_and_port(value: str) -> str:
    """Return `127.0.0.1:9410`, `[::1]:9410` or `off` unchanged. Raises ValueError for anything else."""
    if value != "off":
        split_host_and_port(value)
    return value


def is_port(text: str) -> bool:
    """Return whether the text is a port number, 0 to 65535."""
    return text.isdecimal() and len(text) <= 5 and int(text) <= 65535


def split_host_and_port(value: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`; an IPv6 host stands in brackets. Raises ValueError."""
    host, colon, port = value.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not is_port(port):
        raise ValueError(f"is {value!r}; expected HOST:PORT such as 127.0.0.1:9410, or off")
    return host, int(port)


def host_name(value: str) -> str:
    """Return a DNS name in lower case, without the final dot. Raises ValueError."""
    if not _NAME.fullmatch(value) or len(value) > 253:
        raise ValueError(f"is {value!r}; expected a name without port, such as node-07.example.org")
    return value.lower().rstrip(".")


def resolve_path(path: Path, info: ValidationInfo) -> Path:
    """Return the full path for a path in a peer file, which is relative to the file's folder. `~` is the home
    folder. Raises ValueError if there is no such home folder."""
    folder = info.context.get("folder") if isinstance(info.context, dict) else None
    try:
        path = path.expanduser()
    except RuntimeError:  # Pydantic reports only ValueError as the user's mistake.
        raise ValueError(
            f"{str(path)!r}: this machine has no such home folder; write the full path"
        ) from None
    return folder / path if isinstance(folder, Path) else path


def _is_ip(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


Seconds = Annotated[float, BeforeValidator(seconds), TypeLabel("duration such as 30s or 5min")]
BytesPerSecond = Annotated[float, BeforeValidator(byte_rate), TypeLabel("rate such as 20Mbit/s")]
ByteCount = Annotated[int, BeforeValidator(byte_count), TypeLabel("size such as 64MiB")]
Multiaddr = Annotated[str, AfterValidator(multiaddr), TypeLabel("multiaddr")]
BootstrapMultiaddr = Annotated[str, AfterValidator(bootstrap_multiaddr), TypeLabel("multiaddr with /p2p/...")]
HostName = Annotated[str, AfterValidator(host_name), TypeLabel("name")]
HostAndPort = Annotated[str, AfterValidator(host_and_port), TypeLabel("HOST:PORT | off")]
FilePath = Annotated[Path, AfterValidator(resolve_path), TypeLabel("path")]
