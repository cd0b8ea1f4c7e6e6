"""Before a run starts: a refused or interrupted start deletes what is new, and nothing else."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from bapo.config.load import dump_toml, load_config
from bapo.core.errors import ConfigError
from bapo.runtime.process import interruptible
from bapo.runtime.run_directory.layout import RunDirectory
from services.launcher.__main__ import _preflight

FLAGS = argparse.Namespace(verb="train", resume=True, quiet=True, accept_changes=False)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", dump_toml(load_config(["bapo"], [])))


def refuse(*_: object, **__: object) -> NoReturn:
    raise ConfigError("port 8700 is in use")


def interrupt(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("what", "kind"), [(refuse, ConfigError), (interrupt, KeyboardInterrupt)])
@pytest.mark.parametrize("has_trained", [False, True])
def test_a_start_that_is_refused_or_interrupted_deletes_only_a_run_that_is_new(
    run: RunDirectory, what: object, kind: type[BaseException], has_trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_trained:
        run.checkpoint_dir(40).mkdir(parents=True)  # its run.json was not copied with it
    monkeypatch.setattr("services.launcher.__main__.preflight", what)
    monkeypatch.setattr("services.launcher.__main__.check_inputs", lambda *_, **__: "")
    with pytest.raises(kind):
        _preflight(load_config(["bapo"], []), FLAGS, run)
    assert run.path.is_dir() == has_trained


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_checks_end_at_the_first_signal_and_leave_the_handlers_as_they_were(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interruptible():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
