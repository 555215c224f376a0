"""The peer file: every mistake gets one line with its place, and what was meant arrives as typed."""

import re
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peers.config import peer_file, yaml_lines
from peers.config.peer_file import ConfigError, MetricsFile, PeerFile, default_state, load
from peers.config.quantities import byte_count, seconds, size_text

PEER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


@pytest.fixture
def typed(tmp_path):
    def load_text(text, environment=None, overrides=None):
        file = tmp_path / "peer.yaml"
        file.write_text(text)
        return load(file, environment, overrides)

    return load_text


def problems(typed, text, environment=None, overrides=None):
    with pytest.raises(ConfigError) as caught:
        typed(text, environment, overrides)
    return [re.sub(r"^.*/(?=peer\.yaml)", "", problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("role: bootstrap\nnmae: x\n", "2: nmae: unknown key; did you mean 'name'?"),
        ("role: bootstrap\nstages: 2\n", "2: stages: unknown key; did you mean 'stage'?"),
        (
            "role: bootstrap\nmetrics:\n  lisen: off\n",
            "3: metrics.lisen: unknown key; did you mean 'listen'?",
        ),
        ("role: bootstrap\nthreads: '2'\n", "2: threads: is the text '2'; expected a whole number"),
        (
            "role: bootstrap\nmetrics:\n  peak_flops: 0\n",
            "3: metrics.peak_flops: is 0; it must be more than 0",
        ),
        (
            "role: bootstrap\nlimits:\n  only_when_plugged_in: 1\n",
            "3: limits.only_when_plugged_in: is 1; expected true or false",
        ),
        (
            "role: bootstrap\nlimits:\n  upload: 1MB/s\n  memory: 1GiB\n",
            "4: limits.memory: is for workers; a bootstrap has no such limit, only limits.upload",
        ),
        (
            "role: worker\nrun: RUN\nlimits:\n  memory: 8\n".replace("RUN", "ab" * 32),
            "4: limits.memory: is 8 bytes; it must be at least 128MiB, such as 8GiB",
        ),
        (
            "role: bootstrap\nlimits:\n  upload: 20\n",
            "3: limits.upload: is 20 bytes per second; it must be at least 80kbit/s, such as 20Mbit/s",
        ),
        (
            "role: bootstrap\nmax_data_bytes: 5kB\n",
            "2: max_data_bytes: is 5000 bytes; it must be at least 64KiB, such as 64MiB",
        ),
        ("role: bootstrap\nthreads: 2.5\n", "2: threads: is 2.5; expected a whole number"),
        ("role: bootstrap\nthreads: true\n", "2: threads: is true; expected a whole number"),
        ("role: bootstrap\nlisten: []\n", "2: listen: is empty; expected at least one"),
        ("role: bootstrap\nname: " + "x" * 65, "2: name: is too long; at most 64"),
        ("role: bootstrap\nthreads: 0\n", "2: threads: is 0; it must be at least 1"),
        ("role: bootstrap\nrelay: no\n", "2: relay: is the text 'no'; expected true or false"),
        ("role: bootstrap\nname:\n", "2: name: is empty; expected text"),
        (
            "role: bootstrap\nbootstrap: /ip4/1.2.3.4/tcp/1\n",
            "2: bootstrap: is the text '/ip4/1.2.3.4/tcp/1'; expected a list",
        ),
        (
            "role: bootstrap\nlisten: [/ip4/127.0.0.1/tcp/80000]\n",
            "2: listen.0: port 80000: 1 to 65535, in '/ip4/127.0.0.1/tcp/80000'",
        ),
        (
            "role: bootstrap\nmetrics: off\n",
            "2: metrics: is the text 'off'; expected a section of keys",
        ),
        (
            "role: bootstrap\nmetrics:\n  listen: 9410\n",
            "3: metrics.listen: is 9410; expected text: put it in quotes",
        ),
        (
            "role: bootstrap\nmetrics: {listen: here}\n",
            "2: metrics.listen: is 'here'; expected HOST:PORT such as 127.0.0.1:9410, or off",
        ),
        (
            "role: boostrap\n",
            "1: role: is the text 'boostrap'; "
            "expected 'worker', 'reducer', 'bootstrap', 'observer' or 'archivist'",
        ),
        ("role: bootstrap\nstage: -1\n", "2: stage: is -1; expected a stage (0, 1, ...) or auto"),
        (
            "role: bootstrap\ndrain_seconds: soon\n",
            "2: drain_seconds: is 'soon'; expected a duration such as 30s, 500ms, 5min or 2h",
        ),
        (
            "role: bootstrap\nmax_data_bytes: 3 elephants\n",
            "2: max_data_bytes: is '3 elephants'; expected a size such as 64MiB, 1.5GB or a number of bytes",
        ),
        (
            "role: bootstrap\ncheckpoint_seconds: .nan\n",
            "2: checkpoint_seconds: is nan; expected a finite number",
        ),
        (
            "role: bootstrap\nname: a\nrole: worker\n",
            "3: role: is already set on line 1; keep one of the two",
        ),
        ("name: attic\n", "1: run: is missing; a worker needs the run to train"),
        (
            "run: nowhere.json\n",
            "1: run: 'nowhere.json' is neither a run id (64 hexadecimal digits) nor a published run file "
            "({folder}/nowhere.json is not there; paths are relative to the peer file)",
        ),
        ("role: bootstrap\n\tname: x\n", "2: a tab where YAML wants spaces; indent with spaces"),
        ("- role\n", "1: is not a mapping; expected `key: value` lines"),
        ("", "1: is empty; expected `key: value` lines"),
        (
            "role: bootstrap\n---\nrole: worker\n",
            "2: a second document starts here; put one document in a file",
        ),
        ("a: &x 1\nb: *x\n", "1: b: aliases (*name) are not used here; write the value out"),
        (
            "role: !!python/name:os.system x\n",
            "1: role: tags (tag:yaml.org,2002:python/name:os.system) are not used here; write plain data",
        ),
        ("role: [\n", "2: is not YAML: expected the node content, but found '<stream end>'"),
        ("[" * 1500, "1: is nested too deeply"),
        (f"a: {'[' * 32}{']' * 32}\n", "1: is nested too deeply"),
        ("".join(f"{' ' * depth}a:\n" for depth in range(33)), "1: is nested too deeply"),
    ],
)
def test_every_mistake_is_one_line_with_its_place_and_what_would_be_right(typed, tmp_path, text, expected):
    assert problems(typed, text) == [f"peer.yaml:{expected.replace('{folder}', str(tmp_path))}"]


