"""Replaces batch normalisation by group normalisation, weights kept."""

import copy

import torch
from torch import nn

from sfumato.errors import InputError

MAX_GROUPS = 16


def fix_groupnorm(model: nn.Module) -> nn.Module:
    """Replaces every batch normalisation of a model by group normalisation, in place.

    The affine weights and biases, eps, dtype, device and which of them are frozen are kept;
    running statistics are dropped. A subclass that also applies an activation or dropout
    (timm's BatchNormAct2d) becomes the group norm followed by those submodules. A layer used
    in two places stays one layer. The number of groups is the largest up to 16 that divides
    the channels (De et al. 2022 use 16) and leaves at least two to each, since a group of one
    value, as one channel of a 1x1 map is, would be normalised to a constant.

    Raises:
        InputError: If a subclass does more than its submodules say, or has no shape yet.

    Returns:
        The model; a new module only where the model itself is a batch normalisation.

    Example:
        >>> fixed = fix_groupnorm(nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24)))
        >>> type(fixed[1]).__name__, fixed[1].num_groups
        ('GroupNorm', 12)
    """
    replaced: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module) -> nn.Module:
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if module not in replaced:
                replaced[module] = _as_group_norm(module)
            return replaced[module]
        for name, child in list(module._modules.items()):  # not named_children, which skips a layer's second place
            if child is not None:
                module._modules[name] = visit(child)
        return module

    return visit(model)


def _as_group_norm(norm: nn.modules.batchnorm._BatchNorm) -> nn.Module:
    if any(nn.parameter.is_lazy(value) for value in (*norm.parameters(), *norm.buffers())):
        name = type(norm).__name__
        known = name.removeprefix("Lazy")
        raise InputError(f"{name} has no shape yet, so it cannot be replaced. Use {known} with its number of channels.")
    followers = [child for child in norm.children() if not isinstance(child, nn.Identity)]
    if not _only_follows(norm, followers):
        raise InputError(
            f"{type(norm).__name__} does more than normalise, which would be lost. Write it as a batch normalisation "
            "and what follows it, or set another network."
        )
    channels = norm.num_features
    limit = max(1, min(MAX_GROUPS, channels // 2))
    groups = max(count for count in range(1, limit + 1) if channels % count == 0)
    group_norm = nn.GroupNorm(groups, channels, eps=norm.eps, affine=norm.affine)
    group_norm.train(norm.training)
    if norm.affine:
        for new, old in ((group_norm.weight, norm.weight), (group_norm.bias, norm.bias)):
            new.data = torch.clone(old.detach())
            new.requires_grad_(old.requires_grad)
    return nn.Sequential(group_norm, *followers) if followers else group_norm


def _only_follows(norm: nn.modules.batchnorm._BatchNorm, followers: list[nn.Module]) -> bool:
    """Whether, in evaluation mode, a subclass is the normalisation and then its submodules."""
    own = (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)
    if type(norm).forward in own:
        return not followers
    trial = copy.deepcopy(norm).eval()
    dims = 0 if isinstance(norm, nn.BatchNorm1d) else 3 if isinstance(norm, nn.BatchNorm3d) else 2
    values = torch.randn(2, norm.num_features, *[4] * dims, generator=torch.Generator().manual_seed(0))
    values = 3 * values.to(next(norm.parameters(), next(norm.buffers(), values)))
    with torch.no_grad():
        expected = nn.modules.batchnorm._BatchNorm.forward(trial, values)
        for follower in (child for child in trial.children() if not isinstance(child, nn.Identity)):
            expected = follower(expected)
        return bool(torch.allclose(trial(values), expected, atol=1e-5))
