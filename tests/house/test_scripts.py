"""scripts/setup on machines that lack something, and where there is nothing to do. Nothing is downloaded."""

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pip
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.main import get_command

from peers.cli import main as cli

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in [*(ROOT / "scripts").iterdir(), ROOT / ".ci/run"]
                 if path.is_file() and path.read_bytes().startswith(b"#!/bin/sh"))  # fmt: skip
SOAKS = [path for path in sorted((ROOT / "scripts/soaks").rglob("*.py")) if "arguments." in path.read_text()]
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
    tools.mkdir(exist_ok=True)
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


def test_every_program_of_the_soaks_is_listed_and_all_runs_what_is_listed():
    script = (ROOT / "scripts/soak").read_text()
    rows = re.findall(r"^  ([a-z-]+(?: [a-z]+)?)(?: RULE\.\.\.)? +\d+ (?:min|h)  ", script, re.MULTILINE)
    (every,) = re.findall(r"^    for one in (.+?); do$", script, re.MULTILINE | re.DOTALL)
    named = [words.strip('"') for words in re.findall(r'"[^"]+"|[a-z-]+', every)]
    assert named == [row if row != "quality-alone" else "quality-alone whole skip" for row in rows]
    files = (ROOT / "scripts/soaks").rglob("*.py")
    programs = [path.stem for path in files if "__main__" in path.read_text()]
    known = {row.replace("-", "_") for row in rows} | {f"{row}_soak" for row in rows} | {"wan_soak"}
    others = {"first_hour", "lab_page", "wan_holder", "wan_paced"}
    assert set(programs) <= known | others, "scripts/first-hour plays two; others start the rest"


@pytest.mark.parametrize("path", SOAKS, ids=lambda path: path.stem)
def test_a_soak_program_reads_no_option_that_it_does_not_have(path):
    """The programs are not type-checked, and a renamed option stopped one of them unnoticed."""
    source = path.read_text()
    parser = source if "add_argument" in source else (path.parent / "wan_soak.py").read_text()
    options = re.findall(r'add_argument\(\s*"(?:--)?([a-z-]+)"', parser)
    read = set(re.findall(r"\barguments\.([a-z_]+)", source)) - {"func"}
    assert read <= {option.replace("-", "_") for option in options}


def test_the_bench_script_runs_every_bench_that_there_is_or_says_how():
    script = (ROOT / "scripts/bench").read_text()
    listed = re.findall(r"^#   scripts/bench (\w+) ", script, re.MULTILINE)
    assert listed == list(get_command(cli.application()).commands["bench"].commands)


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
    installs = [line for line in asked.read_text().splitlines() if "pip install" in line]
    editable = [line for line in installs if "--editable" in line]
    assert len(editable) == 1
    assert editable[0].endswith(f"--no-deps --no-build-isolation --editable {clone}")
    assert all("--require-hashes" in line for line in installs if line not in editable)


def test_the_readme_says_of_every_extra_what_it_is_for():
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(OPTIONAL) - {"test"} <= set(rows)


LOCK = (ROOT / "scripts/requirements.lock").read_text()
PIN = re.compile(
    r"(?P<name>[a-z0-9-]+)==(?P<version>[^\s;]+)(?: ; [^\\]+)?"
    r"(?P<hashes>(?: \\\n    --hash=sha256:[0-9a-f]{64})*)\n"
)
"""One requirement of the lock, over its lines."""


def locked():
    """name -> (the words after `# for`, the version, how many hashes) of each requirement."""
    found = {}
    for block in re.split(r"^# for ", LOCK, flags=re.MULTILINE)[1:]:
        words, _, requirement = block.partition("\n")
        pin = PIN.fullmatch(requirement)
        assert pin is not None, f"not one exact version with hashes: {requirement[:80]}"
        assert pin["name"] not in found
        found[pin["name"]] = (words.split(), pin["version"], pin["hashes"].count("--hash="))
    return found


