"""What tests of `swarmnet doctor` begin from."""

from __future__ import annotations

import json

import pytest

from peers.cli.main import main
from peers.config.peer_file import validate_peer_file
from peers.config.yaml_lines import ParsedYaml


def command(*arguments):
    """Exit code of `swarmnet doctor`, in this process."""
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *map(str, arguments)])
    return ended.value.code


def config(tmp_path, **keys):
    data = {"state": str(tmp_path / "state"), "metrics": {"listen": "off"}, **keys}
    return validate_peer_file(ParsedYaml("test", data), tmp_path, "test", {})


def event(name, **fields):
    return json.dumps({"time": 1.0, "monotonic": 1.0, "event": name, **fields}) + "\n"
