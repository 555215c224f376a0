"""What a process loads before it can do its work: torch takes 2 s and 250 MB, and not every role computes."""

import subprocess
import sys

import pytest

NO_STAGE = ("peers.peer", "peers.roles.bootstrap", "peers.roles.observer")
ONLY_LOOKS = (
    "peers.commands.reach", "peers.reaching", "peers.top.visit", "peers.creator.issue",
    "peers.creator.registry", "peers.creator.report", "peers.contributed", "peers.doctor.show",
)  # fmt: skip


def loaded_with(modules) -> str:
    """Which of the heavy libraries a fresh process has loaded with these modules."""
    heavy = "{'torch', 'numpy', 'scipy'} & set(sys.modules)"
    code = f"import sys, {', '.join(modules)}; print(sorted({heavy}))"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


@pytest.mark.parametrize("modules", [NO_STAGE, ONLY_LOOKS], ids=["no stage", "only looks"])
def test_who_computes_nothing_does_not_load_torch(modules):
    assert loaded_with(modules) == "[]"


def test_a_worker_does():
    assert "torch" in loaded_with(["peers.roles.worker"])
