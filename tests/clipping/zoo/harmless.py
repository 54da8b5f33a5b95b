"""What must train: networks whose rows never meet, however they are written."""

import torch
from torch import nn
from torch.nn import functional as F

from sfumato.models.layers import WeightStandardizedConv2d
from tests.clipping.zoo.entry import Entry, TokenNet, net


class TokenPositions(nn.Module):
    """A code of the token's place, the same for all rows."""

    def __init__(self, trainable):
        super().__init__()
        code = torch.sin(torch.arange(4.0)[:, None] * torch.arange(1.0, 9))
        self.code = nn.Parameter(code) if trainable else None
        if not trainable:
            self.register_buffer("fixed", code)

    def forward(self, x):
        if self.code is None:
            return x + self.fixed[: x.shape[1]] + 0.1 * torch.arange(x.shape[1])[:, None]
        return x + self.code


class ClassToken(nn.Module):
    """A token expanded to the batch, and attention."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return self.attention(x, x, x, need_weights=False)[0][:, :1]


class Windows(nn.Module):
    """Windows of two by two folded into rows and back, as in Swin; with a code of the place within a window."""

    def __init__(self):
        super().__init__()
        self.layer, self.code = nn.Linear(6, 6), nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        rows, channels, height, width = x.shape
        windows = x.view(rows, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 3, 5, 1)
        windows = windows.reshape(-1, 4, channels)
        windows = (self.layer(windows) + self.code).tanh()
        windows = windows.view(-1, height // 2, width // 2, 2, 2, channels)
        return windows.permute(0, 5, 1, 3, 2, 4).reshape(rows, channels, height, width)


class FrozenNorm(nn.BatchNorm2d):
    """Batch norm of fixed statistics."""

    def train(self, mode=True):
        return super().train(False)


class LowRank(nn.Module):
    """A frozen layer, and a trainable product beside it whose second factor is zero."""

    def __init__(self):
        super().__init__()
        self.base = nn.Conv2d(6, 6, 1).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(6, 2))

    def forward(self, x):
        return F.conv2d(x, self.base.weight + (self.b @ self.a)[:, :, None, None], self.base.bias)


class Twice(nn.Module):
    """One layer used twice, its weight tied to another's, transposed."""

    def __init__(self):
        super().__init__()
        self.layer, self.back = nn.Linear(8, 8), nn.Linear(8, 8)
        self.back.weight = self.layer.weight

    def forward(self, x):
        x = self.layer(self.layer(x).tanh())
        return F.linear(self.back(x.tanh()), self.layer.weight.T)


class Levels(nn.Module):
    """An embedding of the pixels' levels."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 3)

    def forward(self, x):
        return x + self.table((x[:, 0].clamp(-1, 1) * 3.5 + 3.5).round().long()).movedim(-1, 1)


class Causal(nn.Module):
    """A mask of tokens made at the first call and kept."""

    mask = None

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


class Frozen(nn.Module):
    """A frozen trunk in evaluation mode, as in fine-tuning."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), FrozenNorm(6), nn.SiLU()).requires_grad_(False)

    def forward(self, x):
        return self.trunk(x)


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
    entry("token_positions_trained", "a trainable code along tokens", lambda: TokenNet(TokenPositions(True))),
    entry("class_token", "a class token and attention", lambda: TokenNet(ClassToken())),
    entry("windows", "windows folded into rows", lambda: net(Windows())),
    entry(
        "transformer_layer",
        "PyTorch's transformer layer",
        lambda: TokenNet(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)),
    ),
    entry("causal", "a mask kept after the first call", lambda: TokenNet(Causal())),
    entry("frozen_trunk", "a frozen trunk with fixed batch norm", lambda: net(Frozen())),
    entry(
        "zero_head",
        "a head of zeros",
        lambda: net(head=nn.Linear(96, 5).apply(lambda layer: [nn.init.zeros_(value) for value in layer.parameters()])),
    ),
    entry("low_rank", "low rank beside a frozen layer", lambda: net(LowRank())),
    entry("twice", "a layer used twice, its weight tied and transposed", lambda: TokenNet(Twice())),
    entry("levels", "an embedding of pixels' levels", lambda: net(first=Levels())),
    entry("relu_in_place", "an activation in place", lambda: net(nn.ReLU(inplace=True))),
    entry(
        "filled",
        "writes into an empty tensor: what nobody filled is no part of a proof",
        lambda: net(filled),
        graph=False,
    ),
    entry("flipped_image", "flips every image, and rolls it", lambda: net(lambda x: x.flip(-1) + x.roll(1, 2))),
    entry(
        "length_in_view",
        "a view by len(x)",
        lambda: net(lambda x: x.reshape(len(x), 6, 16).tanh().reshape(len(x), 6, 4, 4)),
        graph=False,
    ),
    entry("no_dropout", "dropout of nothing", lambda: net(nn.Dropout(0.0))),
]
