"""Workers behind firewalls train together on the emulated network, through a bootstrap that relays."""

import asyncio

import pytest
from needs import without_network
from wan_relay import train

pytestmark = [pytest.mark.loopback, pytest.mark.soak, pytest.mark.timeout(600)]


@without_network
def test_firewalled_workers_of_neighbouring_stages_train_through_a_bootstrap(tmp_path):
    found = asyncio.run(train(tmp_path, seconds=3.0))
    assert found["relayed"] == ["peer-1", "peer-2", "peer-3"]
    assert found["commits"] > 0
    assert found["carried_bytes"] > 100_000
    assert found["equal_digests"] > 0
    assert found["unequal_digests"] == 0
    assert found["contributions"]["lost"] == []
