"""From a folder of images to a decision: plan, train, calibrate, predict, export.

    python examples/folder.py IMAGES [OUTPUT]

IMAGES holds train/<class>/*, and test/<class>/* that nobody trains on. With `torchrun` or a GPU nothing changes.
"""

import sys
import tempfile
from pathlib import Path

import sfumato

images = Path(sys.argv[1])
output = Path(sys.argv[2] if sys.argv[2:] else tempfile.mkdtemp(prefix="folder-"))

# What a budget buys, before anything is read: the noise that 60 updates of 256 images need under epsilon 3.
count = sum(1 for path in (images / "train").rglob("*") if path.is_file())
plan = sfumato.plan(count, delta=1e-5, batch_size=min(256, count), num_steps=60, epsilon=3.0)
print(f"{count} images: noise multiplier {plan.mechanism.noise_multiplier:.3g}")

# Every choice is made and said by itself: which network, how many updates, which noise.
result = sfumato.train("image-folder", output / "run", epsilon=3.0, data_root=images)
low, high = result.accuracy_interval
print(f"held-out accuracy {result.accuracy:.1%} ({low:.1%} to {high:.1%}), epsilon {result.epsilon:.3f}")

# The classes of new images, and how sure the network is, where enough images were held out to know that.
new = sorted((images / "test").rglob("*.*"))[:3]
for answer in sfumato.predict(output / "run", new):
    print(answer.image, answer.class_name, answer.probability)

# What is handed on: weights, certificate, a card, and a program that needs no Sfumato.
sfumato.export(output / "run", output / "exported")
checked = sfumato.verify(output / "exported")
print(f"{output / 'exported'}: {'valid' if checked.valid else checked.findings}")
