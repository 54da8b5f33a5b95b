"""How much less do differences of paired runs spread than those of runs with randomness of their own?

    python -m benchmarks.pairs DEST [--seeds 8] [--steps 40]

Fashion-MNIST, the small group-norm network, batches of 128 and 512 at the same noise per image (sigma / batch), run n
of both with seed n - 1: `sfumato sweep --paired`. Prints, as JSON, the standard deviation of the paired differences,
that of the difference of two independent runs, sqrt(s_1^2 + s_2^2) of the same runs, and their ratio. Goes on in DEST
after a kill.
"""

import argparse
import json
import math
import statistics
from pathlib import Path

import sfumato
from benchmarks.machine import machine

CELLS = [
    {"training.batch_size": 128, "privacy.noise_multiplier": 0.2},
    {"training.batch_size": 512, "privacy.noise_multiplier": 0.8},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dest", type=Path)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    settings = {"data.split": "train", "privacy.target_epsilon": None, "training.num_steps": given.steps}
    settings["training.evaluate_every"] = given.steps
    found = sfumato.sweep(
        "fashion-mnist-eps-2.7", cells=CELLS, seeds=given.seeds, paired=True, settings=settings, output=given.dest
    )
    small, large = ([100 * run.accuracy for run in cell.runs] for cell in found.cells)
    paired = [after - before for before, after in zip(small, large, strict=True)]
    of_pairs = statistics.stdev(paired)
    of_unlike = math.sqrt(statistics.variance(small) + statistics.variance(large))
    facts = {
        "points": {"small": small, "large": large},
        "difference": statistics.fmean(paired),
        "std_paired": of_pairs,
        "std_unpaired": of_unlike,
        "ratio": of_pairs / of_unlike,
        "seeds": given.seeds,
        "steps": given.steps,
        "machine": machine(),
    }
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
