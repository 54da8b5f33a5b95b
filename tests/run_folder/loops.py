"""Loops under one budget, for processes of their own: little is imported here."""

import random
import time

import torch

from sfumato.accounting.mechanism import Mechanism
from sfumato.clipping.protocol import ClippedGrad
from sfumato.errors import InputError
from sfumato.training.private_loop import PrivateLoop

DELTA = 1e-5
# Gaussian steps of all examples: their epsilon is a closed form, so that a run takes milliseconds.
WHOLE = Mechanism(4, 4, 60.0, 3)


def work(path, folder, number, seed):
    """Loops, one after another, until the budget refuses one; a loop that was killed is gone on with."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    for index in range(10_000):
        mechanism, model = WHOLE.replace(num_steps=1 + index % 3), torch.nn.Linear(1, 1)
        options = {"clipping_norm": 1.0, "delta": DELTA, "state": {"model": model}, "budget": path}
        place = folder / f"{number}-{index}"
        if (place / "done").exists():
            continue
        time.sleep(chance.uniform(0, 0.1))
        try:
            with PrivateLoop(place, mechanism, **options) as loop:
                for update in loop if chance.random() < 0.8 else ():  # the others release nothing
                    rows = torch.zeros(len(update.indices))
                    sums = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
                    update.release(ClippedGrad(sums, rows, rows, 1.0, 1.0))
        except InputError as error:
            assert " fits" in str(error)
            return
        (place / "done").touch()
