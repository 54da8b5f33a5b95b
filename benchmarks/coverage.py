"""How often the scaling law's 95 % intervals cover one more run at the reference, on synthetic studies.

    python -m benchmarks.coverage [--fits 2000]

prints one line for each case: coverage as it is reported (over both laws where the runs do not tell them apart), with
the law that made the data, with the law that is chosen, with the other law; how often the right law was chosen; the
median width in points.
"""

import argparse
import dataclasses

import numpy as np

from sfumato.scaling.law import LAWS, Point, fit, predict

REFERENCE = 2048
INVERSE, LINE = "a + b / B", "a + b log2 B"


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of study: `uneven` multiplies the spread at the smallest batch, `fading` at every batch in turn, down to
    1.
    """

    name: str
    law: str = INVERSE
    sizes: tuple[int, ...] = (32, 64, 128, 256)
    seeds: int = 5
    of_seed: float = 0.003
    of_run: float = 0.002
    uneven: float = 1.0
    fading: float = 1.0
    slope: float = 1.0


CASES = [
    Case("a + b / B, equal spreads"),
    Case("a + b log2 B, equal spreads", law=LINE),
    Case("three seeds, as a search ends", seeds=3),
    Case("the same, a + b log2 B", law=LINE, seeds=3),
    Case("three batch sizes, three seeds", sizes=(64, 128, 256), seeds=3),
    Case("the same, a + b log2 B", law=LINE, sizes=(64, 128, 256), seeds=3),
    Case("no dependence on B", slope=0.0),
    Case("a tenth of the spread: laws are easy to tell apart", of_seed=0.0003, of_run=0.0002),
    Case("the same, a + b log2 B", law=LINE, of_seed=0.0003, of_run=0.0002),
    Case("spread x 2 at the smallest batch", uneven=2.0),
    Case("spread x 4 at the smallest batch", uneven=4.0),
    Case("spread x 8 at the smallest batch", uneven=8.0),
    Case("spread falling from x 2 to x 1", fading=2.0),
    Case("spread falling from x 4 to x 1", fading=4.0),
]


def truth(case: Case, size: int) -> float:
    x = float(LAWS[case.law](np.array(float(size))))
    return 0.77 - 0.8 * case.slope * x if case.law == INVERSE else 0.70 + 0.007 * case.slope * x


def spread(case: Case, size: int) -> float:
    if size not in case.sizes:
        return case.of_run
    place = case.sizes.index(size) / (len(case.sizes) - 1)
    return case.of_run * case.fading ** (1 - place) * (case.uneven if place == 0 else 1.0)


def measure(case: Case, fits: int) -> dict[str, float]:
    rng = np.random.default_rng(0)

    def run(size: int, level: float) -> float:
        return truth(case, size) + level + spread(case, size) * rng.standard_normal()

    counts = dict.fromkeys(("reported", "right law", "chosen law", "other law", "right chosen", "warned"), 0)
    widths = []
    for _ in range(fits):
        levels = case.of_seed * rng.standard_normal(case.seeds)
        found = fit([Point(size, seed, run(size, level)) for seed, level in enumerate(levels) for size in case.sizes])
        more = run(REFERENCE, case.of_seed * rng.standard_normal())

        def covers(predicted, more=more):
            return predicted.low <= more <= predicted.high

        reported = predict(found, REFERENCE)
        widths.append(reported.high - reported.low)
        counts["reported"] += covers(reported)
        counts["right law"] += covers(next(law for law in found if law.law == case.law).predict(REFERENCE))
        counts["chosen law"] += covers(found[0].predict(REFERENCE))
        counts["other law"] += covers(next(law for law in found if law.law != case.law).predict(REFERENCE))
        counts["right chosen"] += found[0].law == case.law
        counts["warned"] += bool(found[0].warnings)
    return {**{name: 100 * count / fits for name, count in counts.items()}, "width": 100 * float(np.median(widths))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fits", type=int, default=2000)
    arguments = parser.parse_args()
    for case in CASES:
        facts = measure(case, arguments.fits)
        print(f"{case.name:<52}" + "  ".join(f"{name} {value:5.1f}" for name, value in facts.items()), flush=True)
