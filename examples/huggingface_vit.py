"""A vision transformer of Hugging Face in a private loop of one's own.

    python examples/huggingface_vit.py [NAME [OUTPUT]]

NAME is a model of the hub or a folder that `save_pretrained` wrote; without one (or ""), a small network that nobody
trained.
"""

import math
import sys
import tempfile

import torch
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

import sfumato

# Yours: images as the model takes them, (N, channels, pixels, pixels).
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
labels = torch.tensor(digits.target)
train, test = slice(0, 1437), slice(1437, None)

name = sys.argv[1] if sys.argv[1:] else ""
if name:
    vit = ViTForImageClassification.from_pretrained(name, num_labels=10, ignore_mismatched_sizes=True)
    images = images.expand(-1, vit.config.num_channels, -1, -1)
    images = torch.nn.functional.interpolate(images, size=vit.config.image_size, mode="bilinear")
else:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.1,
    }
    vit = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=10, **sizes))


class Logits(torch.nn.Module):
    """What the loss takes, in the place of Hugging Face's dictionary."""

    def __init__(self, vit):
        super().__init__()
        self.vit = vit

    def forward(self, pixels):
        return self.vit(pixels).logits


model = Logits(vit)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
plan = sfumato.plan(1437, delta=1e-5, batch_size=512, num_steps=120, epsilon=8.0)
folder = sys.argv[2] if sys.argv[2:] else tempfile.mkdtemp(prefix="huggingface-vit-") + "/run"
state = {"model": model, "optimizer": optimizer}
loop = sfumato.PrivateLoop(folder, plan.mechanism, clipping_norm=1.0, delta=1e-5, state=state)
grad_fn = sfumato.clipped_grad(model, torch.nn.CrossEntropyLoss(reduction="none"), clipping_norm=1.0)
grad_fn.prepare(images[:1], labels[:1], batch_size=512)
for update in loop:
    batch = update.indices
    out = grad_fn(images[train][batch], labels[train][batch], key=update.key, example_ids=batch)
    update.apply(out, optimizer)

model.eval()
with torch.no_grad():
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
vit.save_pretrained(f"{folder}/model")  # any program of Hugging Face's reads it
spent = math.ceil(loop.certificate.epsilon * 1000) / 1000
print(f"accuracy {accuracy:.3f} at epsilon {spent}, delta 1e-5: {folder}/privacy.json")
