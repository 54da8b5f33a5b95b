"""Low-rank updates of frozen weights (LoRA; Hu et al. 2022): W + alpha / r B A, of which A and B train."""

import copy
from collections import Counter

import torch
from torch import nn
from torch.nn import functional as F

from sfumato.errors import InputError

ALPHA = 8.0
"""Fixed, as in the paper: so another rank wants no other learning rate."""


class _LowRank(nn.Module):
    """A layer with a frozen weight W, and what is added to it: B A for weights as matrices, times `scale`.

    Two narrow products of each image beside the wide one: their per-example gradients are small, while those of W
    itself, as a function of A and B, would be as large as W.

    Attributes:
        lora_A: (r, inputs), random at first; (r, inputs, 1, 1) of a convolution.
        lora_B: (outputs, r), zeros at first, so that the layer computes what it did; (outputs, r, 1, 1) likewise.
        scale: alpha / r.
    """

    weight: torch.Tensor
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float

    def merged_weight(self) -> torch.Tensor:
        """W + scale B A, shaped like W."""
        added = self.lora_B.flatten(1) @ self.lora_A.flatten(1)
        return self.weight + self.scale * added.view_as(self.weight)


class _LowRankLinear(_LowRank, nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        low = F.linear(input, self.lora_A) * self.scale
        return F.linear(input, self.weight, self.bias) + F.linear(low, self.lora_B)


class _LowRankConv2d(_LowRank, nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        low = self._conv_forward(input, self.lora_A, None) * self.scale
        return self._conv_forward(input, self.weight, self.bias) + F.conv2d(low, self.lora_B)


_KINDS: dict[type[nn.Module], type[_LowRank]] = {nn.Linear: _LowRankLinear, nn.Conv2d: _LowRankConv2d}


def add_low_rank(model: nn.Module, rank: int, classifier: str, row: torch.Tensor, seed: int) -> list[str]:
    """Gives the linear layers and 1 x 1 convolutions of a network low-rank updates, in place; the network computes what
    it did.

    Left out are the classifier, which trains whole; weights that the network shares, holds fixed, or reads without
    calling their layer (those of `nn.MultiheadAttention`, for one); and layers of classes of their own.

    Args:
        model: The network, with the weights that are to be frozen.
        rank: r.
        classifier: Its final linear layer.
        row: (1, channels, height, width), for which it is called once.
        seed: Of A, normal with variance 1 / inputs.

    Returns:
        Names of the layers that have one.

    Raises:
        InputError: If none has.
    """
    uses = Counter(id(value) for module in model.modules() for value in module.parameters(recurse=False))
    called = _called(model, row)
    generator, changed = torch.Generator().manual_seed(seed), []
    for name, module in model.named_modules():
        weight = module.weight if type(module) in _KINDS else None
        if weight is None or weight.shape[2:].numel() > 1 or getattr(module, "groups", 1) > 1:
            continue
        if name == classifier or name not in called or uses[id(weight)] > 1 or not weight.requires_grad:
            continue
        (outputs, inputs), ones = weight.shape[:2], weight.shape[2:]
        drawn = torch.randn(rank, inputs, *ones, generator=generator, device="cpu") / inputs**0.5
        module.__class__ = _KINDS[type(module)]
        module.lora_A = nn.Parameter(drawn.to(weight))
        module.lora_B = nn.Parameter(weight.new_zeros(outputs, rank, *ones))
        module.scale = ALPHA / rank
        changed.append(name)
    if not changed:
        raise InputError(
            'model.trainable = "lora": this network calls no linear layer or 1 x 1 convolution beside its classifier, '
            "which is what low-rank updates are for. Take --set model.trainable=classifier, or norms."
        )
    if not row.is_meta:
        _refuse_other_when_merged(model, torch.randn(row.shape, generator=generator).to(row), generator)
    return changed


@torch.no_grad()
def _refuse_other_when_merged(model: nn.Module, row: torch.Tensor, generator: torch.Generator) -> None:
    """Refuses a network that reads a weight beside calling its layer: merged, it would compute something else than what
    was trained. Tried on a copy, with updates that are not zero.
    """
    probe = copy.deepcopy(model).eval()
    layers = [each for each in probe.modules() if isinstance(each, _LowRank)]
    for layer in layers:
        layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=generator) / layer.lora_B.shape[1] ** 0.5)
    beside = probe(row)
    for layer in layers:
        layer.weight.copy_(layer.merged_weight())
        layer.lora_B.zero_()
    merged = probe(row)
    if not torch.allclose(beside, merged, rtol=1e-2, atol=1e-2 * float(merged.abs().max())):
        raise InputError(
            'model.trainable = "lora": this network reads the weight of a layer beside calling it, so what is trained '
            "would not be what is published. Take --set model.trainable=classifier, or norms."
        )


@torch.no_grad()
def _called(model: nn.Module, row: torch.Tensor) -> set[str]:
    """Names of the layers that the network calls in evaluation mode."""
    probe, found = copy.deepcopy(model).eval(), set[str]()
    for name, module in probe.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: found.add(name))
    probe(row)
    for name, module in probe.named_modules():  # without hooks and gradients it reads its layers' weights
        if isinstance(module, nn.TransformerEncoderLayer):
            found = {each for each in found if not each.startswith(f"{name}.")}
    return found


@torch.no_grad()
def merged_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of the network that computes the same without low-rank updates: they are added to the weights."""
    state = model.state_dict()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _LowRank):
            state[f"{name}.weight"] = module.merged_weight()
            del state[f"{name}.lora_A"], state[f"{name}.lora_B"]
    return state
