"""What a run starts from, from where a URL leads: a web server of this machine has the folder."""

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from public_models import LLAMA, save
from safetensors.torch import load_file, save_file
from swarm import OWNER

from peers.cli import main as cli
from peers.state import start_fetch
from peers.state.start_fetch import fetched, model_here
from peers.state.start_folder import INDEX, StartError, pinned, start_state
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import InitCheckpoint


class Server(ThreadingHTTPServer):
    """Of the folders below one; what it was asked for."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        self.asked: list[str] = []
        self.most_bytes: int | None = None
        """Of each file that is sent; then the connection ends."""
        self.hangs = threading.Event()
        super().__init__(("127.0.0.1", 0), partial(_Answers, directory=root))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(SimpleHTTPRequestHandler):
    server: Server

    def log_message(self, *_):
        """Nothing on standard error."""

    def do_GET(self):
        self.server.asked.append(self.path)
        super().do_GET()

    def copyfile(self, source, outputfile):
        if self.server.most_bytes is None:
            super().copyfile(source, outputfile)
            return
        outputfile.write(source.read(self.server.most_bytes))
        outputfile.flush()
        self.server.hangs.wait(30)
        self.close_connection = True


@contextmanager
def serving(root: Path):
    with Server(root) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.hangs.set()
            server.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("public") / "base", LLAMA)


@pytest.fixture
def server(model):
    with serving(model.parent) as server:
        yield server


RUN = Manifest("m", OWNER.peer_id, stages=(1, 2), model=LLAMA, init_checkpoint=InitCheckpoint("base"))


def of_run(model: Path) -> Manifest:
    return replace(RUN, init_checkpoint=pinned(model, RUN))


def said_nothing(_text: str) -> None:
    """To nobody."""


def test_a_model_from_a_url_is_the_one_in_the_folder(server, model, tmp_path):
    manifest = of_run(model)
    fetched(f"{server.url}/base", tmp_path / "here", manifest, said_nothing)
    for stage in range(2):
        there, here = (start_state(place, manifest, stage) for place in (model, tmp_path / "here"))
        assert torch.equal(there, here)


def test_what_an_export_keeps_of_the_tokenizer_comes_with_it(model, tmp_path):
    base = tmp_path / "all" / "base"
    base.mkdir(parents=True)
    for file in model.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (base / name).write_text(name)
    with serving(base.parent) as server:
        fetched(f"{server.url}/base", tmp_path / "here", of_run(model), said_nothing)
    assert (tmp_path / "here" / "chat_template.jinja").read_text() == "chat_template.jinja"
    assert (tmp_path / "here" / "tokenizer_config.json").read_text() == "tokenizer_config.json"
    assert start_state(tmp_path / "here", of_run(model), 0).any()


def test_it_is_fetched_once(server, model, tmp_path):
    for _ in range(2):
        fetched(f"{server.url}/base/", tmp_path / "here", of_run(model), said_nothing)
    assert server.asked.count("/base/config.json") == 1


def test_weights_in_several_files_are_those_that_the_index_names(model, tmp_path):
    there, weights = tmp_path / "there", load_file(model / "model.safetensors")
    there.mkdir()
    (there / "config.json").write_bytes((model / "config.json").read_bytes())
    names, places = list(weights), {}
    for number, some in enumerate((names[:5], names[5:])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: weights[name] for name in some}, there / file)
        places |= dict.fromkeys(some, file)
    (there / INDEX).write_text(json.dumps({"weight_map": places}))
    (there / "optimizer.safetensors").write_bytes(b"none of the model's")
    with serving(tmp_path) as server:
        fetched(f"{server.url}/there", tmp_path / "here", RUN, said_nothing)
    manifest = of_run(tmp_path / "here")
    assert torch.equal(
        start_state(tmp_path / "here", manifest, 0),
        start_state(model, replace(RUN, init_checkpoint=manifest.init_checkpoint), 0),
    )
    assert not (tmp_path / "here/optimizer.safetensors").exists()


def test_another_model_than_the_run_names_is_not_kept(server, model, tmp_path):
    manifest = replace(RUN, init_checkpoint=replace(RUN.init_checkpoint, sha256="ab" * 32))
    with pytest.raises(StartError, match=r"is not the model that init_checkpoint\.sha256 names"):
        fetched(f"{server.url}/base", tmp_path / "here", manifest, said_nothing)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there_is_named_and_leaves_nothing(server, tmp_path):
    with pytest.raises(StartError, match=r"/elsewhere/config\.json: is not there"):
        fetched(f"{server.url}/elsewhere", tmp_path / "here", RUN, said_nothing)
    assert list(tmp_path.iterdir()) == []


def test_more_than_the_runs_model_can_be_is_not_taken(server, tmp_path, monkeypatch):
    monkeypatch.setattr(start_fetch, "BESIDE_BYTES", -start_fetch._max_bytes(LLAMA) + (1 << 8) + (256 << 20))
    with pytest.raises(StartError, match="larger than the run's model can be"):
        fetched(f"{server.url}/base", tmp_path / "here", RUN, said_nothing)
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_without_end_is_not_taken(server, tmp_path, monkeypatch):
    monkeypatch.setattr(start_fetch, "MAX_JSON_BYTES", 100)
    with pytest.raises(StartError, match=r"config\.json: is longer than"):
        fetched(f"{server.url}/base", tmp_path / "here", RUN, said_nothing)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_falls_silent_is_not_waited_for(server, tmp_path, monkeypatch):
    monkeypatch.setattr(start_fetch, "SILENCE_SECONDS", 0.2)
    server.most_bytes = 100
    with pytest.raises(StartError, match=r"config\.json: cannot be fetched"):
        fetched(f"{server.url}/base", tmp_path / "here", RUN, said_nothing)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_ends_too_early_is_not_taken(server, tmp_path):
    server.most_bytes = 100
    server.hangs.set()  # The connection ends at once.
    with pytest.raises(StartError, match=r"config\.json: cannot be fetched"):
        fetched(f"{server.url}/base", tmp_path / "here", RUN, said_nothing)
    assert list(tmp_path.iterdir()) == []


def test_what_comes_too_slowly_is_given_up(server, tmp_path, monkeypatch):
    monkeypatch.setattr(start_fetch, "SLOWEST", 10**18)
    monkeypatch.setattr(start_fetch, "BEGIN_SECONDS", 0.0)
    with pytest.raises(StartError, match="bytes a second"):
        fetched(f"{server.url}/base", tmp_path / "here", RUN, said_nothing)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../../etc/x.safetensors", "/x.safetensors", "x.bin", ".safetensors", ""])
def test_an_index_names_files_beside_it_only(model, tmp_path, name):
    there = tmp_path / "there"
    there.mkdir()
    (there / "config.json").write_bytes((model / "config.json").read_bytes())
    (there / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with serving(tmp_path) as server:
        with pytest.raises(StartError, match="names no safetensors files next to it"):
            fetched(f"{server.url}/there", tmp_path / "here", RUN, said_nothing)
        assert server.asked == ["/there/config.json", f"/there/{INDEX}"]


def test_what_a_killed_process_left_is_swept(server, model, tmp_path):
    (tmp_path / ".here.abc.part").mkdir()
    fetched(f"{server.url}/base", tmp_path / "here", of_run(model), said_nothing)
    assert list(tmp_path.iterdir()) == [tmp_path / "here"]


def test_a_password_in_the_url_is_in_no_message(server, tmp_path):
    url = server.url.replace("http://", "http://me:secret@")
    with pytest.raises(StartError) as caught:
        fetched(f"{url}/elsewhere", tmp_path / "here", RUN, said_nothing)
    assert "secret" not in str(caught.value)


def test_who_is_told_to_stop_stops_between_two_blocks(server, tmp_path):
    asked = server.asked
    with pytest.raises(StartError, match="told to stop"):
        fetched(f"{server.url}/base", tmp_path / "here", RUN, said_nothing, lambda: bool(asked))
    assert (asked, list(tmp_path.iterdir())) == (["/base/config.json"], [])


async def test_peers_of_a_machine_share_what_one_has_fetched(server, model, tmp_path, monkeypatch):
    monkeypatch.setattr(start_fetch, "default_state", lambda *_: tmp_path)
    heard, manifest = [], of_run(model)
    places = await asyncio.gather(
        *(model_here(f"{server.url}/base", manifest, lambda *said: heard.append(said)) for _ in range(2))
    )
    assert places == [tmp_path / "models" / manifest.init_checkpoint.sha256[:16]] * 2
    assert server.asked.count("/base/model.safetensors") == 1
    assert [topic for topic, _ in heard] == ["weights"]


async def test_a_folder_and_a_file_url_are_read_where_they_are(model):
    manifest = of_run(model)
    for place in (str(model), model.as_uri()):
        assert await model_here(place, manifest, lambda *_: None) == model
    assert await model_here("", manifest, lambda *_: None) is None


RUN_FILE = """
name: tuned
stages: [1, 2]
model: {{hidden_size: 32, num_hidden_layers: 3, num_attention_heads: 4, num_key_value_heads: 2,
  head_dim: 8, intermediate_size: 64, max_position_embeddings: 64,
        rms_norm_eps: 1.0e-6}}
