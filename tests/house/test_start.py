"""What a process loads before it can do its work: torch takes 2 s and 250 MB, and not every role computes."""

import subprocess
import sys

import pytest

NO_STAGE = ("peers.process.process", "peers.stageless.bootstrap_role", "peers.stageless.observer.role")
ONLY_LOOKS = (
    "peers.cli.connecting", "peers.network.discovery.visitor_session", "peers.tools.top.live",
    "peers.tools.owner.give_order", "peers.tools.owner.registry", "peers.tools.owner.training_report",
    "peers.tools.credit", "peers.tools.doctor.print_checks",
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
    assert "torch" in loaded_with(["peers.worker.role"])
