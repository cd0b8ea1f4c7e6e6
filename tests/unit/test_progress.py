"""What takes long says so on stderr, and what is quick says nothing."""

from __future__ import annotations

import threading

import pytest

from bapo.runtime.progress import progress


def test_a_quick_block_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("reading") as note:
        note("step 1 of 2")
    assert capsys.readouterr() == ("", "")


def test_a_slow_block_says_what_and_how_far_on_stderr_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = threading.Event()
    monkeypatch.setattr("sys.stderr.flush", said.set)
    with progress("reading run", first_s=0.0, every_s=60.0) as note:
        note("step 40 of 120")
        assert said.wait(5)
    out, err = capsys.readouterr()
    assert (out, err.startswith("reading run"), err.endswith(" ...\n")) == ("", True, True)


def test_an_error_in_the_block_ends_the_thread() -> None:
    with pytest.raises(ValueError), progress("reading"):
        raise ValueError("broken")
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]