LONG = "9" * 5000


@pytest.mark.parametrize(
    "text",
    [
        f"stages: {LONG}", f"stages: -{LONG}", f"stages: 0x{'f' * 9000}", f"stage: {LONG}",
        f"stages: {'9' * 400}",
        f"max_data_bytes: {LONG}GB", f"drain_seconds: {LONG}s", f"limits: {{upload: {LONG}Mbit/s}}",
        f"metrics: {{listen: 'localhost:{LONG}'}}", f"listen: [/ip4/127.0.0.1/tcp/{LONG}]",
    ],
)  # fmt: skip
def test_a_number_that_no_key_can_hold_is_a_line_with_its_key(typed, text):
    (problem,) = problems(typed, f"role: bootstrap\n{text}\n")
    assert problem.startswith(f"peer.yaml:2: {text.partition(':')[0]}")
    assert "int_max_str_digits" not in problem


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("localhost:31330", "is no multiaddr"),
        ("/ip4/1.2.3/tcp/31330", "has no IPv4 address in it"),
        ("/ip6/1.2.3.4/tcp/31330", "has no IPv6 address in it"),
        ("/dns4/a b/tcp/31330", "has no host name in it ('a b')"),
        ("/ip4/1.2.3.4/tcp/p2p", "has no /tcp/PORT or /udp/PORT in it"),
        ("/ip4/1.2.3.4/tcp/31330", "does not name the peer"),
    ],
)
def test_a_wrong_multiaddr_says_what_it_lacks(typed, address, reason):
    (problem,) = problems(typed, f"role: bootstrap\nbootstrap:\n  - '{address}'\n")
    assert problem.startswith(f"peer.yaml:3: bootstrap.0: {address!r} {reason}; expected ")