def needed(extra):
    """Normal names of what pyproject.toml asks for, for Linux."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] if extra == "run" else OPTIONAL[extra]
    return {re.match(r"[\w.-]+", line)[0].lower().replace(".", "-").replace("_", "-") for line in wanted}


def test_the_lock_has_exact_versions_with_hashes_and_names_no_place():
    assert all(hashes for _, _, hashes in locked().values())
    assert not re.search(r"://|--(?!hash=sha256:)\w|@", LOCK)
    assert (locked()["torch"][1], locked()["hivemind"][1]) == ("2.13.0", "1.1.12")


@pytest.mark.parametrize("extra", ["run", *OPTIONAL])
def test_whatever_an_extra_needs_is_in_the_lock_for_it(extra):
    taken = {name for name, (words, _, _) in locked().items() if {extra, "run", "first"} & set(words)}
    assert needed(extra) <= taken


def test_whoever_runs_it_gets_everything_that_its_packages_need():
    """Of what is installed here, each dependency of a package of the lock is there for the same word."""
    words = {name: set(each) for name, (each, _, _) in locked().items()}
    for name, here in words.items():
        if not here & {"run", "test"}:
            continue
        try:
            wanted = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in map(Requirement, wanted):
            if line.marker is None or line.marker.evaluate({"extra": ""}):
                there = words.get(canonicalize_name(line.name), set())
                assert here <= there or there & {"run", "cuda"}, f"{name} needs {line.name}"


def installs(text):
    """Each command that installs a Python package, on one line."""
    lines = text.replace("\\\n", " ").splitlines()
    called = re.compile(r"\b(pip3?|uv|pipx|conda)\b.*\binstall\b")
    return [line for line in lines if called.search(line) and not line.lstrip().startswith(("#", "echo"))]


def test_only_setup_installs_and_only_what_has_a_hash():
    others = [path for folder in ("scripts", "configs", ".ci") for path in (ROOT / folder).rglob("*")
              if path.is_file() and path.name != "setup" and path.suffix != ".pyc"]  # fmt: skip
    assert [(path.name, line) for path in others for line in installs(path.read_text())] == []
    text = (ROOT / "scripts/setup").read_text()
    (only,) = installs(text)
    assert only.startswith('try() { "$venv/bin/python" -m pip install ')
    calls = re.findall(r"^.*\b(?:try|install) .*$", text[text.index(only) + len(only) :], re.MULTILINE)
    asked = [call for call in calls if "$hashed" in call]
    assert len(asked) == 3
    rest = [call for call in calls if call not in asked and '"$@"' not in call and not call.startswith("#")]
    assert rest == ['install --no-deps --no-build-isolation --editable "$root"']
    assert 'hashed="--require-hashes --no-build-isolation ' in text


@pytest.mark.slow
def test_a_file_with_another_hash_is_refused(clone):
    """A real pip, and a wheel made here: the one whose hash the lock has goes in, a changed one does not."""
    venv.create(clone / ".venv", symlinks=True)
    (place,) = (clone / ".venv/lib").glob("python*/site-packages")
    (place / "pip").symlink_to(Path(pip.__file__).parent, target_is_directory=True)
    wheels = clone.parent / "wheels"
    wheels.mkdir()
    wheel = wheels / "torch-2.13.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        about = "torch-2.13.0.dist-info"
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()

    def setup(digest):
        (clone / "scripts/requirements.lock").write_text(
            f"# for first run\ntorch==2.13.0 \\\n    --hash=sha256:{digest}\n"
        )
        places = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": "/dev/null"}
        return subprocess.run([clone / "scripts/setup"], env={"PATH": "/usr/bin:/bin", **places},
                              capture_output=True, text=True, timeout=120)  # fmt: skip

    refused = setup("0" * 64)
    assert refused.returncode == 1
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert refused.stderr.splitlines()[-1].startswith("error: installing failed; the lines above say why")
    assert not list((clone / ".venv").rglob("torch-2.13.0.dist-info"))
    setup(digest)
    assert list((clone / ".venv").rglob("torch-2.13.0.dist-info"))


def test_another_environment_must_be_there(clone):
    named = {"PATH": "/usr/bin:/bin", "VENV": str(clone / "none")}
    done = subprocess.run(
        [clone / "scripts/setup"], env=named, capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: there is no Python with pip in {clone / 'none'}; make it")
    assert not (clone / "none").exists()


def test_help_answers_at_once_and_installs_nothing(clone):
    done = run(clone, "test", "exit 1", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) <= 6
    assert "scripts/test tests/house " in done.stdout
    assert "docs/contributing.md" in done.stdout
    assert not (clone / ".venv").exists()


def test_a_path_runs_that_path_alone(clone):
    without = run(clone, "test", "exit 1", "tests/test_x.py")
    assert without.returncode == 2
    assert without.stderr == "error: pytest is not installed here: scripts/setup test\n"
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/bin/pytest").write_text('#!/bin/sh\necho "pytest $*"\nexit 3\n')
    (clone / ".venv/bin/pytest").chmod(0o755)
    done = subprocess.run([clone / "scripts/test", "tests/test_x.py", "-k", "one"], capture_output=True,
                          text=True, timeout=60)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (3, "pytest tests/test_x.py -k one\n", "")


@pytest.fixture
def checked(clone):
    """A checkout in which setup has nothing to do, and each tool says in `told` what it was asked for; pytest
    fails where `breaks` stands in its arguments."""
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/.libp2p").write_text("installed\n")
    (clone / "scripts/setup").write_text("#!/bin/sh\n")
    tool = '#!/bin/sh\necho "$(basename "$0") $* at $(nice)" | tee -a "$TOLD"\n'
    for name in ("ruff", "mypy", "lint-imports", "swarmnet", "pytest"):
        end = 'case "$*" in *"$BREAKS"*) echo "FAILED tests/test_x.py::test_one"; exit 1 ;; esac\n'
        (clone / ".venv/bin" / name).write_text(tool + (end if name == "pytest" else ""))
        (clone / ".venv/bin" / name).chmod(0o755)

    def check(*arguments, breaks="nothing"):
        told = clone.parent / "told"
        told.unlink(missing_ok=True)
        done = subprocess.run(
            [clone / "scripts/test", *arguments], capture_output=True, text=True, timeout=60,
            env={"PATH": "/usr/bin:/bin", "TOLD": str(told), "BREAKS": breaks},
        )  # fmt: skip
        return done, sorted(told.read_text().splitlines())

    return check


IN_MEMORY = "pytest -n 2 --dist worksteal --durations 60 --durations-min 4"


def test_everything_is_checked_and_what_computes_gives_way_to_real_peers(checked):
    done, told = checked()
    assert (done.returncode, done.stderr) == (0, "")
    asked = [re.sub(r"--seed \d+", "--seed N", line) for line in told]
    now = os.nice(0)
    assert asked == [
        f"lint-imports  at {now}",
        f"mypy  at {now}",
        f"pytest -m loopback and not soak --durations 25 at {now}",
        f"{IN_MEMORY} -m not loopback and not soak at 19",
        f"ruff check at {now}",
        "swarmnet simulate --schedules 2 --jobs 2 --seed N --sharded at 19",
        "swarmnet simulate --schedules 4 --jobs 2 --seed N at 19",
    ]
    ended = re.findall(r"^== (.*): ok, \d+ s$", done.stdout, re.MULTILINE)
    assert ended == ["setup", "ruff", "mypy", "imports", "libp2p", "tests in memory", "fresh schedules",
                     "tests on loopback"]  # fmt: skip
    assert done.stdout.splitlines()[-1] == "all passed"


@pytest.mark.parametrize(("breaks", "step"), [
    ("-m loopback and", "tests on loopback"),
    ("-m not loopback and", "tests in memory"),
])  # fmt: skip
def test_what_failed_is_said_again_at_the_end(checked, breaks, step):
    done, told = checked(breaks=breaks)
    assert done.returncode == 1
    assert len(told) == 7, "what comes after it is checked all the same"
    assert done.stdout.splitlines()[-2:] == ["FAILED tests/test_x.py::test_one", f"FAILED: {step}"]


def test_the_fast_answer_leaves_out_what_takes_long(checked):
    done, told = checked("--fast")
    assert done.returncode == 0
    now = os.nice(0)
    assert told == [
        f"lint-imports  at {now}",
        f"{IN_MEMORY} -m not loopback and not slow and not swarm and not soak at {now}",
        f"ruff check at {now}",
    ]
    assert done.stdout.splitlines()[-1] == "all passed"
    assert checked("--fast", breaks="not slow")[0].returncode == 1
