"""What do canaries in one run show of its epsilon, what do they cost in accuracy, and how much time do they take?

    python -m benchmarks.one_run [--repeats 5] [--only digits mnist short-mnist] [--num-steps T]

Each case trains with and without canaries, in turns (which is first changes each time), and audits each run with them
(95 %). Seconds are of the whole training, audit aside; overheads are medians over the pairs, of seconds and of seconds
of the processor, which other work on the machine disturbs less. MNIST is looked for as `sfumato train` does.
"short-mnist" is 20,000 of its digits at epsilon 8, for busy machines; it runs if it is named.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import sfumato
from benchmarks.machine import machine
from sfumato.training.logs import Progress

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "digits": ("demo/digits", 75, {}),
    "digits at epsilon 8": ("demo/digits", 75, {"privacy.target_epsilon": 8.0}),
    "mnist": ("mnist-cnn-eps-2.93", 1000, {}),
    "mnist, most canaries": ("mnist-cnn-eps-2.93", 3157, {}),
    "mnist at epsilon 8, most canaries": ("mnist-cnn-eps-2.93", 3157, {"privacy.target_epsilon": 8.0}),
    "short-mnist": (
        "mnist-cnn-eps-2.93",
        1000,
        {
            "privacy.target_epsilon": 8.0,
            "data.num_examples": 20_000,
            "training.batch_size": 2048,
            "training.num_steps": 60,
            "model.options.width": 16,
            "optimizer.learning_rate": 3.0,
        },
    ),
}


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(recipe: str, settings: dict[str, Any], canaries: int, folder: Path) -> dict[str, Any]:
    """One run, and the audit of it where there are canaries."""
    start, of_processor = time.perf_counter(), time.process_time()
    result = sfumato.train(recipe, folder, settings={**settings, "audit.canaries": canaries}, progress=Progress())
    row: dict[str, Any] = {
        "accuracy": result.accuracy,
        "seconds": time.perf_counter() - start,
        "processor seconds": time.process_time() - of_processor,
    }
    if canaries:
        start = time.perf_counter()
        found = sfumato.audit_one_run(folder)
        row |= {
            "audit seconds": time.perf_counter() - start,
            "claimed": found.nominal_epsilon,
            "shown": found.epsilon_lower_bound,
            "right": f"{found.bounds[0].num_right} of {found.bounds[0].num_guesses}",
            "auc": found.auc,
            "violated": found.violated,
            "perfect": found.power.perfect,
            "tight": found.power.tight,
        }
    return row


def case(name: str, repeats: int, num_steps: int | None, place: Path) -> dict[str, Any]:
    recipe, canaries, settings = CASES[name]
    if num_steps is not None:
        settings = {**settings, "training.num_steps": num_steps}
    with_them, without = [], []
    for number in range(repeats):
        for count in (0, canaries) if number % 2 else (canaries, 0):
            row = run(recipe, settings, count, place / f"{name} {number} {count}")
            (with_them if count else without).append(row)
            note(json.dumps({"case": name, "canaries": count, **row}))
    first = with_them[0]

    def overhead(of: str) -> float:
        return round(median(one[of] / other[of] for one, other in zip(with_them, without, strict=True)) - 1, 4)

    return {
        "case": name,
        "canaries": canaries,
        "claimed": first["claimed"],
        "shown": [round(row["shown"], 3) for row in with_them],
        "right": [row["right"] for row in with_them],
        "auc": [round(row["auc"], 4) for row in with_them],
        "violated": sum(row["violated"] for row in with_them),
        "shown by an attacker who is never wrong": round(first["perfect"], 3),
        "shown by the best attack on a Gaussian mechanism": round(first["tight"], 3),
        "accuracy with": round(mean(row["accuracy"] for row in with_them), 5),
        "accuracy without": round(mean(row["accuracy"] for row in without), 5),
        "seconds with": round(median(row["seconds"] for row in with_them), 1),
        "seconds without": round(median(row["seconds"] for row in without), 1),
        "overhead": overhead("seconds"),
        "overhead of the processor": overhead("processor seconds"),
        "audit seconds": round(median(row["audit seconds"] for row in with_them), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=CASES, default=[name for name in CASES if name != "short-mnist"])
    parser.add_argument("--num-steps", type=int, help="other than the recipe's")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        run("demo/digits", {"training.num_steps": 1}, 75, Path(place) / "first")  # imports, and is not timed
        rows = [case(name, arguments.repeats, arguments.num_steps, Path(place)) for name in arguments.only]
    print(json.dumps({"cases": rows, "confidence": 0.95, "machine": machine()}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
