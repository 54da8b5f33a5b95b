"""The same as `conv_weight_gradients`, of convolutions in two dimensions and one group, by matrix products."""

from sfumato.kernels.conv_weight_gradients_by_patches.naive import conv_weight_gradients_by_patches, windows

__all__ = ["conv_weight_gradients_by_patches", "windows"]
