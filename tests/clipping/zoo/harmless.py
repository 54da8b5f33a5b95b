"""What must train: networks whose rows never meet, however they are written."""

import torch
from torch import nn
from torch.nn import functional as F

from sfumato.models.layers import WeightStandardizedConv2d
from tests.clipping.problems import Made
from tests.clipping.zoo.entry import Entry, TokenNet, net, zero_head


def class_token(self, x):
    """A token expanded to the batch, and attention."""
    x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
    return self.attention(x, x, x, need_weights=False)[0][:, :1]


def windows(self, x):
    """Windows of two by two folded into rows and back, as in Swin; with a code of the place within a window."""
    rows, channels, height, width = x.shape
    windows = x.view(rows, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 3, 5, 1)
    windows = (self.layer(windows.reshape(-1, 4, channels)) + self.code).tanh()
    windows = windows.view(-1, height // 2, width // 2, 2, 2, channels)
    return windows.permute(0, 5, 1, 3, 2, 4).reshape(rows, channels, height, width)


class FrozenNorm(nn.BatchNorm2d):
    """Batch norm of fixed statistics."""

    def train(self, mode=True):
        return super().train(False)


def low_rank():
    """A frozen layer, and a trainable product beside it whose second factor is zero."""
    return Made(
        lambda self, x: F.conv2d(x, self.base.weight + (self.b @ self.a)[:, :, None, None], self.base.bias),
        base=nn.Conv2d(6, 6, 1).requires_grad_(False),
        a=torch.randn(2, 6),
        b=torch.zeros(6, 2),
    )


class Twice(nn.Module):
    """One layer used twice, its weight tied to another's, transposed."""

    def __init__(self):
        super().__init__()
        self.layer, self.back = nn.Linear(8, 8), nn.Linear(8, 8)
        self.back.weight = self.layer.weight

    def forward(self, x):
        x = self.layer(self.layer(x).tanh())
        return F.linear(self.back(x.tanh()), self.layer.weight.T)


def levels(self, x):
    """An embedding of the pixels' levels."""
    return x + self.table((x[:, 0].clamp(-1, 1) * 3.5 + 3.5).round().long()).movedim(-1, 1)


def causal(self, x):
    """A mask of tokens made at the first call and kept."""
    if self.mask is None:
        self.mask = torch.ones(x.shape[1], x.shape[1]).tril().bool()
    q, k, v = self.qkv(x).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


def frozen_trunk():
    """In evaluation mode, as in fine-tuning."""
    return nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), FrozenNorm(6), nn.SiLU()).requires_grad_(False)


def token_positions():
    return Made(lambda self, x: x + self.code, code=torch.sin(torch.arange(4.0)[:, None] * torch.arange(1.0, 9)))


def filled(x):
    """Writes into a tensor made by the number of rows."""
    out = torch.empty_like(x)
    out[:, 1:], out[:, 0] = x[:, 1:], 0.5
    return out


def entry(name, says, factory, graph=True):
    return Entry(name, says, factory, harmless=True, graph=graph)


ENTRIES = [
    entry("plain", "a convolution and a linear layer", net),
    entry("group_norm", "group norm", lambda: net(nn.GroupNorm(2, 6))),
    entry("instance_norm", "instance norm with scale and shift", lambda: net(nn.InstanceNorm2d(6, affine=True))),
    entry("weight_standardized", "weight standardisation", lambda: net(WeightStandardizedConv2d(6, 6, 3, padding=1))),
    entry(
        "weight_norm",
        "weights of a direction and a length",
        lambda: net(nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 6, 1))),
    ),
    entry("token_positions_trained", "a trainable code along tokens", lambda: TokenNet(token_positions())),
    entry(
        "class_token",
        "a class token and attention",
        lambda: TokenNet(
            Made(class_token, token=torch.randn(1, 1, 8), attention=nn.MultiheadAttention(8, 2, batch_first=True))
        ),
    ),
    entry(
        "windows",
        "windows folded into rows",
        lambda: net(Made(windows, layer=nn.Linear(6, 6), code=torch.randn(4, 6))),
    ),
    entry(
        "transformer_layer",
        "PyTorch's transformer layer",
        lambda: TokenNet(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)),
    ),
    entry(
        "causal", "a mask kept after the first call", lambda: TokenNet(Made(causal, qkv=nn.Linear(8, 24), mask=None))
    ),
    entry("frozen_trunk", "a frozen trunk with fixed batch norm", lambda: net(frozen_trunk())),
    entry("zero_head", "a head of zeros", lambda: net(head=zero_head())),
    entry("low_rank", "low rank beside a frozen layer", lambda: net(low_rank())),
    entry("twice", "a layer used twice, its weight tied and transposed", lambda: TokenNet(Twice())),
    entry("levels", "an embedding of pixels' levels", lambda: net(first=Made(levels, table=nn.Embedding(8, 3)))),
    entry("relu_in_place", "an activation in place", lambda: net(nn.ReLU(inplace=True))),
    # What nobody filled is no part of a proof.
    entry("filled", "writes into an empty tensor", lambda: net(filled), graph=False),
    entry("flipped_image", "flips every image, and rolls it", lambda: net(lambda x: x.flip(-1) + x.roll(1, 2))),
    entry(
        "length_in_view",
        "a view by len(x)",
        lambda: net(lambda x: x.reshape(len(x), 6, 16).tanh().reshape(len(x), 6, 4, 4)),
        graph=False,
    ),
    entry("no_dropout", "dropout of nothing", lambda: net(nn.Dropout(0.0))),
]
