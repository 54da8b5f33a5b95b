"""How much of a certificate's epsilon do canaries on the product's own step show? How often is a sound step accused?

    python -m benchmarks.audit [--num-games 200000] [--short-audits 40] [--short-games 8000] [--simulated 400]

One audit at each of four claimed epsilons (delta 1e-5, 100 updates, q = 0.1, 95 %), then short audits with fresh keys,
which take the four epsilons in turn, then simulated ones, whose sound mechanism is drawn by NumPy (4 updates, q = 1/2).
Shares are of the epsilon that the accountant certifies.
"""

import argparse
import json
import sys
from typing import Any

import numpy as np
from scipy.stats import binom

from benchmarks.machine import machine
from sfumato.accounting import accountants, calibration
from sfumato.accounting.mechanism import Mechanism
from sfumato.auditing.bounds import audit_scores
from sfumato.auditing.canary import audit_canary, log_likelihood_ratio
from sfumato.auditing.record import CanaryResult

EPSILONS, DELTA, CONFIDENCE = (1.0, 2.0, 4.0, 8.0), 1e-5, 0.95


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def audit(epsilon: float, num_games: int) -> CanaryResult:
    return audit_canary(epsilon=epsilon, delta=DELTA, num_games=num_games, confidence=CONFIDENCE, report=note)


def row(found: CanaryResult) -> dict[str, Any]:
    assert found.nominal_epsilon is not None
    bounds = {bound.name: bound.epsilon or 0.0 for bound in found.bounds}
    return {
        "epsilon": found.nominal_epsilon,
        "noise_multiplier": found.noise_multiplier,
        "num_games": found.num_games,
        **{name: round(value, 3) for name, value in bounds.items()},
        **{f"{name}, share": round(value / found.nominal_epsilon, 3) for name, value in bounds.items()},
        "auc": round(found.auc, 4),
        "violated": found.violated,
        "seconds": round(found.seconds, 1),
    }


def simulated(epsilon: float, num_games: int, count: int) -> int:
    """How many of so many audits of a sound mechanism accuse it."""
    run = Mechanism(num_games, num_games // 2, noise_multiplier=1.0, num_steps=4)
    mechanism = calibration.solve(run, "noise_multiplier", epsilon, DELTA)
    nominal = accountants.epsilon(mechanism, DELTA).epsilon
    rng = np.random.default_rng(round(epsilon))
    accused = 0
    for _ in range(count):
        took_part = rng.random(num_games) < 0.5
        drawn = took_part & (rng.random((4, num_games)) < 0.5)
        scores = log_likelihood_ratio(drawn + rng.normal(0, mechanism.noise_multiplier, drawn.shape), mechanism)
        claim: dict[str, Any] = {"nominal_epsilon": nominal, "mechanism": mechanism}
        accused += bool(audit_scores(scores, took_part, delta=DELTA, confidence=CONFIDENCE, **claim).violated)
    return accused


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-games", type=int, default=200_000)
    parser.add_argument("--short-audits", type=int, default=40)
    parser.add_argument("--short-games", type=int, default=8_000)
    parser.add_argument("--simulated", type=int, default=400, help="audits at each epsilon")
    arguments = parser.parse_args()
    rows = []
    for epsilon in EPSILONS:
        rows.append(row(audit(epsilon, arguments.num_games)))
        note(json.dumps(rows[-1]))
    accused = 0
    for number in range(arguments.short_audits):
        accused += bool(audit(EPSILONS[number % len(EPSILONS)], arguments.short_games).violated)
    likely = float(binom.sf(accused - 1, arguments.short_audits, 1 - CONFIDENCE))
    of_simulated = {epsilon: simulated(epsilon, 8_000, arguments.simulated) for epsilon in EPSILONS}
    found = {
        "audits": rows,
        "short": {"audits": arguments.short_audits, "games": arguments.short_games, "violated": accused},
        "probability of so many at the stated confidence": likely,
        "simulated": {"audits": arguments.simulated, "games": 8_000, "violated": of_simulated},
        "machine": machine(),
    }
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
