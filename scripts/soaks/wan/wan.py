"""A wide-area network on one Linux machine: network namespaces, and a router in user space between them.

    with Wan() as wan:
        a = wan.host("a", up=10, down=100, delay=25, loss=0.01)
        b = wan.host("b", up=10, down=100, delay=25, loss=0.01)
        a.popen([sys.executable, "program.py"])     # anything, in a's namespace
        wan.partition(["a"], ["b"]); wan.heal()

Needs root and /dev/net/tun, and no kernel module for traffic shaping. Measured: 50 ms is 51, 10 Mbit/s is
10.0 on the wire, 1 % loss 1.0-1.1 %; one cubic stream then carries 2.4-2.6 Mbit/s.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from wan_router import Router, Spec

SUBNET = "10.77"
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
SINK = """
import socket, sys, time
server = socket.create_server((sys.argv[1], int(sys.argv[2]))); print("ready", flush=True)
stream, _ = server.accept(); count, first = 0, None
while data := stream.recv(1 << 18):
    first = first or time.monotonic(); count += len(data)
print(count, time.monotonic() - first, flush=True)
"""
SOURCE = """
import socket, sys
stream = socket.create_connection((sys.argv[1], int(sys.argv[2])), 30)
left, data = int(sys.argv[3]), bytes(1 << 16)
while left > 0: left -= stream.send(data[:left])
"""
ECHO = """
import socket, sys
echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); echo.bind((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
while True:
    data, sender = echo.recvfrom(1500); echo.sendto(data, sender)
"""
PING = """
import socket, struct, sys, threading, time
line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); line.connect((sys.argv[1], int(sys.argv[2])))
line.settimeout(1.0)
def send():
    for _ in range(int(sys.argv[3])): line.send(struct.pack("d", time.monotonic())); time.sleep(0.01)
threading.Thread(target=send).start()
try:
    for _ in range(int(sys.argv[3])):
        data = line.recv(1500); print((time.monotonic() - struct.unpack("d", data)[0]) * 1e3, flush=True)
except TimeoutError: pass
"""


def why_not():
    """Why this machine cannot make a Wan; None: it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "needs root (in a container: CAP_NET_ADMIN and CAP_SYS_ADMIN)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun is not there"
    name = f"probe{os.getpid():x}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=10)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True, timeout=10)
    return None


class Host:
    def __init__(self, wan, name, namespace, address, spec):
        self.wan, self.name, self.namespace, self.address, self.spec = wan, name, namespace, address, spec
        self.started = []

    @property
    def prefix(self):
        """What makes a command run here; it becomes the command, so process ids are the command's."""
        return ["ip", "netns", "exec", self.namespace]

    def popen(self, command, **options):
        process = subprocess.Popen([*self.prefix, *map(str, command)], start_new_session=True, **options)
        self.started.append(process)
        return process

    def run(self, command, seconds=60):
        return subprocess.run(
            [*self.prefix, *map(str, command)], capture_output=True, text=True, timeout=seconds
        )

    def set(self, **changes):
        self.spec = Spec(**{**asdict(self.spec), **changes})
        self.wan.call(operation="set", name=self.name, spec=asdict(self.spec))


class Wan:
    def __init__(self, seed=0, congestion="cubic"):
        self.hosts, self.congestion = {}, congestion
        self.tag = f"w{os.getpid():x}"
        self.allowed = None
        self.socket, theirs = socket.socketpair()
        self.answers = self.socket.makefile("r")
        self.router = os.fork()
        if self.router == 0:
            self.socket.close()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                Router(theirs, seed).run()
            finally:
                os._exit(0)
        theirs.close()
        atexit.register(self.close)

    def call(self, **command):
        self.socket.sendall((json.dumps(command) + "\n").encode())
        answer = json.loads(self.answers.readline() or '{"error": "the router died"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def host(self, name, **spec):
        """A new host; `spec` as in wan_router.Spec."""
        number = len(self.hosts)
        namespace, address = f"{self.tag}-{name}", f"{SUBNET}.{number // 250}.{number % 250 + 1}"
        subprocess.run(["ip", "netns", "add", namespace], check=True, timeout=10)
        host = self.hosts[name] = Host(self, name, namespace, address, Spec(**spec))
        self.call(operation="add", name=name, namespace=namespace, address=address, spec=asdict(host.spec))
        batch = (
            f"link set lo up\naddr add {address}/16 dev wan0\nlink set wan0 mtu 1500 txqueuelen 2000 up\n"
            "route add default dev wan0\n"
        )
        subprocess.run(["ip", "-n", namespace, "-batch", "-"], input=batch, text=True, check=True, timeout=10)
        self._control_congestion(host)
        return host

    def _control_congestion(self, host):
        """A namespace may only use what the machine's list allows (here the default is bbr, not cubic)."""
        allowed = ALLOWED.read_text().split()
        if self.congestion not in allowed:
            self.allowed = self.allowed or allowed
            ALLOWED.write_text(" ".join([*allowed, self.congestion]))
        set_ = host.run(["sysctl", "-qw", f"net.ipv4.tcp_congestion_control={self.congestion}"])
        if set_.returncode or set_.stderr:  # It exits 0 on "Operation not permitted".
            raise RuntimeError(set_.stderr)

    def partition(self, *groups):
        """Hosts of different groups exchange nothing any more."""
        pairs = [[a, b] for one in groups for other in groups if one is not other for a in one for b in other]
        self.call(operation="block", pairs=pairs)

    def block(self, source, target):
        """One way only."""
        self.call(operation="block", pairs=[[source, target]])

    def heal(self):
        self.call(operation="heal")

    def stats(self):
        return self.call(operation="stats")

    def close(self):
        """End what runs in the namespaces, and remove them. May be called again."""
        if self.router is None:
            return
        for process in [process for host in self.hosts.values() for process in host.started]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.socket.shutdown(socket.SHUT_RDWR)
        os.waitpid(self.router, 0)
        self.router = None
        self.answers.close()
        self.socket.close()
        for host in self.hosts.values():
            inside = subprocess.run(
                ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, timeout=10
            )
            for pid in inside.stdout.split():  # what left our session
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", host.namespace], timeout=10)
        if self.allowed:
            ALLOWED.write_text(" ".join(self.allowed))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# -- measuring it -----------------------------------------------------------------------------------------


def tcp(source, target, count, port=5001, seconds=60):
    """Mbit/s of `count` payload bytes on one stream."""
    sink = target.popen([sys.executable, "-c", SINK, target.address, port], stdout=subprocess.PIPE, text=True)
    with sink.stdout:
        sink.stdout.readline()
        source.popen([sys.executable, "-c", SOURCE, target.address, port, count])
        received, took = sink.communicate(timeout=seconds)[0].split()
    return int(received) * 8 / float(took) / 1e6


def ping(source, target, count=20, port=5002):
    """(share lost, median round trip in ms; None if nothing came back) of small datagrams, 10 ms apart."""
    echo = target.popen([sys.executable, "-c", ECHO, target.address, port], stdout=subprocess.PIPE, text=True)
    with echo.stdout:
        echo.stdout.readline()
        done = source.run([sys.executable, "-c", PING, target.address, port, count])
        echo.kill()
        echo.wait()
    times = sorted(float(line) for line in done.stdout.split())
    return 1 - len(times) / count, times[len(times) // 2] if times else None
