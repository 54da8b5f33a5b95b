"""How much less do differences of paired runs spread than those of runs with randomness of their own?

    python -m benchmarks.pairs DEST [--of rates | batches | far-batches] [--seeds 8] [--steps 40]

Fashion-MNIST, the small group-norm network: two learning rates at a batch of 256, or batches of 128 and 512, or of 256
and 2048, at the same noise per image (sigma / batch). Run n of both has seed n - 1: `sfumato sweep --paired`. Prints,
as JSON, the standard deviation of the paired differences, that of the difference of two independent runs,
sqrt(s_1^2 + s_2^2) of the same runs, and their ratio. Goes on in DEST after a kill.
"""

import argparse
import json
import math
import statistics
from pathlib import Path

import sfumato
from benchmarks.machine import machine


def at(batch_size: int, learning_rate: float = 4.0) -> dict[str, float]:
    noise = 1.6 * batch_size / 1024
    return {
        "training.batch_size": batch_size,
        "privacy.noise_multiplier": noise,
        "optimizer.learning_rate": learning_rate,
    }


CELLS = {"rates": [at(256, 2.0), at(256)], "batches": [at(128), at(512)], "far-batches": [at(256), at(2048)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dest", type=Path)
    parser.add_argument("--of", choices=CELLS, default="rates")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    settings = {"data.split": "train", "privacy.target_epsilon": None, "training.num_steps": given.steps}
    settings["training.evaluate_every"] = given.steps
    found = sfumato.sweep(
        "fashion-mnist-cnn-eps-2.7",
        cells=CELLS[given.of],
        seeds=given.seeds,
        paired=True,
        settings=settings,
        output=given.dest,
    )
    one, other = ([100 * run.accuracy for run in cell.runs] for cell in found.cells)
    paired = [second - first for first, second in zip(one, other, strict=True)]
    of_pairs = statistics.stdev(paired)
    of_unlike = math.sqrt(statistics.variance(one) + statistics.variance(other))
    facts = {
        "of": given.of,
        "per_cent": [one, other],
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