def test_good_multiaddrs_are_taken(typed):
    addresses = (f"/dns4/boot.example.org/tcp/31330/p2p/{PEER}", f"/ip6/::1/udp/1/quic-v1/p2p/{PEER}")
    config = typed("role: bootstrap\nbootstrap:\n" + "".join(f"- {address}\n" for address in addresses))
    assert config.bootstrap == addresses


def test_all_problems_are_reported_in_the_order_of_their_lines(typed):
    found = problems(typed, "stage: x\nrole: 3\nfoo: 1\nthreads: no\n")
    assert [problem.split(":")[1] for problem in found] == ["1", "2", "3", "4"]


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    for path, reason in (
        (tmp_path / "x.yaml", "no such file"),
        (tmp_path, "is a folder; expected a YAML file"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert str(caught.value) == f"{path}: {reason}"


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path):
    file = tmp_path / "peer.yaml"
    file.write_bytes(b"role: worker\nname: \xff\n")
    with pytest.raises(ConfigError, match=r"peer\.yaml:2: is not UTF-8 text"):
        load(file)


def test_environment_goes_over_the_file_and_set_over_both(typed):
    config = typed(
        "role: bootstrap\nthreads: 2\nslots: 2\nin_flight: 2\n",
        {
            "SWARMNET__SLOTS": "3",
            "SWARMNET__IN_FLIGHT": "3",
            "SWARMNET__METRICS__LISTEN": "off",
            "HOME": "/x",
        },
        {"in_flight": "4", "listen": "[/ip4/127.0.0.1/tcp/5]"},
    )
    assert (config.threads, config.slots, config.in_flight) == (2, 3, 4)
    assert config.metrics.address is None
    assert config.listen == ("/ip4/127.0.0.1/tcp/5",)


def test_wrong_variables_and_settings_are_refused_by_their_own_name(typed):
    text = "role: bootstrap\n"
    assert problems(typed, text, {"SWARMNET__THREDS": "1"}) == [
        "environment SWARMNET__THREDS: threds: unknown key; did you mean 'threads'?"
    ]
    assert problems(typed, text, {"SWARMNET__THREADS": "two"}) == [
        "environment SWARMNET__THREADS: threads: is the text 'two'; expected a whole number"
    ]
    assert problems(typed, text, {}, {"threads": "[1"})[0].startswith("--set:")


def test_paths_are_relative_to_the_file(typed, tmp_path):
    config = typed("role: bootstrap\nstate: here\ndata_paths: {books: ../books}\n")
    assert config.state == tmp_path / "here"
    assert config.identity == tmp_path / "here" / "identity.key"
    assert config.data_paths == {"books": str(tmp_path / ".." / "books")}
    elsewhere = typed("role: bootstrap\nstate: here\ndata_paths: {books: 's3://bucket/books'}\n")
    assert elsewhere.data_paths == {"books": "s3://bucket/books"}, "a URL is no path"


def test_state_and_name_have_defaults_of_their_own(typed):
    config = typed("role: bootstrap\n", {"XDG_STATE_HOME": "/var/state", "HOME": "/h"})
    assert config.name == "peer"
    assert config.state == default_state({"XDG_STATE_HOME": "/var/state", "HOME": "x"}, "linux") / "peer"


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"HOME": "/h"}, "/h/.local/state/swarmnet"),
        ("linux", {"HOME": "/h", "XDG_STATE_HOME": "/s"}, "/s/swarmnet"),
        ("darwin", {"HOME": "/h"}, "/h/Library/Application Support/swarmnet"),
        ("win32", {"USERPROFILE": "/h", "LOCALAPPDATA": "/l"}, "/l/swarmnet"),
    ],
)
def test_each_system_keeps_state_where_it_is_usual(platform, environment, expected):
    assert default_state(environment, platform) == Path(expected)


def test_a_run_file_is_found_beside_the_peer_file(typed, tmp_path):
    (tmp_path / "demo.run.json").write_text("{}")
    assert typed("run: demo.run.json\n").run == str(tmp_path / "demo.run.json")
    assert typed(f"run: '{'a' * 64}'\n").run == "a" * 64


