"""The default network: small, fast on a CPU, and good under noise at any image size."""

import math

from torch import nn

from sfumato.errors import InputError
from sfumato.nn import init_conv, init_linear

MIN_SIZE = 8

_GROUPS = 8
# Stages are added until the map is no larger than this.
_LARGEST_LAST_MAP = 8


class SmallCNN(nn.Sequential):
    """A group-norm CNN whose depth follows the image size.

    Each stage is a 3x3 convolution, 2x2 max-pooling (while the map is at least 8x8), ReLU
    and group norm in this order, which private training prefers (Sander et al. 2022,
    Fig. 5); pooling comes first because what follows is then four times cheaper. There are
    two stages or more, until the map is at most 8x8; their channels are `width`, twice and
    then four times that. One linear layer reads the whole last map: averaging it costs
    accuracy under noise. 20,586 parameters for 28x28x1 and 10 classes.

    Args:
        num_classes: Outputs.
        image_size: Height and width of the images in pixels, at least 8.
        channels: Of the images.
        width: Channels of the first stage.

    Shape:
        (rows, channels, image_size, image_size) -> (rows, num_classes)
    """

    def __init__(self, num_classes: int, image_size: int = 28, channels: int = 1, width: int = 16) -> None:
        if width < 1:
            raise InputError(f"small_cnn: width must be at least 1, not {width}.")
        layers: list[nn.Module] = []
        size, previous, stage = image_size, channels, 0
        while stage < 2 or size > _LARGEST_LAST_MAP:
            widened = width * min(2**stage, 4)
            layers.append(init_conv(nn.Conv2d(previous, widened, 3, padding=1)))
            if size >= MIN_SIZE:
                layers.append(nn.MaxPool2d(2))
                size //= 2
            layers += [nn.ReLU(), nn.GroupNorm(math.gcd(_GROUPS, widened), widened)]
            previous, stage = widened, stage + 1
        super().__init__(*layers, nn.Flatten(), init_linear(nn.Linear(previous * size * size, num_classes)))
