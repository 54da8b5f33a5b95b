"""The weight gradient of a convolution for each example of a batch, written out."""

from sfumato.kernels.conv_weight_gradients.naive import conv_weight_gradients
from sfumato.kernels.conv_weight_gradients.patches import conv_weight_gradients_by_patches

__all__ = ["conv_weight_gradients", "conv_weight_gradients_by_patches"]
