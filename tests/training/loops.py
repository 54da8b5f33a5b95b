"""What tests of own loops share."""

import torch

import sfumato
from sfumato.run_folder.record import LoopCertificate

MECHANISM = sfumato.Mechanism(num_examples=1000, batch_size=100, noise_multiplier=2.0, num_steps=12)
DELTA = 1e-5
ZEROS = {"weight": torch.zeros(100)}


def begin(folder, mechanism=MECHANISM, **changes):
    return sfumato.OwnLoop(folder, mechanism, **{"clipping_norm": 1.0, "delta": DELTA, **changes})


def release(loop, step, **sums):
    """Draws the sample of an update, and releases a sum."""
    loop.batch(step)
    return loop.release(step, sums or ZEROS, sensitivity=1.0)


def spent(num_steps):
    return sfumato.epsilon(MECHANISM.replace(num_steps=num_steps), DELTA).epsilon


def written(folder):
    return LoopCertificate.model_validate_json((folder / "privacy.json").read_text())
