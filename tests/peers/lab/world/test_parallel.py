"""Several processes at once: none of them outlives the one that started it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peers.lab.world.parallel import pool

PROGRAM = """
import os, time
from peers.lab.world.parallel import pool

if __name__ == "__main__":
    with pool(2) as processes:
        print(processes.submit(os.getpid).result(), flush=True)
        processes.submit(time.sleep, 3600.0)
        time.sleep(3600.0)
"""
SECONDS = 30.0


def test_a_process_that_works_or_waits_for_work_ends_with_one_that_is_killed(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert Path(f"/proc/{child}").exists()
        parent.kill()
    deadline = time.monotonic() + SECONDS
    while _runs(child):
        assert time.monotonic() < deadline, "it waits for work that nobody will give"
        time.sleep(0.05)


@pytest.mark.parametrize("ended_by", [KeyboardInterrupt, ValueError])
def test_work_that_is_under_way_or_queued_is_given_up_when_the_block_is_left_by_an_exception(ended_by):
    began, children = time.monotonic(), []

    def leave() -> None:
        with pool(2) as processes:
            children.append(processes.submit(os.getpid).result())
            for _ in range(4):
                processes.submit(time.sleep, 3600.0)
            raise ended_by

    with pytest.raises(ended_by):
        leave()
    while _runs(children[0]):
        assert time.monotonic() < began + SECONDS, "a command that was told to end works on"
        time.sleep(0.05)


def _runs(process: int) -> bool:
    """Whether it is there, and no mere entry that waits for a parent to look at it."""
    try:
        return "(zombie)" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False
