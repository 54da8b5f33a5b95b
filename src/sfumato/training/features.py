"""Features of all images, computed once: what a frozen network gives its classifier."""

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from sfumato.clipping.probe import made_up_images
from sfumato.data import store
from sfumato.data.examples import FeatureSet
from sfumato.data.images import ImageSet
from sfumato.errors import InputError
from sfumato.models.trainable import Backbone
from sfumato.models.weights import Weights

ROWS = 64
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
        InputError: If features of made-up images are not finite, or there is no room.
    """
    made_up = _made_up(backbone, images, device)
    settings = {
        "weights": Weights(backbone.state_dict()).digest,
        "images": _digest(images),
        "made up": hashlib.sha256(made_up.tobytes()).hexdigest(),  # no key tells all that code may compute
        "device": device.type,
    }
    folder = store.slot_of(settings, "features") if len(images) >= _FEW else None
    if folder is None:
        values = np.zeros((len(images), *made_up.shape[1:]), np.float32)
        for part, found in _computed(backbone, images, np.arange(len(images)), device, report):
            values[part] = found
    else:
        try:
            values = _stored(folder, settings, backbone, images, made_up, device, report)
        except OSError as error:
            raise InputError(
                f"features cannot be kept in {folder}: {error.strerror or error}. Free some space, or set "
                "XDG_CACHE_HOME to a folder on another disk."
            ) from None
    wrong = np.flatnonzero(~np.isfinite(values).all(1))
    if len(wrong):
        report(
            f"warning: the network's features of {len(wrong)} of {len(images)} images are not finite (the first is "
            f"number {wrong[0]}); they contribute nothing. This number is private."
        )
    return FeatureSet(torch.from_numpy(values), images.labels, images.readable, images.groups)


def _stored(
    slot: Path,
    settings: dict[str, str],
    backbone: Backbone,
    images: ImageSet,
    made_up: np.ndarray,
    device: torch.device,
    report: Callable[[str], None],
) -> np.ndarray:
    """The rows of a finished store, read into memory."""

    def fill(part: Path) -> None:
        rows = store.Filling(part, len(images), {"values": (made_up.shape[1:], np.dtype(np.float32))})
        missing = np.arange(rows.num_filled, len(images))
        for _, found in _computed(backbone, images, missing, device, report):
            rows.put(values=found)

    folder, was_there = store.made(slot, settings, fill, report)
    if was_there:
        report(f"read the features of {len(images)} images from the cache {folder}")
    return np.array(store.read(folder).columns["values"])


@torch.inference_mode()
def _computed(
    backbone: nn.Module, images: ImageSet, missing: np.ndarray, device: torch.device, report: Callable[[str], None]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Indices and their rows, part by part."""
    last = started = time.monotonic()
    if len(missing):
        report(f"computing the features of {len(missing)} images, once")
    for start in range(0, len(missing), _PART):
        part = missing[start : start + _PART]
        rows = [
            _rows(backbone, images, torch.from_numpy(part[at : at + ROWS]), device) for at in range(0, len(part), ROWS)
        ]
        yield part, torch.cat(rows).numpy()
        if time.monotonic() - last > _PROGRESS_SECONDS:
            last, done = time.monotonic(), start + len(part)
            rate = done / (last - started)
            left = (len(missing) - done) / rate
            report(f"features of {done} of {len(missing)} images, {rate:.0f} a second, {left:.0f} s left")


def _rows(backbone: nn.Module, images: ImageSet, indices: torch.Tensor, device: torch.device) -> torch.Tensor:
    readable = images.readable[indices]
    filled = torch.cat([indices, indices[:1].expand(ROWS - len(indices))])
    batch = images.batch(filled, device).contiguous(memory_format=torch.channels_last)
    found: torch.Tensor = backbone(batch)[: len(indices)].float().cpu()
    found[~readable] = 0
    return found


@torch.inference_mode()
def _made_up(backbone: nn.Module, images: ImageSet, device: torch.device) -> np.ndarray:
    """What the network makes of made-up images: (b, D), float32."""
    row = torch.zeros(1, *images.shape, device=device)
    found: torch.Tensor = backbone(made_up_images(_NUM_MADE_UP, 1, row, 0)[:, 0]).float().cpu()
    if not found.isfinite().any(1).any():
        raise InputError("the network gives no finite features on made-up images. Its weights are damaged.")
    return found.numpy()


def _digest(images: ImageSet) -> str:
    hashed = hashlib.sha256()
    for part in images.pixels():
        hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.hexdigest()
