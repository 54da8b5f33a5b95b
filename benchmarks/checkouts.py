"""Two checkouts side by side: what private gradients cost in each, in turns.

    python -m benchmarks.checkouts OTHER [--works small-cnn:256:0,wrn-16-4:8:16] [--rounds 9]

OTHER is the folder of another checkout (`git worktree add OTHER COMMIT`). In each round each of both measures each work
(network:examples:augmult) in a process of its own, by its own `benchmarks.clipping`, so that a busy moment meets both.
Prints the median over rounds of the private step's time over the ordinary step's, of memory likewise, and of the
seconds of a first call. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
# A loss of the user's own in all of them.
WORKS = (
    "small-cnn:256:0,vit-tiny-64:32:0,vit-tiny-224:8:0,wrn-16-4-no-ws:32:1,wrn-16-4:32:1,wrn-16-4:16:4,wrn-16-4:8:16"
)
FIGURES = ("ratio", "peak_memory_ratio", "first_call_seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--works", default=WORKS)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    for work in options.works.split(","):
        found: dict[Path, list[dict[str, Any]]] = {HERE: [], options.other.resolve(): []}
        for number in range(options.rounds):
            for checkout in list(found)[:: 1 if number % 2 else -1]:
                found[checkout].append(measured(checkout, *work.split(":")))
        figures = {
            name: [round(statistics.median(row[name] for row in rows), 3) for rows in found.values()]
            for name in FIGURES
        }
        print(json.dumps({"work": work, "rounds": options.rounds, "this, other": figures}), flush=True)


def measured(checkout: Path, name: str, examples: str, augmult: str) -> dict[str, Any]:
    """The private step's row of that checkout's own benchmark."""
    command = [sys.executable, "-m", "benchmarks.clipping", "--json", "--rounds", "5", "--engines", "ordinary,graph"]
    command += ["--model", name, "--examples", examples, "--augmult", augmult]
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{checkout}"}
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True, text=True)
    return next(row for row in json.loads(done.stdout)["results"] if row["engine"] == "graph")


if __name__ == "__main__":
    main()
