"""A matrix product of output gradients and patches, for a few examples at a time."""

import torch
from torch.nn import functional as F

# So many values of patches are made at once on a CPU that they stay in its cache: 4 MiB in float32.
_AT_ONCE = 2**20


@torch.library.custom_op("sfumato::conv_weight_gradients_by_patches", mutates_args=())
def conv_weight_gradients_by_patches(
    inputs: torch.Tensor, grads: torch.Tensor, taps: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> torch.Tensor:
    """Sums over each example's rows, of a two-dimensional convolution in one group, not transposed.

    Args:
        inputs: (m, rows, C, H, W).
        grads: (m, rows, O, *output size): gradients with respect to the convolution's output.
        taps: The kernel's height and width.
        stride, padding, dilation: As in `aten.convolution`.

    Returns:
        (m, O, C, *taps), in the type of `grads`.
    """
    examples, _, channels = inputs.shape[:3]
    grads = grads.transpose(1, 2)
    gradients = grads.new_empty(examples, grads.shape[1], channels, *taps)
    at_once = examples
    if inputs.device.type == "cpu":
        at_once = max(1, _AT_ONCE // (channels * taps[0] * taps[1] * grads[0, 0].numel()))
    for own_inputs, own_grads, gradient in zip(inputs.split(at_once), grads.split(at_once), gradients.split(at_once), strict=True):
        seen = windows(own_inputs, taps, stride, padding, dilation)
        patches = seen.permute(0, 2, 5, 6, 1, 3, 4).flatten(4).flatten(1, 3)  # (n, C taps, rows positions)
        torch.bmm(own_grads.flatten(2), patches.transpose(1, 2), out=gradient.flatten(2))
    return gradients


@conv_weight_gradients_by_patches.register_fake
def _(inputs, grads, taps, stride, padding, dilation):
    return grads.new_empty(len(inputs), grads.shape[2], inputs.shape[2], *taps)


def windows(inputs: torch.Tensor, taps: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> torch.Tensor:
    """(m, rows, C, *output size, *taps): what the kernel sees at each position; a view of the images, padded where there is a border.

    Copied once, it makes patches sooner than `F.unfold` does.
    """
    (border_h, border_w), (step_h, step_w) = padding, stride
    size_h, size_w = ((number - 1) * step + 1 for number, step in zip(taps, dilation, strict=True))
    padded = F.pad(inputs, (border_w, border_w, border_h, border_h)) if border_h or border_w else inputs
    return padded.unfold(3, size_h, step_h).unfold(4, size_w, step_w)[..., :: dilation[0], :: dilation[1]]
