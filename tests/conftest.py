"""Fixtures of several tests: what types commands, and a tokenizer."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from golden import Golden
from hypothesis import settings
from nursery import Nursery
from typed import typing
from web_server import WebServer

PLAYS = {"Swarm": "swarm", "play": "peers.lab.faults.play"}
"""Who imports this name from there plays whole swarms: seconds to minutes of computing a test."""

SWARMS = ("tests/swarm/", "tests/loopback/", "tests/peers/lab/", "tests/peers/runtime/test_clock.py")
"""Whole swarms are played here, in memory, on loopback or by the laboratory. `scripts/test --fast` leaves
them out."""

LONGEST = (
    "tests/peers/lab/faults/",
    "tests/peers/worker/pipeline/",
    "tests/swarm/methods/",
    "tests/swarm/orders/",
)
"""Where the longest of them stand."""

EXAMPLES = int(os.environ.get("SWARMNET_EXAMPLES", "20"))
"""A property is tried with so many, unless it says how many; `scripts/soak properties` tries more."""
settings.register_profile("examples", max_examples=EXAMPLES, deadline=None)
settings.load_profile("examples")


def pytest_itemcollected(item):
    names = vars(item.module)
    if item.nodeid.startswith(SWARMS) or any(
        getattr(names.get(name), "__module__", None) == place for name, place in PLAYS.items()
    ):
        item.add_marker("swarm")


def pytest_collection_modifyitems(items):
    """Long tests come first, so that at the end both processes have short ones left to share."""
    items.sort(key=lambda item: (not item.nodeid.startswith(LONGEST), not is_long(item)))


def is_long(item):
    return any(item.get_closest_marker(name) is not None for name in ("swarm", "slow"))


def pytest_collection_finish():
    """What is imported stays to the end. To look through it at each collection of garbage would take most of
    the time of the tests that measure memory."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def nursery():
    begun = Nursery()
    yield begun
    begun.close()


@pytest.fixture(autouse=True)
def born_warm(request, monkeypatch):
    """Tests of real processes have them from a nursery."""
    if request.node.get_closest_marker("loopback"):
        monkeypatch.setattr(subprocess, "_fork_exec", request.getfixturevalue("nursery").fork_exec)


@pytest.fixture
def golden(request):
    return Golden(request.path)


@pytest.fixture
def swarmnet(monkeypatch, capsys, tmp_path):
    """Runs a command in an empty home and folder; returns exit code, standard output, standard error."""
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for name in list(os.environ):
        if name.startswith(("SWARMNET__", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    return typing(capsys, monkeypatch)


@pytest.fixture
def started(monkeypatch):
    """Stands in for the peer process and the demo; lists what they were started with."""
    calls = []

    def start(what, joined=str, create_role=None):
        calls.append(what)
        return 0

    monkeypatch.setitem(sys.modules, "peers.process.process", SimpleNamespace(run_peer_file=start))
    monkeypatch.setitem(sys.modules, "peers.lab.processes.demo", SimpleNamespace(run_demo=start))
    return calls


@pytest.fixture
def tokenizer_file(tmp_path):
    """A small byte-level tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["def function(self): return self\n"] * 10, trainer)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def unused_port():
    """A port of this machine at which nothing listens."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.fixture
def web():
    with WebServer() as server:
        yield server


@pytest.fixture
def other_web():
    with WebServer() as server:
        yield server
