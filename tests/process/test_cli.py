"""The command line: overrides, names, refusals with exit codes, and help with examples."""

from __future__ import annotations

import subprocess
import sys


def test_the_entry_point_turns_an_error_into_one_line_and_its_exit_code() -> None:
    code = "import sys; sys.argv = ['bapo', 'train', 'nowhere.toml']; from bapo.cli.app import main; main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: nowhere.toml: no such file")
    assert "Traceback" not in ended.stderr


def test_what_a_message_repeats_of_a_file_cannot_command_the_terminal() -> None:
    code = "import sys; sys.argv = ['bapo', 'train', 'no\\x1b[2Jwhere.toml']; from bapo.cli.app import main; main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stderr.startswith(r"error: no\x1b[2Jwhere.toml: no such file")