def test_a_run_file_in_a_setting_is_looked_for_beside_the_peer_file_and_the_error_says_so(typed, tmp_path):
    (problem,) = problems(typed, "role: worker\n", {}, {"run": "configs/demo.run.json"})
    assert f"({tmp_path}/configs/demo.run.json is not there; paths are relative to the peer file)" in problem


def test_yaml_is_the_one_of_2009(typed):
    config = typed("role: bootstrap\nname: no\ndrain_seconds: 1e1\nthreads: 0o17\n")
    assert (config.name, config.drain_seconds, config.threads) == ("no", 10.0, 15)
    assert typed("role: bootstrap\nname: 2024-01-01\n").name == "2024-01-01"


@pytest.mark.parametrize(
    ("text", "value"),
    [("30", 30.0), ("30s", 30.0), ("500ms", 0.5), ("5 min", 300.0), ("2h", 7200.0), ("1d", 86400.0)],
)
def test_durations(text, value):
    assert seconds(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("7B", 7), ("1kB", 1000), ("1KiB", 1024), ("1.5GiB", 3 << 29), ("2TB", 2 * 10**12)],
)
def test_sizes(text, value):
    assert byte_count(text) == value


@pytest.mark.parametrize("count", [1, 1000, 1024, 1 << 27, 3 << 29, 1 << 40])
def test_a_size_that_is_said_can_be_typed(count):
    assert byte_count(size_text(count).replace(" bytes", "B")) == count


@pytest.mark.parametrize("text", ["", "s", "-1s", "1 fortnight", "1e3s", "nan", "9" * 400 + "d"])
def test_no_durations(text):
    with pytest.raises(ValueError, match="expected a duration"):
        seconds(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9410", ("127.0.0.1", 9410)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:1", ("localhost", 1)),
        ("off", None),
    ],
)
def test_metrics_addresses(text, address):
    assert MetricsFile(listen=text).address == address


def test_a_peer_file_can_be_made_in_the_program_too(tmp_path):
    config = PeerFile(role="bootstrap", name="b", state=tmp_path, stage=1, listen=("/ip4/127.0.0.1/tcp/0",))
    assert config.identity == tmp_path / "identity.key"
    assert config.metrics.listen == "127.0.0.1:9410"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=60) | st.text("abc:-[]{}&*!|>'\"%@` \n\t#,0?", max_size=60))
def test_any_text_is_loaded_or_refused_in_one_line(typed, text):
    try:
        typed(text)
    except ConfigError as error:
        assert all(problem.splitlines() == [problem] for problem in error.problems)  # noqa: PT017
    except UnicodeEncodeError:
        pass  # lone surrogates cannot be in a file


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from(sorted(PeerFile.model_fields)), st.text("ab1-:[]{}, .", max_size=9), max_size=5
    )
)
def test_any_values_are_loaded_or_refused_in_one_line(typed, values):
    try:
        typed("role: bootstrap\n", {}, values)
    except ConfigError as error:
        assert all(problem.splitlines() == [problem] for problem in error.problems)  # noqa: PT017


def test_a_peak_and_a_plug_are_read_as_they_are_meant(typed):
    peer = typed(
        f"role: worker\nrun: {'ab' * 32}\nmetrics: {{peak_flops: 67e12}}\n"
        "limits: {only_when_plugged_in: true}\n"
    )
    assert peer.metrics.peak_flops == 67e12
    assert peer.limits.only_when_plugged_in
    assert typed("role: bootstrap\n").metrics.peak_flops is None


def test_a_file_of_nothing_but_mistakes_is_refused_soon():
    """Each is told what keys there are, which are read from the source of the program once."""
    typed = yaml_lines.parse("".join(f"k{number}: 1\n" for number in range(200)), "peer.yaml")
    began = time.thread_time()
    with pytest.raises(ConfigError, match="k0: "):
        peer_file.validate_peer_file(typed, Path(), "peer", {"HOME": "/"})
    assert time.thread_time() - began < 2.0, "seconds of CPU; 9 without that"
