"""Limits that a person changes while the peer runs: what they are checked by, where they are kept."""

import pytest

from peers.config.errors import UserError
from peers.config.limits import LimitsFile
from peers.config.peer_file import load, validate_peer_file
from peers.config.yaml_lines import ParsedYaml
from peers.process.live_limits import LiveLimits

PEER_YAML = """# mine
run: "{run}"
name: attic
limits:
  hours: "22:00-08:00"   # when I sleep
  memory: 8GiB
# where it computes
device: cpu
"""


@pytest.fixture
def joined(tmp_path):
    """The limits of a peer whose file `join` wrote, and that file."""
    file = tmp_path / "peer.yaml"
    file.write_text(PEER_YAML.format(run="ab" * 32) + f"state: {tmp_path}\n")
    return LiveLimits(load(file)), file


async def changed(live, **limits):
    return await live.answer({"do": "limit", "set": limits})


async def test_a_limit_holds_at_once_and_after_a_restart(joined):
    live, file = joined
    heard = []
    live.listeners.append(lambda: heard.append(live.config.limits.upload))
    answer = await changed(live, upload="2MB/s", traffic_per_month="500GB", compute_duty_cycle=0.5)
    assert answer["saved"]
    assert answer["limits"] == {
        "upload": 2e6,
        "traffic_per_month": 500 * 10**9,
        "hours": "22:00-08:00",
        "only_when_idle": False,
        "share_when_busy": 0.0,
        "only_when_plugged_in": False,
        "compute_duty_cycle": 0.5,
    }
    assert heard == [2e6]
    again = load(file)
    assert (again.limits, again.compute_duty_cycle) == (live.config.limits, 0.5)
    assert again.limits.memory == 8 << 30, "what was not named stays"
    text = file.read_text()
    assert text.startswith("# mine\n")
    assert "# where it computes\ndevice: cpu\n" in text


async def test_a_limit_is_lifted(joined):
    live, file = joined
    await changed(live, hours=None, only_when_idle=True)
    assert live.config.limits == LimitsFile(memory=8 << 30, only_when_idle=True) == load(file).limits
    assert (await live.answer({"do": "limit"}))["limits"]["hours"] is None


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"upload": "2Mbit"}, "upload is '2Mbit'; expected a rate"),
        ({"upload": "1kbit/s"}, "at least 80kbit/s"),
        ({"upload": True}, "upload"),
        ({"hours": "25:00-8"}, "hours is '25:00-8'"),
        ({"compute_duty_cycle": 0}, "expected a share from 0.01 to 1"),
        ({"compute_duty_cycle": "half"}, "expected a share"),
        ({"memory": "8GiB"}, "'memory' is no limit; there are: upload,"),
        ({"run": "cd" * 32}, "'run' is no limit"),
    ],
)
async def test_a_wrong_limit_changes_nothing(joined, wish, words):
    live, file = joined
    before = live.config, file.read_text()
    with pytest.raises(UserError, match=words):
        await changed(live, **{"only_when_idle": True, **wish})
    assert (live.config, file.read_text()) == before
    for request in ({"set": 3}, {"set": {3: 4}}):
        with pytest.raises(UserError, match="expected"):
            await live.answer({"do": "limit", **request})


async def test_without_a_file_of_join_a_limit_holds_until_the_peer_stops(tmp_path):
    typed = ParsedYaml("x", {"role": "bootstrap", "state": str(tmp_path)})
    live = LiveLimits(validate_peer_file(typed, tmp_path, "x", {}))
    assert (await changed(live, upload="1MB/s"))["saved"] is False
    assert live.config.limits.upload == 1e6
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="hours is for workers"):
        await changed(live, hours="22:00-08:00")
