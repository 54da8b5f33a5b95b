"""Sander et al. (2022): cheap runs with the same total amount of noise choose the settings of the one private run.

    python examples/tan_search.py [OUTPUT]

The search looks at private images, and no epsilon covers that: the last line says so. With `data=` it searches on
public images, and then the epsilon of the final run is all that is spent. A run as small as this one costs no more than
its search; docs/tan.md has larger ones.
"""

import sys
import tempfile
from pathlib import Path

import sfumato

output = Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp(prefix="tan-search-"))
output.mkdir(parents=True, exist_ok=True)

# What is tried, one group after another; batch size and noise follow from the total amount of noise.
space = output / "space.toml"
space.write_text(
    '["learning rate"]\n"optimizer.learning_rate" = [1.0, 2.0, 4.0]\n[averaging]\n"ema.decay" = [0.8, 0.9]'
)

# A 32nd of the batch with a 32nd of the noise: a 32nd of the gradients.
settings = {"data.split": "train"}
found = sfumato.search(
    "demo/digits", 5, output=output / "search", batch_size=16, seeds=(0, 1), space=space, settings=settings
)
print(f"best {found.best.settings}, for {found.cost.search_fraction:.0%} of one private run's gradients")
guess = found.predicted_accuracy
print(f"expected of the private run: {guess.value:.3f} ({guess.low:.3f} to {guess.high:.3f})")

# The one private run, by the recipe that the search wrote.
result = sfumato.train(found.recipe, output / "run")
print(f"accuracy {result.accuracy:.3f} at epsilon {result.epsilon:.3f}, delta {result.delta:.0e}")
covered = "covered" if found.epsilon_search_inclusive is not None else "not covered by it"
print(f"the choice of settings on {found.search_data} images is {covered}")
