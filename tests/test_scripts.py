"""scripts/setup on machines that lack something, and where there is nothing to do. Nothing is downloaded."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path for path in [*(ROOT / "scripts").iterdir(), ROOT / ".ci/run"]
                 if path.is_file() and path.read_bytes().startswith(b"#!/bin/sh"))  # fmt: skip
OPTIONAL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NAMES = ("python", "python3", "python3.11", "python3.12", "python3.13")


@pytest.fixture
def clone(tmp_path):
    """A checkout without .venv."""
    (tmp_path / "clone").mkdir()
    shutil.copytree(ROOT / "scripts", tmp_path / "clone/scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "clone")
    return tmp_path / "clone"


def run(clone, script, pythons, *arguments):
    """Run a script where each name of Python is the shell script `pythons`."""
    tools = clone.parent / "tools"
    tools.mkdir()
    for name in NAMES:
        (tools / name).write_text(f"#!/bin/sh\n{pythons}\n")
        (tools / name).chmod(0o755)
    return subprocess.run(
        [clone / "scripts" / script, *arguments],
        env={"PATH": f"{tools}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_there_are_the_promised_scripts():
    assert {"demo", "test", "bench", "docs", "setup", "run"} <= {path.name for path in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_can_be_run_and_is_shell(script):
    assert script.stat().st_mode & 0o111
    assert subprocess.run(["/bin/sh", "-n", script], capture_output=True, timeout=60).stderr == b""


@pytest.mark.parametrize("script", ["setup", "demo", "bench", "docs"])
def test_without_a_fitting_python_one_line_says_what_to_install(clone, script):
    done = run(clone, script, "exit 1")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: needs Python 3.11")
    assert not (clone / ".venv").exists()


def test_without_venv_one_line_says_what_to_install(clone):
    done = run(clone, "demo", f'case "$2" in *ensurepip*) exit 1;; esac\nexec {sys.executable} "$@"')
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: python3 has no venv; install it (Debian, Ubuntu: sudo apt install python3-venv)\n"
    )
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize(
    ("stamp", "extra", "code"),
    [
        (".installed", "", 0),
        (".installed-test", "", 0),
        (".installed-gpu", "gpu", 0),
        (".installed-test", "gpu", 2),
        (".installed", "test", 2),
    ],
)
def test_an_installation_that_is_up_to_date_is_left_alone_and_an_extra_has_its_own_mark(
    clone, stamp, extra, code
):
    both = (clone / "pyproject.toml").read_bytes() + (clone / "scripts/requirements.lock").read_bytes()
    (clone / ".venv").mkdir()
    (clone / ".venv" / stamp).write_bytes(subprocess.run(["cksum"], input=both, capture_output=True).stdout)
    done = run(clone, "setup", "exit 1", *filter(None, [extra]))
    assert (done.returncode, done.stdout) == (code, "")
    assert bool(done.stderr) is bool(code), "it sets out to install, and finds no Python"


@pytest.mark.parametrize("extras", [["gpus"], ["lan", "gpus"], ["lan,gpus"]])
def test_an_extra_that_is_none_is_named_with_those_that_there_are(clone, extras):
    done = run(clone, "setup", "exit 1", *extras)
    assert (done.returncode, done.stdout) == (2, "")
    there = " ".join(OPTIONAL)
    assert done.stderr == f"error: there is no extra 'gpus'; there are: {there} (README.md, Install)\n"


@pytest.mark.parametrize("extras", [["gpu", "lan"], ["gpu,lan"], ["libp2p"]])
def test_extras_are_installed_together_and_not_again(clone, extras):
    python, asked = clone / ".venv/bin/python", clone / "asked"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >>{asked}\n')
    python.chmod(0o755)
    for _ in range(2):
        assert run(clone, "setup", "exit 1", *extras).returncode == 0
        shutil.rmtree(clone.parent / "tools")
    installed = [line for line in asked.read_text().splitlines() if "--editable" in line]
    assert len(installed) == 1
    assert installed[0].endswith(f"--editable {clone}[{','.join(extras)}]")


def test_the_readme_says_of_every_extra_what_it_is_for():
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(OPTIONAL) - {"test"} <= set(rows)


def test_the_lock_pins_exact_versions_and_names_no_place():
    lines = (ROOT / "scripts/requirements.lock").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(line.count("==") == 1 and not set("@/+ ") & set(line) for line in pins)
    assert {"torch==2.13.0", "hivemind==1.1.12"} <= set(pins)
