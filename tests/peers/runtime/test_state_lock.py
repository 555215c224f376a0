"""A peer's state folder is its user's alone."""

import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from peers.config.errors import UserError
from peers.runtime.state_lock import is_held, lock_state_folder, role_of


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


@pytest.fixture(autouse=True)
def usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_a_new_state_folder_is_closed_to_other_users(tmp_path):
    with lock_state_folder(tmp_path / "states" / "one") as was_open:
        assert not was_open
        assert mode(tmp_path / "states" / "one") == 0o700


def test_one_that_others_could_look_into_is_closed_and_it_is_said_once(tmp_path):
    (tmp_path / "one").mkdir(mode=0o755)
    with lock_state_folder(tmp_path / "one") as was_open:
        assert was_open
        assert mode(tmp_path / "one") == 0o700
    with lock_state_folder(tmp_path / "one") as was_open:
        assert not was_open


def test_the_lock_of_a_peer_ends_with_its_process_and_not_when_it_has_closed_all(tmp_path):
    script = """
        import sys
        from pathlib import Path
        from peers.runtime.state_lock import lock_state_folder
        with lock_state_folder(Path(sys.argv[1]), to_the_end=True):
            pass
        print("closed", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"closed\n"
        assert is_held(tmp_path)
    assert not is_held(tmp_path)


def test_whoever_asks_for_a_lock_in_vain_leaves_the_role_of_its_holder(tmp_path):
    with lock_state_folder(tmp_path, "worker"):
        with pytest.raises(UserError, match="is used by another"), lock_state_folder(tmp_path, "bootstrap"):
            pass
        assert role_of(tmp_path) == "worker"
    assert role_of(tmp_path / "nowhere") == ""


def test_a_folder_that_all_may_write_to_is_left_as_it_is(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    with lock_state_folder(tmp_path / "shared") as was_open:
        assert not was_open
    assert mode(tmp_path / "shared") == 0o1777
