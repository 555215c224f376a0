"""Several processes at once: none of them outlives the one that started it."""

import os
import subprocess
import sys
import time
from pathlib import Path

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


def _runs(process: int) -> bool:
    """Whether it is there, and no mere entry that waits for a parent to look at it."""
    try:
        return "(zombie)" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False
