"""The law in an interpreter of its own, for models that can crash it.

`python -m tests.clipping.zoo.apart NAME ENGINE AUGMULT` prints what is broken.
"""

import subprocess
import sys
from pathlib import Path

from tests.clipping.zoo.catalogue import BY_NAME
from tests.clipping.zoo.law import Outcome, try_law

ROOT = Path(__file__).parents[3]


def try_law_apart(name: str, engine: str, augmult: int) -> str:
    """What is broken, one line; empty if nothing is."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.clipping.zoo.apart", name, engine, str(augmult)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode:
        return f"the interpreter ended with status {done.returncode}"
    return done.stdout.strip()


def main(name: str, engine: str, augmult: str) -> None:
    outcome: Outcome = try_law(BY_NAME[name], engine, int(augmult))
    print("; ".join(outcome.broken()))


if __name__ == "__main__":
    main(*sys.argv[1:])
