"""Somebody's own training loop, made private: what changes is marked (private).

    python examples/private_loop.py [FOLDER]

The data stays yours, the model stays yours, the optimizer stays yours. Replaced are how
a batch is drawn, how its gradient is computed, and what is added to it.
"""

import math
import sys
import tempfile

import torch
from sklearn.datasets import load_digits

import sfumato

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
train, test = slice(0, 1437), slice(1437, None)

model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(16 * 36, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)

# (private) Public numbers; a ledger on disk, which any crash leaves whole; samples and noise that nobody else has.
mechanism = sfumato.Mechanism(num_examples=1437, batch_size=512, noise_multiplier=4.1, num_steps=60)
folder = sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp(prefix="private-loop-") + "/run"
state = {"model": model, "optimizer": optimizer}
loop = sfumato.PrivateLoop(folder, mechanism, clipping_norm=1.0, delta=1e-5, state=state)

# (private) Every image's gradient is clipped alone.
grad_fn = sfumato.clipped_grad(model, torch.nn.CrossEntropyLoss(reduction="none"), clipping_norm=1.0)
grad_fn.prepare(images[:1], labels[:1], batch_size=mechanism.batch_size)

# (private) The sampler that the accountant accounts for; a loop that was killed goes on by the same lines.
for update in loop:
    batch = update.indices
    # (private) For models with dropout: random numbers of each image's own.
    out = grad_fn(images[train][batch], labels[train][batch], key=update.key, example_ids=batch)
    # (private) Counted, then noised once; the constant expected batch is the divisor.
    update.apply(out, optimizer)

# (private) What the plan costs, rounded up; all of it stands in privacy.json.
spent = math.ceil(loop.certificate.epsilon * 1000) / 1000
accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
print(f"accuracy {accuracy:.3f} at epsilon {spent}, delta 1e-5: {folder}/privacy.json")
