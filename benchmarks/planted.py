"""Which law sees which fault: every fault of `tests/auditing/planted/faults.py` in the code, before every law.

    python -m benchmarks.planted [--only WORD ...]

It prints the table for LOG.md, a line as soon as it is known, and then the canary audit's bounds with noise over the
root of two at four epsilons. About five minutes on one core.
"""

import argparse
import math

import torch

from sfumato.accounting import accountants, calibration
from sfumato.accounting.mechanism import Mechanism
from sfumato.auditing import canary
from sfumato.auditing.bounds import audit_scores
from tests.auditing.planted import laws
from tests.auditing.planted.faults import FAULTS, MORE
from tests.auditing.planted.plants import Edit, planted

NOTHING = "as it is"
ROOT_TWO = Edit(
    "training.step:PrivateStep.release",
    "with_noise(grad_sum, self.noise_stddev, noise, first)",
    "with_noise(grad_sum, self.noise_stddev / 2**0.5, noise, first)",
)
RUNS = {1.0: 20, 2.0: 6, 4.0: 3, 8.0: 2}
"""Of 4,000 games, at each epsilon: as many as `tests/auditing/test_canary.py` plays."""
DELTA = 1e-5


def row(name: str, edits: tuple[Edit, ...]) -> str:
    """A fault, which laws it breaks, and how sure that is."""
    laws.forget()
    with planted(*edits):
        found = {law: said for law, function in laws.LAWS.items() if (said := laws.broken(function)) is not None}
    laws.forget()
    if not found:
        return f"| {name} | no law | |"
    if all(said.startswith(laws.REFUSES) for said in found.values()):
        return f"| {name} | before the first image {next(iter(found.values()))} | exact |"
    exact = [law for law in found if law not in laws.STATISTICAL]
    first = (exact or list(found))[0]
    return f"| {name} | {', '.join(found)}: {found[first]} | {'exact' if exact else '1 - 10^-6'} |"


def audited(epsilon: float) -> str:
    """What the canary audit shows with noise that is too small by the root of two."""
    mechanism = calibration.solve(Mechanism(4000, 2000, 1.0, 4), "noise_multiplier", epsilon, DELTA)
    nominal = accountants.epsilon(mechanism, DELTA).epsilon
    with planted(ROOT_TWO):
        scores, members = canary.play(mechanism, RUNS[epsilon])
    found = audit_scores(scores, members, delta=DELTA, nominal_epsilon=nominal, mechanism=mechanism)
    shown = {bound.name: bound.epsilon or 0.0 for bound in found.bounds}
    less = mechanism.replace(noise_multiplier=mechanism.noise_multiplier / math.sqrt(2))
    spent = accountants.epsilon(less, DELTA).epsilon
    cells = (f"{nominal:.3f}", f"{spent:.3f}", f"{found.num_games:,}", f"{shown['trade-off']:.2f}", found.violated)
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| fault | caught by: what it says | confidence |\n|---|---|---|")
    for name, edits in [(NOTHING, ()), *((fault.name, fault.edits) for fault in FAULTS + MORE)]:
        if not arguments.only or any(word in name for word in arguments.only):
            print(row(name, edits), flush=True)
    if not arguments.only:
        print("\n| epsilon claimed | really spent | games | `trade-off` at 95 % | violated |\n|---|---|---|---|---|")
        for epsilon in RUNS:
            print(audited(epsilon), flush=True)
