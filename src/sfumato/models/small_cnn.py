"""The default network: small, fast on a CPU, and good under noise at any image size."""

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
