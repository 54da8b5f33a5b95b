"""Somebody's own training loop, made private: what changes are the lines marked (private).

    python examples/own_loop.py

The data stays yours, the model stays yours, the optimizer stays yours. Replaced are how
a batch is drawn, how its gradient is computed, and what is added to it.
"""

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

mechanism = sfumato.Mechanism(
    num_examples=1437, batch_size=512, noise_multiplier=4.0, num_steps=60
)  # (private) public numbers
streams = sfumato.Streams(sfumato.new_key(), context={}, session={})  # (private) randomness nobody else has
grad_fn = sfumato.clipped_grad(
    model, lambda out, y: torch.nn.functional.cross_entropy(out, y, reduction="none"), clipping_norm=1.0
)  # (private)

for step in range(1, mechanism.num_steps + 1):
    batch = torch.from_numpy(
        sfumato.poisson_batch(mechanism, streams.stream("sampling", step))
    )  # (private) the sampler of the accountant
    chance = {
        "key": bytes(streams.stream("model", step).bytes(32)),
        "example_ids": batch,
    }  # (private) of dropout, if the model has some
    grad_sum = grad_fn(
        images[train][batch], labels[train][batch], **chance
    ).grad_sum  # (private) every image's gradient clipped alone
    noise = streams.stream("noise", step)
    noisy = sfumato.add_noise(
        grad_sum, mechanism.noise_multiplier * grad_fn.sensitivity, noise
    )  # (private) noise, once
    for name, parameter in model.named_parameters():
        parameter.grad = noisy[name] / mechanism.batch_size  # (private) divided by the constant expected batch
    optimizer.step()

spent = sfumato.epsilon(mechanism, delta=1e-4)  # (private) what the steps above cost
accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
print(f"accuracy {accuracy:.3f} at epsilon {spent.epsilon:.2f}, delta 1e-4")
