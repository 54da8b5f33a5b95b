"""Small networks: the default, fast on a CPU and good under noise at any image size, and two classics for 28x28."""

import itertools
import math

from torch import nn

from sfumato.errors import InputError
from sfumato.models.layers import Order, in_order, init_conv, init_linear

_GROUPS = 8
# The map is halved until it is no larger than this.
_LARGEST_LAST_MAP = 8


class SmallCNN(nn.Sequential):
    """A group-norm CNN whose depth follows the image size.

    Each stage is a 3x3 convolution, 2x2 max-pooling, ReLU and group norm: pooling first
    makes what follows four times cheaper. There are as many stages as bring the map to at
    most 8x8, but two at least, of which the first then does not pool; their channels are
    `width`, twice and then four times that. One linear layer reads the whole last map:
    averaging it costs accuracy under noise. 20,586 parameters for 28x28x1 and 10 classes.

    Args:
        num_classes: Outputs.
        image_size: Height and width of the images in pixels, at least 8.
        channels: Of the images.
        width: Channels of the first stage.
        order: "activation-norm" is ReLU, then norm, which private training prefers
            (Sander et al. 2022, Fig. 5); "norm-activation" the usual order.

    Shape:
        (rows, channels, image_size, image_size) -> (rows, num_classes)
    """

    def __init__(
        self,
        num_classes: int,
        image_size: int = 28,
        channels: int = 1,
        width: int = 16,
        order: Order = "activation-norm",
    ) -> None:
        if width < 1:
            raise InputError(f"small_cnn: width must be at least 1, not {width}.")
        num_pools, size = 1, image_size // 2
        while size > _LARGEST_LAST_MAP:
            num_pools, size = num_pools + 1, size // 2
        num_stages = max(2, num_pools)
        layers: list[nn.Module] = []
        previous = channels
        for stage in range(num_stages):
            widened = width * min(2**stage, 4)
            layers.append(init_conv(nn.Conv2d(previous, widened, 3, padding=1)))
            if stage >= num_stages - num_pools:
                layers.append(nn.MaxPool2d(2))
            layers += in_order(nn.ReLU(), nn.GroupNorm(math.gcd(_GROUPS, widened), widened), order)
            previous = widened
        super().__init__(*layers, nn.Flatten(), init_linear(nn.Linear(previous * size * size, num_classes)))


Convolution = tuple[int, int, int, int, int]
"""Channels in and out, kernel, stride, padding."""


def _layers(
    convolutions: list[Convolution], hidden: list[int], activation: type[nn.Module], size: int, pool_stride: int
) -> list[nn.Module]:
    """Convolutions, each with an activation and 2x2 max-pooling, then linear layers with activations in between."""
    layers: list[nn.Module] = []
    for fan_in, fan_out, kernel, stride, padding in convolutions:
        layers += [nn.Conv2d(fan_in, fan_out, kernel, stride, padding), activation(), nn.MaxPool2d(2, pool_stride)]
        size = ((size + 2 * padding - kernel) // stride - 1) // pool_stride + 1
    layers.append(nn.Flatten())
    for fan_in, fan_out in itertools.pairwise([convolutions[-1][1] * size * size, *hidden]):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    return layers[:-1]


class TanhCNN(nn.Sequential):
    """The CNN of Papernot et al. (2021), whose bounded activations suit clipping.

    Convolutions 16 of 8x8/2 and 32 of 4x4/2, each with tanh and 2x2 max-pooling of stride 1,
    then a hidden layer of 32. 26,010 parameters for 28x28x1 and 10 classes.

    Shape:
        (rows, channels, image_size, image_size) -> (rows, num_classes)
    """

    def __init__(self, num_classes: int, image_size: int = 28, channels: int = 1) -> None:
        convolutions = [(channels, 16, 8, 2, 3), (16, 32, 4, 2, 0)]
        super().__init__(*_layers(convolutions, [32, num_classes], nn.Tanh, image_size, 1))


class LeNet(nn.Sequential):
    """LeNet-5 (LeCun et al. 1998), as usual with ReLU, max-pooling and padding 2.

    61,706 parameters for 28x28x1 and 10 classes.

    Shape:
        (rows, channels, image_size, image_size) -> (rows, num_classes)
    """

    def __init__(self, num_classes: int, image_size: int = 28, channels: int = 1) -> None:
        convolutions = [(channels, 6, 5, 1, 2), (6, 16, 5, 1, 0)]
        super().__init__(*_layers(convolutions, [120, 84, num_classes], nn.ReLU, image_size, 2))
