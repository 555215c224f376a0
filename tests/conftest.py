"""Fixtures of tests that type commands."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
from typed import typing


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

    def start(what):
        calls.append(what)
        return 0

    monkeypatch.setitem(sys.modules, "peers.peer", SimpleNamespace(run_peer_file=start))
    monkeypatch.setitem(sys.modules, "peers.demo.show", SimpleNamespace(run_demo=start))
    return calls
