"""A sweep over learning rate and averaging, with its plot: private runs on handwritten digits.

    python examples/sweep.py [OUTPUT]

The same command goes on after a kill. Whoever looks at all runs is covered by `epsilon_together`.
"""

import sys
import tempfile
from pathlib import Path

import sfumato

output = Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp(prefix="sweep-"))
found = sfumato.sweep(
    "demo/digits",
    {"optimizer.learning_rate": [1.0, 4.0], "ema.decay": [0.5, 0.9]},
    seeds=2,
    output=output / "study",
    settings={"data.split": "train"},  # compared on validation images: test images stay unseen
)
for cell in found.cells:
    print(f"{cell.settings}: {cell.mean:.3f} +- {cell.standard_error:.3f} at epsilon {cell.epsilon:.3f}")
print(f"all {found.updates_together} updates together: epsilon {found.epsilon_together:.3f}")
found.plot().savefig(output / "sweep.svg")
print(f"{output / 'sweep.svg'}, and as a table {output / 'study' / 'sweep.csv'}")
