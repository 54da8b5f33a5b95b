"""Rules by which a sweep shows what a paper states, or does not."""

import math

import numpy as np
import pytest
from scipy import stats

from sfumato.cli.sweep import in_words
from sfumato.errors import InputError
from sfumato.studies.claims import Claim, judge
from sfumato.studies.result import Cell, CellRun, Sweep

NOISE = "privacy.noise_multiplier"
BATCH, RATE, STEPS = "training.batch_size", "optimizer.learning_rate", "training.num_steps"


def cell(settings, accuracies, label=None, place=None):
    runs = [
        CellRun(run=f"{place or settings}/{n}", seed=None, accuracy=float(a), accuracy_last=float(a), num_lost=0)
        for n, a in enumerate(accuracies)
    ]
    facts = {"batch_size": settings.get(BATCH, 1), "num_steps": settings.get(STEPS, 1), "num_examples": 100}
    return Cell.model_construct(settings=settings, label=label, runs=runs, **facts)


def sweep(*cells, paired=False):
    return Sweep.model_construct(cells=list(cells), seeds=len(cells[0].runs), paired=paired)


def two(ones, others, **options):
    return sweep(cell({BATCH: 8}, ones), cell({BATCH: 4}, others), **options)


ABOVE = Claim(says="larger is better", rule="above", these={BATCH: 8}, those={BATCH: 4})
GOOD, BAD = [0.90, 0.92, 0.91, 0.93], [0.70, 0.73, 0.71, 0.74]


def test_a_difference_has_welchs_interval_and_of_paired_runs_that_of_differences():
    ones, others = [0.90, 0.97, 0.91, 0.93], [0.85, 0.88, 0.89, 0.86]
    found = judge(ABOVE, two(ones, others))
    welch = stats.ttest_ind(ones, others, equal_var=False).confidence_interval()
    assert (found.low, found.high) == pytest.approx((welch.low, welch.high))
    pairs = stats.ttest_rel(ones, others).confidence_interval()
    paired = judge(ABOVE, two(ones, others, paired=True))
    assert (paired.low, paired.high) == pytest.approx((pairs.low, pairs.high))
    assert [paired.value, found.value] == pytest.approx([np.mean(ones) - np.mean(others)] * 2)
    # So have cells that are two moments of the same runs.
    shared = sweep(cell({BATCH: 8}, ones, place="run"), cell({BATCH: 4}, others, place="run"))
    assert judge(ABOVE, shared) == paired


@pytest.mark.parametrize(
    ("ones", "others", "verdict"),
    [(GOOD, BAD, "holds"), (BAD, GOOD, "opposite"), (GOOD, [0.80, 0.99, 0.90, 0.92], "open"), ([0.9], [0.1], "open")],
)
def test_a_statement_holds_is_opposite_or_stays_open(ones, others, verdict):
    assert judge(ABOVE, two(ones, others)).verdict == verdict


def test_near_holds_within_the_margin_alone_and_is_no_absence_of_evidence():
    near = Claim(says="the same", rule="near", these={BATCH: 8}, those={BATCH: 4}, margin=0.02)
    close = [value + 0.001 for value in [0.900, 0.901, 0.899, 0.900]]
    assert judge(near, two(close, [0.900, 0.899, 0.901, 0.900])).verdict == "holds"
    assert judge(near, two(GOOD, BAD)).verdict == "opposite"
    assert judge(near, two([0.8, 0.99, 0.9, 0.92], GOOD)).verdict == "open"  # too few runs to tell


def test_a_peak_is_a_cell_between_that_is_above_both_ends():
    peak = Claim(says="there is an optimum", rule="peak", along=NOISE)

    def at(*levels):
        return sweep(*(cell({NOISE: float(n)}, np.add(level, [0.0, 0.01, -0.01, 0.005])) for n, level in levels))

    found = judge(peak, at((4, 0.5), (1, 0.5), (2, 0.8), (3, 0.7)))
    assert found.verdict == "holds" and found.where == {NOISE: 2.0}
    assert judge(peak, at((1, 0.5), (2, 0.6), (3, 0.7), (4, 0.8))).verdict == "opposite"
    assert judge(peak, at((1, 0.9), (2, 0.6), (3, 0.7), (4, 0.1))).verdict == "opposite"
    assert judge(peak, at((1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5))).verdict == "open"
    assert judge(peak, at((1, 0.5), (2, 0.51), (3, 0.51), (4, 0.2))).verdict == "open"  # above one end alone


