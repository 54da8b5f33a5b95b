"""A signal that was caught ends the process as the program says, wherever it fell."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from sfumato import cli
from sfumato.training.interrupt import stop_on_sigterm

def run(arguments):
    try:
        with stop_on_sigterm():
            exec("os.kill(os.getpid(), signal.Signals[arguments[0]]); [None for _ in range(9)]")
    except KeyboardInterrupt:
        return 1
    return 0

cli.run = run
cli.main()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_amid_text_that_a_library_runs_ends_with_the_status_of_the_command(tmp_path, name):
    (tmp_path / "program.py").write_text(PROGRAM)
    program = [sys.executable, "-m", "program", name]
    assert subprocess.run(program, cwd=tmp_path, timeout=120).returncode == 1


def test_a_signal_that_is_ignored_stays_so(tmp_path):
    """As in a shell's background job."""
    (tmp_path / "program.py").write_text(PROGRAM)
    program = [sys.executable, "-m", "program", "SIGINT"]
    ignoring = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731
    assert subprocess.run(program, cwd=tmp_path, timeout=120, preexec_fn=ignoring).returncode == 0
