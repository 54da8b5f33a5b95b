"""How long a plan will take here, from measured microbatches."""

import time
from collections.abc import Collection

import numpy as np
import torch

from sfumato.data.catalogue import Facts
from sfumato.data.examples import Dataset
from sfumato.data.images import ImageSet
from sfumato.planning.resolve import Plan
from sfumato.randomness import Streams
from sfumato.training.features import ROWS
from sfumato.training.learner import Learner, pick_device
from sfumato.training.step import draw


def expected_seconds(plan: Plan, facts: Facts, device: str = "auto", trust: Collection[str] = ()) -> float:
    """Seconds for all updates, measured on a microbatch of random images for each worker, and for
    the features of all training images, where they are computed once; evaluations aside.
    """
    learner = Learner(plan, _random_images(facts), pick_device(device), trust=trust)
    learner.initialise(np.zeros(1, dtype=np.uint64))
    size = min(learner.microbatch_size * learner.num_workers, facts.num_examples)
    mechanism, streams = plan.mechanism.replace(batch_size=size), Streams()
    sums, updates = [], []  # a sum takes as long as its batch is large, an update does not
    for step in (1, 2, 3):
        view, model = streams.stream("view"), streams.stream("model")
        randomness = draw(mechanism, np.arange(size) % 8, learner.views, view, model)
        start = time.perf_counter()
        grad_sum, _ = learner.collect(randomness, step)
        sums.append(time.perf_counter() - start)
        learner.state.update(learner.update.release(grad_sum, streams.stream("noise")), step, step)
        updates.append(time.perf_counter() - start - sums[-1])
    seconds = min(sums) / size * plan.mechanism.batch_size + min(updates)
    return _seconds_of_features(learner, facts.num_examples) + seconds * plan.mechanism.num_steps


@torch.inference_mode()
def _seconds_of_features(learner: Learner, num_images: int) -> float:
    """How long the features of so many images will take, from a batch of blank ones; 0 where none are computed."""
    network, times = learner.network, []
    if network.backbone is None:
        return 0.0
    for _ in range(2):
        start = time.perf_counter()
        network.backbone(network.blank(ROWS)).sum().item()
        times.append(time.perf_counter() - start)
    return min(times) / ROWS * num_images


def _random_images(facts: Facts) -> Dataset:
    shape = (8, facts.channels, facts.image_size, facts.image_size)
    images = ImageSet(
        stored=torch.randint(0, 256, shape, dtype=torch.uint8),
        labels=torch.arange(8) % facts.num_classes,
        readable=torch.ones(8, dtype=torch.bool),
        mean=(0.5,) * facts.channels,
        std=(0.5,) * facts.channels,
        groups=None if facts.num_people is None else list("01234567"),
    )
    return Dataset("random", tuple(map(str, range(facts.num_classes))), images, images, "test")