data: {{seq_len: 32}}
init_checkpoint: {{path: {path}{sha256}}}
"""


def swarmnet(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return ended.value.code


@pytest.mark.parametrize("says", ["run file", "option"])
def test_publishing_fetches_what_a_url_leads_to_and_pins_it(says, server, model, tmp_path, capsys):
    run_file, url = tmp_path / "run.yaml", f"{server.url}/base"
    run_file.write_text(RUN_FILE.format(path=url if says == "run file" else "base", sha256=""))
    option = [] if says == "run file" else ["--init-checkpoint", url]
    assert swarmnet("publish", str(run_file), "--key", str(tmp_path / "owner.key"), *option) == 0
    published = json.loads((tmp_path / "tuned.run.json").read_text())["manifest"]["init_checkpoint"]
    assert published["sha256"] == of_run(model).init_checkpoint.sha256
    assert published["digests"] == list(of_run(model).init_checkpoint.digests)
    assert f"init_checkpoint={tmp_path / 'base'}" in capsys.readouterr().out


def test_looking_at_a_run_file_fetches_nothing(server, tmp_path, capsys):
    run_file = tmp_path / "run.yaml"
    run_file.write_text(RUN_FILE.format(path=f"{server.url}/base", sha256=""))
    assert swarmnet("config", "check", str(run_file)) == 0
    assert "publishing fetches it" in capsys.readouterr().err
    assert server.asked == []


def test_a_model_with_another_hash_is_refused_with_code_2_and_nothing_is_written(server, tmp_path, capsys):
    run_file = tmp_path / "run.yaml"
    run_file.write_text(RUN_FILE.format(path=f"{server.url}/base", sha256=f", sha256: {'ab' * 32}"))
    assert swarmnet("publish", str(run_file), "--key", str(tmp_path / "owner.key")) == 2
    assert "init_checkpoint.sha256" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [run_file]


def test_a_password_is_not_published(server, tmp_path, capsys):
    run_file, url = tmp_path / "run.yaml", server.url.replace("http://", "http://me:secret@")
    run_file.write_text(RUN_FILE.format(path=f"{url}/base", sha256=""))
    assert swarmnet("config", "check", str(run_file)) == 2
    assert "would be published" in capsys.readouterr().err
