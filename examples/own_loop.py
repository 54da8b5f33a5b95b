"""Somebody's own training loop, made private: what changes is marked (private).

    python examples/own_loop.py [FOLDER]

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
folder = sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp(prefix="own-loop-")
loop = sfumato.OwnLoop(folder, mechanism, clipping_norm=1.0, delta=1e-5)


def loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


# (private) Every image's gradient is clipped alone.
grad_fn = sfumato.clipped_grad(model, loss, clipping_norm=1.0)
grad_fn.prepare(images[:1], labels[:1], batch_size=mechanism.batch_size)

for step in range(1, mechanism.num_steps + 1):
    # (private) The sampler that the accountant accounts for.
    batch = torch.from_numpy(loop.batch(step))
    # (private) For models with dropout: random numbers of each image's own.
    chance = {"key": loop.model_key(step), "example_ids": batch}
    grad_sum = grad_fn(images[train][batch], labels[train][batch], **chance).grad_sum
    # (private) Counted, and noised once; then the constant expected batch as the divisor.
    noisy = loop.release(step, grad_sum, sensitivity=grad_fn.sensitivity)
    for name, parameter in model.named_parameters():
        parameter.grad = noisy[name] / mechanism.batch_size
    optimizer.step()

# (private) What the steps above cost, rounded up; all of it stands in privacy.json.
spent = math.ceil(loop.finish().epsilon * 1000) / 1000
accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
print(f"accuracy {accuracy:.3f} at epsilon {spent}, delta 1e-5: {folder}/privacy.json")
