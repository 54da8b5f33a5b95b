"""Features of all images, computed once: what a frozen network gives its classifier."""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from sfumato.clipping.identity import identity_of_network
from sfumato.data import cache, store
from sfumato.data.features import FeatureSet
from sfumato.data.images import ImageSet, sha256_of_each
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


def features_of(
    backbone: Backbone, images: ImageSet, device: torch.device, report: Callable[[str], None]
) -> FeatureSet:
    """What the network makes of each image, in float32.

    Each row is a function of the weights and its own image: the network is in evaluation mode, and
    computes always as many rows. They are kept in a store in the user's cache folder, keyed by
    weights, network and images, which a process that is killed leaves to the next. They are as private as the
    images.

    Args:
        backbone: On the device.
        images: Their pixels; one that cannot be read gets zeros.
        device: Where the network computes.
        report: Takes lines about progress.

    Raises:
        InputError: If a feature is not finite, or the store was altered.
    """
    settings = {
        "weights": Weights(backbone.state_dict()).digest,
        "images": _digest(images),
        "network": identity_of_network(backbone),
        "device": device.type,
    }
    shape = tuple(backbone(torch.zeros(1, *images.shape, device=device)).shape[1:])
    folder = cache.own_folder(settings, "features") if len(images) >= _FEW else None
    if folder is None:
        values = np.zeros((len(images), *shape), np.float32)
        for part, found in _computed(backbone, images, np.arange(len(images)), device, report):
            values[part] = found
    else:
        try:
            values = _stored(folder, settings, backbone, images, shape, device, report)
        except OSError as error:
            raise InputError(
                f"features cannot be kept in {folder}: {error.strerror or error}. Free some space, or set "
                "XDG_CACHE_HOME to a folder on another disk."
            ) from None
    rows = torch.arange(len(images))
    return FeatureSet(torch.from_numpy(values), images.labels, images.readable, images.groups, rows)


def _stored(
    folder: Path,
    settings: dict[str, str],
    backbone: Backbone,
    images: ImageSet,
    shape: tuple[int, ...],
    device: torch.device,
    report: Callable[[str], None],
) -> np.ndarray:
    """The rows of a finished store, read into memory and compared with their digests."""
    with store.alone(folder, lambda: report(f"another process is filling {folder}: waiting for it")):
        found = store.read(folder, settings)
        if found is None:
            new = store.begin(folder, settings, len(images), shape, np.dtype(np.float32))
            for part, values in _computed(backbone, images, new.missing(), device, report):
                new.put(part, values, {})
            new.finish()
            found = store.read(folder, settings)
        else:
            report(f"read the features of {len(images)} images from the cache {folder}")
    if found is None:
        shutil.rmtree(folder, ignore_errors=True)
        raise InputError(f"{folder} does not hold what was written there. Run again.")
    values = np.array(found.values)
    if (sha256_of_each(values) != found.digests).any():
        raise InputError(f"features in {folder} are not what was computed: a file was altered. Delete that folder.")
    return values


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
    if not found.isfinite().all():
        wrong = int(indices[int((~found.isfinite()).any(1).nonzero()[0])])
        raise InputError(
            f"the network's features of image {wrong} are not finite. Its weights are not for images like these "
            "(data.mean, data.std), or are damaged."
        )
    return found


def _digest(images: ImageSet) -> str:
    digest = hashlib.sha256()
    for part in images.pixels():
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
