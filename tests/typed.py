"""Commands as a person types them, in the process of the test."""

import pytest

from peers import cli


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
