"""Views of images for augmentation multiplicity (De et al. 2022, Section 3.1 and C.2; Sander et al.
2022, Section 4.2).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato.config import AugmentationKind
from sfumato.data.augmentation import transforms
from sfumato.data.images import on_device

_MAX_PIXELS = {"cpu": 2**18, "cuda": 2**22}
"""Of the views made at once: bounds memory, suits a CPU's caches and a GPU's width."""
_MASK = 2**32 - 1
_WEYL = 0x9E3779B9  # 2^32 / golden ratio, odd: consecutive counters land far apart
_JITTER = (0.8, 0.8, 0.8, 0.2)  # brightness, contrast, saturation, hue: SimCLR's at strength 1, which "tan" has too


def augment(
    images: Tensor,
    bits: Tensor,
    kind: AugmentationKind,
    padding: int = 4,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    *,
    size: int | None = None,
) -> Tensor:
    """K views of each image, as a pure function of random bits: (B, K, C, H, W), normalised like the images.

    Each view depends on its image and its own 32 bits alone: batches may be cut up, and views computed in any order.
    Flips are from left to right, with probability 1/2.

    ========= ========================================================================================================
    none      the image itself
    flip      flipped or not
    crop      uniform among all positions in the image with `padding` pixels of mirror padding on each edge (the edge
              pixel repeated: NumPy's "symmetric"); with `size`, uniform among the parts of that size
    crop_flip crop, then flip
    rrc       random resized crop: 8 to 100 % of the area, ratio of the sides 3/4 to 4/3, stretched to the original
              size; then flip ("RRC" of Sander et al. 2022)
    tan       crop with "reflect" padding (the edge pixel not repeated), flip, and with probability 0.3 colour
              jitter ("Ours" of Sander et al. 2022)
    simclr    rrc; colour jitter with probability 0.8, grayscale 0.2, Gaussian blur of standard deviation 0.1 to 2
              pixels 0.5 (Chen et al. 2020, Appendix A)
    ========= ========================================================================================================

    Args:
        images: (B, C, H, W), C = 1 or 3 where colours change.
        bits: (B, K), int64 with values uniform in [0, 2^32), on the CPU: no GPU need be asked what they choose.
        kind: See above.
        padding: Pixels on each edge, used by crop, crop_flip and tan (there below H and W).
        mean, std: Public constants of each channel, by which images in [0, 1] were normalised; None: they were not.
        size: Height and width of crops, at most H and W; None: those of the images, padded.
    """
    num_images, channels, height, width = images.shape
    num_views = bits.shape[1]
    if kind == "none":
        return images[:, None].expand(-1, num_views, -1, -1, -1)
    of_image, bits = torch.arange(num_images * num_views, device=images.device) // num_views, bits.flatten()
    normalised = torch.tensor([mean or [0.0], std or [1.0]], dtype=images.dtype)
    shift, scale = on_device(normalised[:, :, None, None], images.device)
    seen = (height, width) if size is None or kind not in ("crop", "crop_flip") else (size, size)
    views = images.new_empty(len(bits), channels, *seen)
    chunk = max(1, _MAX_PIXELS.get(images.device.type, 2**18) // (height * width))
    for start in range(0, len(bits), chunk):
        part = slice(start, start + chunk)
        pixels = images.index_select(0, of_image[part])
        if kind == "tan":
            views[part] = _tan(pixels, bits[part], padding, shift, scale)
        elif kind == "rrc":
            views[part] = _random_resized_crop(pixels, uniforms(bits[part], transforms.NUM_BOX_UNIFORMS + 1))
        elif kind == "simclr":
            views[part] = _simclr(pixels, bits[part], shift, scale)
        else:
            views[part] = _crop_and_flip(pixels, bits[part], kind, 0 if size or kind == "flip" else padding, seen)
    return views.view(num_images, num_views, channels, *seen)


def _crop_and_flip(pixels: Tensor, bits: Tensor, kind: AugmentationKind, padding: int, size: tuple[int, int]) -> Tensor:
    """Positions are uniform up to their number / 2^31: the lowest of 32 bits decides the flip, the others the place."""
    rows, columns = (own + 2 * padding - seen + 1 for own, seen in zip(pixels.shape[2:], size, strict=True))
    position = ((bits >> 1) * (rows * columns)) >> 31
    flip = torch.zeros_like(bits) if kind == "crop" else bits & 1
    places = torch.stack([position // columns - padding, position % columns - padding, flip])
    top, left, flip = on_device(places, pixels.device)
    return transforms.cropped(pixels, top, left, flip, size, repeats_edge=True)


def _tan(pixels: Tensor, bits: Tensor, padding: int, mean: Tensor, std: Tensor) -> Tensor:
    place, for_jitter = _numbers(bits, 4, transforms.NUM_JITTER_UNIFORMS)
    top, left = ((place[:, :2] * (2 * padding + 1)).long() - padding).unbind(1)
    top, left, flip = on_device(torch.stack([top, left, (place[:, 2] >= 0.5).long()]), pixels.device)
    size = (pixels.shape[2], pixels.shape[3])
    pixels = transforms.cropped(pixels, top, left, flip, size, repeats_edge=False)
    own, chosen = _chosen(place[:, 3], 0.3, pixels)
    pixels[chosen] = (transforms.jitter(pixels[chosen] * std + mean, for_jitter[own], _JITTER) - mean) / std
    return pixels


def _random_resized_crop(pixels: Tensor, numbers: Tensor) -> Tensor:
    boxes = torch.stack([*transforms.random_boxes(numbers[:, :-1], *pixels.shape[2:]), (numbers[:, -1] >= 0.5).float()])
    return transforms.resized_crop(pixels, *on_device(boxes, pixels.device))


def _simclr(pixels: Tensor, bits: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    for_crop, for_jitter, other = _numbers(bits, transforms.NUM_BOX_UNIFORMS + 1, transforms.NUM_JITTER_UNIFORMS, 4)
    pixels = _random_resized_crop(pixels, for_crop) * std + mean
    own, chosen = _chosen(other[:, 0], 0.8, pixels)
    pixels[chosen] = transforms.jitter(pixels[chosen], for_jitter[own], _JITTER)
    _, chosen = _chosen(other[:, 1], 0.2, pixels)
    pixels[chosen] = transforms.grey(pixels[chosen]).expand(-1, pixels.shape[1], -1, -1)
    radius = min(pixels.shape[2:]) // 20  # a kernel a tenth as wide as the image: 11 at 224 pixels, none below 20
    if radius:
        own, chosen = _chosen(other[:, 2], 0.5, pixels)
        sigma = on_device(0.1 + 1.9 * other[own, 3], pixels.device)
        pixels[chosen] = transforms.gaussian_blur(pixels[chosen], sigma, radius)
    return (pixels - mean) / std


def _numbers(bits: Tensor, *counts: int) -> Sequence[Tensor]:
    """So many uniforms of each view for each purpose."""
    return uniforms(bits, sum(counts)).split(counts, dim=1)


def _chosen(number: Tensor, probability: float, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Which views, for the CPU and for the pixels' device."""
    chosen = torch.nonzero(number < probability)[:, 0]
    return chosen, on_device(chosen, pixels.device)


def uniforms(bits: Tensor, count: int) -> Tensor:
    """A function of each view's bits alone: number i of a view is a hash of (bits, i).

    Args:
        bits: (V,), int64 with values in [0, 2^32).
        count: How many numbers each view needs.

    Returns:
        (V, count), float32: multiples of 2^-24 in [0, 1). For uniform bits each number is
        exactly uniform, since the hash is a permutation; together they are as independent
        as 2^32 different rows can be. No cryptographic strength: no privacy rests on views.
    """
    counters = torch.arange(count, device=bits.device) * _WEYL
    return (_permute((_permute(bits)[:, None] + counters) & _MASK) >> 8) * 2.0**-24


def _permute(words: Tensor) -> Tensor:
    """A permutation of [0, 2^32) in which each bit of the input moves each bit of the output half
    of the time.

    Two rounds of multiplication and xor-shift with the multipliers found by C. Wellons's search
    (`hash-prospector`, 2018); both are below 2^31, so that no product leaves int64.
    """
    words = words ^ (words >> 16)
    words = (words * 0x21F0AAAD) & _MASK
    words = words ^ (words >> 15)
    words = (words * 0x735A2D97) & _MASK
    return words ^ (words >> 15)
