"""Features of all images, computed once: what a frozen network gives its classifier."""

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from sfumato.accounting import formats
from sfumato.clipping.probe import made_up_images
from sfumato.data import store
from sfumato.data.examples import FeatureSet, digest_of
from sfumato.data.images import ImageSet
from sfumato.errors import InputError
from sfumato.models.trainable import Backbone
from sfumato.models.weights import Weights
from sfumato.run_folder.files import machine_faults
from sfumato.torch_internals import QuickProducts

ROWS = {"cpu": 16, "cuda": 256}
"""Images that are computed at once; always so many, so that none decides how another is rounded."""
_PART = 1024
"""Images whose features are put on disk together."""
_FEW = 256
"""Features of fewer images are computed sooner than kept."""
_PROGRESS_SECONDS = 10.0
_NUM_MADE_UP = 8


def features_of(
    backbone: Backbone, images: ImageSet, device: torch.device, report: Callable[[str], None]
) -> FeatureSet:
    """What the network makes of each image, in float32.

    Each row is a function of the weights and its own image: the network is in evaluation mode, and
    computes always as many rows. They are kept in a store in the user's cache folder, keyed by
    weights, images and what the network makes of made-up images, which a process that is killed
    leaves to the next. They are as private as the images.

    An image whose features are not finite keeps them: it contributes nothing, as in every engine.

    Args:
        backbone: On the device.
        images: Their pixels; one that cannot be read gets zeros.
        device: Where the network computes.
        report: Takes lines about progress.

    Raises:
        InputError: If features of made-up images are not finite.
        MachineError: If there is no room.
    """
    made_up = _made_up(backbone, images, device)
    trained = {name for name, parameter in backbone.named_parameters() if parameter.requires_grad}  # the classifier's
    settings = {
        "weights": Weights({key: value for key, value in backbone.state_dict().items() if key not in trained}).digest,
        "images": digest_of(images.pixels()),
        "made up": hashlib.sha256(made_up.tobytes()).hexdigest(),  # no key tells all that code may compute
        "device": device.type,
    }

    def fill(part: Path) -> None:
        gigabytes = made_up[0].nbytes * len(images) / 1e9
        if gigabytes > 1:
            report(f"the features of {len(images)} images take {gigabytes:.1f} GB, on disk and in memory")
        rows = store.Filling(part, len(images), {"values": (made_up.shape[1:], np.dtype(np.float32))})
        for found in _computed(backbone, images, rows.num_filled, device, report):
            rows.put(values=found)

    slot = store.slot_of(settings, "features") if len(images) >= _FEW else None
    if slot is None:
        values = np.concatenate([made_up[:0], *_computed(backbone, images, 0, device, report)])
    else:
        with machine_faults(slot):
            folder, was_there = store.made(slot, settings, fill, report)
            values = np.array(store.read(folder).columns["values"])
        if was_there:
            report(f"read the features of {len(images)} images from the cache {folder}")
    wrong = np.flatnonzero(~np.isfinite(values).all(1))
    if len(wrong):
        report(
            f"warning: the network's features of {len(wrong)} of {len(images)} images are not finite (the first is "
            f"number {wrong[0]}); they contribute nothing. {store.FOR_OWNER}"
        )
    return FeatureSet(torch.from_numpy(values), images.labels, images.readable, images.groups)


@torch.inference_mode()
def _computed(
    backbone: nn.Module, images: ImageSet, first: int, device: torch.device, report: Callable[[str], None]
) -> Iterator[np.ndarray]:
    """The rows of all images from the first on, part by part."""
    count, last = len(images), time.monotonic()
    started = last
    if first < count:
        report(f"computing the features of {count - first} images, once")
    for start in range(first, count, _PART):
        part = torch.arange(start, min(start + _PART, count))
        yield torch.cat([_rows(backbone, images, indices, device) for indices in part.split(ROWS[device.type])]).numpy()
        done = start + len(part)
        if time.monotonic() - last > _PROGRESS_SECONDS:
            last = time.monotonic()
            report(formats.progress("features of images", done - first, count - first, last - started))


def _rows(backbone: nn.Module, images: ImageSet, indices: torch.Tensor, device: torch.device) -> torch.Tensor:
    readable = images.readable[indices]
    filled = torch.cat([indices, indices[:1].expand(ROWS[device.type] - len(indices))])
    batch = images.batch(filled, device).contiguous(memory_format=torch.channels_last)
    with QuickProducts():
        found: torch.Tensor = backbone(batch)[: len(indices)].float().cpu()
    found[~readable] = 0
    return found


@torch.inference_mode()
def _made_up(backbone: nn.Module, images: ImageSet, device: torch.device) -> np.ndarray:
    """What the network makes of made-up images: (b, D), float32."""
    row = torch.zeros(1, *images.shape, device=device)
    with QuickProducts():
        found: torch.Tensor = backbone(made_up_images(_NUM_MADE_UP, 1, row, 0)[:, 0]).float().cpu()
    if not found.isfinite().any(1).any():
        raise InputError("the network gives no finite features on made-up images. Its weights are damaged.")
    return found.numpy()
