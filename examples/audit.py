"""Attacks on a certificate's promise: on the private step, and on one run by the canaries that it was trained with.

    python examples/audit.py [OUTPUT]

An audit states an epsilon from below. Above the certificate's, one of the two is wrong; far below, it proves little:
`power` says what the best attack would have shown.
"""

import sys
import tempfile
from pathlib import Path

import sfumato

output = Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp(prefix="audit-"))


def show(name, found):
    bound, claim = found.epsilon_lower_bound, found.nominal_epsilon
    print(f"{name}: epsilon is at least {bound:.2f}, claimed {claim:.2f}: {'violated' if found.violated else 'holds'}")
    print(f"  the best attack on what is claimed would show {found.power.tight:.2f}")


# The strongest attacker that a certificate covers sees every update: 20,000 games against the step of every run.
show("canaries in every update", sfumato.audit_canary(epsilon=4.0, delta=1e-5, num_steps=20, num_games=20_000))

# One run, whose weights alone are seen: 70 made-up images take part or not, as coins decide.
settings = {"audit.canaries": 70}
result = sfumato.train("demo/digits", output / "run", epsilon=8.0, settings=settings)
show("one run", sfumato.audit_one_run(output / "run"))
print(f"certificate and report hold the second: {output / 'run' / 'report.html'}")
