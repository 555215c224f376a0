"""Commands as a person types them, in the process of the test."""

from pathlib import Path

import pytest

from peers.cli import main as cli


def typing(capsys, monkeypatch):
    """What runs a command and returns its exit code, standard output and standard error."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # As main would: set here, they are taken back afterwards.
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")

    def command(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return command


BOOTSTRAP = "/ip4/127.0.0.1/tcp/31330/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def refused(outcome, *words):
    code, out, err = outcome
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err
    for word in words:
        assert word in err


def write(name, text):
    Path(name).write_text(text)
    return name
