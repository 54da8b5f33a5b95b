"""Which classifier on public features: by updates, solved for, or by updates that second moments straighten? The
evidence behind the default of `model.classifier` (docs/defaults.md).

    python -m benchmarks.classifiers DEST [--sets cifar10 fashion_mnist] [--counts 1000 5000]
                                          [--epsilons 0.1 0.3 1 3] [--kinds sgd least_squares dp_fc] [--runs 2]

Features of EfficientNet-Lite0 of images at 64 pixels, delta 1e-5, all else by default; accuracy on the 10,000 test
images, which chose nothing. Each private run has its own key. Prints one line of JSON for each set, count, epsilon and
kind. What is finished in DEST is not done again.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import sfumato

KINDS = ("sgd", "least_squares", "dp_fc")


def recipe(name: str, count: int, epsilon: float, kind: str) -> dict[str, Any]:
    """Of one run."""
    return {
        "data": {"name": name, "num_examples": count, "image_size": 64},
        "model": {"name": "efficientnet_lite0", "classifier": kind},
        "privacy": {"target_epsilon": epsilon, "delta": 1e-5},
        "training": {"evaluate_every": 10**6, "checkpoint_every": 10**6},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dest", type=Path)
    parser.add_argument("--sets", nargs="+", default=["cifar10", "fashion_mnist"])
    parser.add_argument("--counts", nargs="+", type=int, default=[1000, 5000])
    parser.add_argument("--epsilons", nargs="+", type=float, default=[0.1, 0.3, 1.0, 3.0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--runs", type=int, default=2)
    given = parser.parse_args()
    for name in given.sets:
        for count in given.counts:
            for epsilon in given.epsilons:
                for kind in given.kinds:
                    results, start = [], time.perf_counter()
                    for number in range(given.runs):
                        run = given.dest / f"{name}-{count}-{epsilon:g}-{kind}-{number}"
                        resume = (run / "recipe.toml").exists()
                        results.append(sfumato.train(recipe(name, count, epsilon, kind), run, resume=resume))
                    accuracies = [round(result.accuracy, 4) for result in results]
                    facts = {"set": name, "images": count, "epsilon": epsilon, "kind": kind}
                    facts |= {"mean": round(statistics.fmean(accuracies), 4), "accuracies": accuracies}
                    facts |= {"updates": results[0].num_steps, "noise_multiplier": results[0].noise_multiplier}
                    facts["seconds_a_run"] = round((time.perf_counter() - start) / given.runs, 1)
                    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