def test_without_a_peak_one_is_found_in_at_most_one_case_of_twenty():
    """Ten cells as good as one end, far above the other: each would be a chance, so their intervals are wider."""
    peak, found = Claim(says="there is an optimum", rule="peak", along=NOISE), 0
    draws = np.random.default_rng(0).normal(0.5, 0.01, (400, 12, 5))
    draws[:, 0] -= 0.1
    for values in draws:
        cells = sweep(*(cell({NOISE: float(n)}, accuracies) for n, accuracies in enumerate(values)))
        found += judge(peak, cells).verdict == "holds"
    assert found <= 400 * 0.05 + 3 * math.sqrt(400 * 0.05)


def grid(best_rates):
    """At batch 4 and 8, rates 1, 2, 4: in run n the best one is `best_rates[batch][n]`; 100 steps or 25."""
    return sweep(
        *(
            cell({BATCH: batch, RATE: rate, STEPS: 100 // batch}, [0.9 if rate == best else 0.5 for best in bests])
            for batch, bests in best_rates.items()
            for rate in (1.0, 2.0, 4.0)
        )
    )


def moves(rule, **margin):
    return Claim(says="the best rate moves", rule=rule, of=RATE, these={BATCH: 8}, those={BATCH: 4}, **margin)


def test_how_a_best_value_moves_is_asked_of_each_run_in_octaves():
    risen = grid({4: [1.0, 1.0, 1.0, 2.0], 8: [4.0, 4.0, 2.0, 4.0]})
    found = judge(moves("best rises"), risen)
    octaves = [2.0, 2.0, 1.0, 1.0]
    interval = stats.ttest_1samp(octaves, 0.0).confidence_interval()
    assert (found.value, found.low, found.high) == pytest.approx((1.5, interval.low, interval.high))
    assert found.unit == "octaves"
    assert [judge(moves(rule), risen).verdict for rule in ("best rises", "best falls")] == ["holds", "opposite"]
    assert judge(moves("best stays", margin=0.5), risen).verdict == "opposite"
    still = grid({4: [2.0, 2.0, 2.0, 1.0], 8: [2.0, 2.0, 2.0, 1.0]})
    assert judge(moves("best stays", margin=0.5), still).verdict == "holds"
    assert judge(moves("best rises"), grid({4: [1.0, 4.0, 2.0], 8: [4.0, 1.0, 2.0]})).verdict == "open"


def test_of_equally_good_values_the_middle_counts():
    """Whichever stands first in the grid must not be preferred."""
    tied = sweep(
        *(cell({BATCH: 4, RATE: rate}, [0.9, 0.9]) for rate in (1.0, 2.0, 4.0)),
        *(cell({BATCH: 8, RATE: rate}, [0.5 + rate / 10, 0.9]) for rate in (1.0, 4.0)),
    )
    assert judge(moves("best rises"), tied).value == pytest.approx(0.5)  # from 2 to 4, and from 2 to 2


def test_epochs_are_images_in_all_batches_over_images():
    cells = sweep(
        *(cell({BATCH: batch, STEPS: steps}, [0.9 - steps / 1000] * 3) for batch in (4, 8) for steps in (50, 100))
    )
    claim = Claim(says="epochs grow", rule="best rises", of="epochs", these={BATCH: 8}, those={BATCH: 4})
    assert judge(claim, cells).value == 1.0  # 4 epochs after 2


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        ({"rule": "above", "these": {BATCH: 16}}, "has 0"),
        ({"rule": "above", "these": {RATE: 1.0}}, "has 2"),
        ({"rule": "above", "these": "no such label"}, "has 0"),
        ({"rule": "peak", "along": BATCH}, "three or more"),
        ({"rule": "best rises", "of": RATE, "these": {BATCH: 8, RATE: 1.0}}, "several"),
    ],
)
def test_a_claim_about_what_a_sweep_lacks_is_refused(claim, says):
    cells = grid({4: [1.0], 8: [2.0]})
    with pytest.raises(InputError, match=says):
        judge(Claim(says="a statement", **claim), cells)


def test_a_claim_says_what_it_is_about():
    for rule in ("above", "near", "peak", "best rises"):
        with pytest.raises(ValueError, match="lacks what it is about"):
            Claim(says="a statement", rule=rule)


def test_a_verdict_is_one_line_with_its_interval():
    assert in_words(judge(ABOVE, two(GOOD, BAD))) == (
        "holds     larger is better: +19.50 points, 95 % interval +16.69 to +22.31"
    )
    assert in_words(judge(ABOVE, two([0.9], [0.5]))).endswith("+40.00 points, one run, so no interval")
