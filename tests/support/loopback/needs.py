"""Marks of tests that need what not every machine has."""

from __future__ import annotations

import pytest
import wan

from protocols.reachability.fresh_dial import can_dial

needs_libp2p = pytest.mark.skipif(not can_dial(), reason="py-libp2p (the extra libp2p) is not installed")


REASON = wan.why_not()
without_network = pytest.mark.skipif(REASON is not None, reason=f"no emulated network: {REASON}")
