import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_somebodys_own_loop_learns_and_says_what_it_spent():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "private_loop.py")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    accuracy, epsilon = map(float, re.search(r"accuracy ([\d.]+) at epsilon ([\d.]+)", done.stdout).groups())
    assert accuracy > 0.8 and 2 < epsilon < 3


def test_making_a_loop_private_takes_about_ten_lines():
    marked = [line for line in (EXAMPLES / "private_loop.py").read_text().splitlines() if "(private)" in line]
    assert len(marked) <= 11
