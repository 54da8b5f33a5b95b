r"""Weights that are functions of parameters: from gradients of the former to gradients of the
latter.

All examples share the Jacobian J of weights with respect to parameters, so that the clipped
sum needs one pull-back, :math:`\sum_i c_i J^\top g_i = J^\top \sum_i c_i g_i`. Only the norms
:math:`\|J^\top g_i\|` need every example's. Weight standardisation has them in closed form; it
is recognised by what J does, never by a module's name. Everything else is pulled back row by row.
"""

import dataclasses
import functools
from typing import NamedTuple

import torch

from sfumato.clipping.clip import global_norms, roundings, unit
from sfumato.clipping.graph.rules.site import Moments

# Largest relative deviation of J from the closed form, in float64.
_AGREEMENT = 1e-9
# How often the factors of the closed form were rounded, squares and all.
_ROUNDINGS = 16
_DIRECTIONS_SEED = 0


@dataclasses.dataclass(frozen=True)
class Group:
    """Weights that share parameters with each other and with no others.

    Attributes:
        weights: Their names.
        parameters: Names of the parameters that they are computed from.
        kind: "parameter": one weight, which is the parameter. "standardized": one weight, each
            output channel a centred and scaled copy of a parameter's, possibly times a gain.
            "general": anything else.
    """

    weights: tuple[str, ...]
    parameters: tuple[str, ...]
    kind: str


def group_weights(sources: dict[str, tuple[str, ...]]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Connected components of (weights, parameters), in order of their first weight."""
    groups: list[tuple[list[str], set[str]]] = []
    for weight, parameters in sources.items():
        joined = [group for group in reversed(groups) if group[1] & set(parameters)]
        groups = [group for group in groups if group not in joined]
        names = [name for group in joined for name in group[0]]
        groups.append(([*names, weight], set(parameters).union(*(group[1] for group in joined))))
    order = list(sources)
    groups.sort(key=lambda group: min(map(order.index, group[0])))
    return [(tuple(weights), tuple(sorted(parameters))) for weights, parameters in groups]


def pull_back(
    weights: list[torch.Tensor], parameters: list[torch.Tensor], gradients: list[torch.Tensor], batched: bool = False
) -> list[torch.Tensor]:
    """J' times gradients; with ``batched``, of each row of them."""
    pulled = torch.autograd.grad(
        weights, parameters, gradients, retain_graph=True, allow_unused=True, is_grads_batched=batched
    )
    rows = (len(gradients[0]),) if batched else ()
    return [
        parameter.new_zeros((*rows, *parameter.shape)) if gradient is None else gradient
        for gradient, parameter in zip(pulled, parameters, strict=True)
    ]


class Standardized(NamedTuple):
    r"""J of weight standardisation: for output channel o, with u the centred parameter over its
    length,

    .. math:: J_o^\top = s_o (I - \tfrac1n 1 1^\top - u u^\top) + \lambda_o u u^\top,
        \quad \text{gain}_k: \kappa_{ko} u^\top.

    Several weights are taken together, so that what there is one number of for each channel is
    computed once for all.

    Attributes:
        along: u of each weight, (channels, fan-in).
        scale: s, (channels of all,), and so the next three.
        scale_along: lambda.
        length: What `gains` are multiples of.
        fan_in: n.
        gains: For each weight, for each of its parameters but the main one, kappa times the length,
            (channels,).
        main: For each weight, which of its parameters has its shape.
    """

    along: list[torch.Tensor]
    scale: torch.Tensor
    scale_along: torch.Tensor
    length: torch.Tensor
    fan_in: torch.Tensor
    gains: list[list[torch.Tensor]]
    main: list[int]

    @property
    def channels(self) -> list[int]:
        """Of each weight."""
        return [len(part) for part in self.along]

    def pull_back(self, gradients: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """J' times one gradient of each weight, shaped like it: for each of its parameters, main
        ones (channels, fan-in) and others (channels,).
        """
        rows = [gradient.flatten(1) for gradient in gradients]
        along = _vecdots(rows, self.along)
        shares = (self.scale, along * (self.scale_along - self.scale), along / self.length)
        scales, added, lengths = (share.split(self.channels) for share in shares)
        pulled = []
        for i, part in enumerate(rows):
            across = (part - part.mean(1, keepdim=True)) * scales[i][:, None]
            own = [gain * lengths[i] for gain in self.gains[i]]
            own.insert(self.main[i], across.addcmul_(self.along[i], added[i][:, None]))
            pulled.append(own)
        return pulled

    def square_norms(self, moments: list[Moments]) -> tuple[torch.Tensor, torch.Tensor]:
        """(m,) squares of the norms of all J' g_i together, and bounds on their rounding errors."""
        squares, plain, along, of_squares, of_plain, of_along = (
            torch.cat(parts, 1) for parts in zip(*moments, strict=True)
        )
        known = self.scale.square(), self._factors(), self.fan_in  # (channels of all,) each
        scale, factor, fan_in = (values.to(squares.dtype) for values in known)
        across = (squares - plain.square() / fan_in - along.square()).clamp(min=0)
        total = across @ scale + along.square() @ factor
        of_squares = of_squares + (2 * plain.abs() + of_plain) * of_plain / fan_in
        error = of_squares @ scale + ((2 * along.abs() + of_along) * of_along) @ (scale + factor)
        # The form itself is known to its own precision, whatever that of the moments.
        share = unit(self.scale) * _ROUNDINGS + unit(squares) * roundings(len(scale))
        return total, error + share * (squares @ scale + along.square() @ factor)

    def _factors(self) -> torch.Tensor:
        """(channels of all,) the square of lambda, and of every gain's kappa, added up."""
        none = self.length.new_zeros(())
        squares = []
        for own, channels in zip(self.gains, self.channels, strict=True):
            squares.append(sum((gain.square() for gain in own), none.expand(channels)))
        return self.scale_along.square() + torch.cat(squares) / self.length.square()


def standardized(
    weights: list[torch.Tensor], parameters: list[list[torch.Tensor]]
) -> tuple[Standardized, torch.Tensor]:
    """Reads s, lambda and kappa off J itself, by one pull-back, which also shows whether J still
    has this form.

    Args:
        weights: Of one dtype.
        parameters: For each weight, those that it alone is computed from.

    Returns:
        The form, and (weights,), whether J has it.
    """
    main, rows, directions = [], [], []
    for weight, own in zip(weights, parameters, strict=True):
        main.append(next(i for i, parameter in enumerate(own) if parameter.shape == weight.shape))
        rows.append(own[main[-1]].detach().flatten(1))  # (channels, fan-in)
        centred = rows[-1] - rows[-1].mean(1, keepdim=True)
        centred -= centred.mean(1, keepdim=True)  # a mean that is large beside the rest leaves one behind
        length = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
        smallest = torch.finfo(length.dtype).tiny  # then the direction of a constant channel is zero
        directions.append(centred.div_(length.clamp_(min=smallest)))
    channels = [len(part) for part in rows]
    # One pull-back of z + c u, with z fixed, random, of mean zero, and c as large as z's length.
    fixed, square, fan_in = _directions(tuple(part.shape for part in rows), rows[0].dtype, rows[0].device)
    added = square.sqrt()
    gradients = [
        torch.addcmul(direction, along, size[:, None]).view_as(weight)
        for direction, along, size, weight in zip(fixed, directions, added.split(channels), weights, strict=True)
    ]
    pulled = iter(pull_back(weights, [parameter for own in parameters for parameter in own], gradients))
    of_each = [[next(pulled).flatten() for _ in own] for own in parameters]
    of_main = [own.pop(which).view_as(part) for own, which, part in zip(of_each, main, rows, strict=True)]
    part = _vecdots(fixed, directions)
    lengthwise = _vecdots(of_main, directions)  # lambda (u.z + c)
    across = square - part.square()
    scale = (_vecdots(of_main, fixed) - lengthwise * part) / across
    form = Standardized(directions, scale, lengthwise / (part + added), part + added, fan_in, of_each, main)
    # What J did besides that is perpendicular to it.
    expected = scale.square() * across + lengthwise.square()
    gap = (torch.cat([torch.linalg.vector_norm(own, dim=1) for own in of_main]).square() - expected).abs()
    # Channel by channel: one weight among many thousands that no longer follows would not show in a
    # sum.
    holds = gap <= torch.finfo(gap.dtype).eps ** 0.6 * expected
    return form, torch.stack([own.all() for own in holds.split(channels)])


def _vecdots(left: list[torch.Tensor], right: list[torch.Tensor]) -> torch.Tensor:
    """(channels of all,) inner products of rows."""
    return torch.cat([torch.linalg.vecdot(a, b) for a, b in zip(left, right, strict=True)])


@functools.cache
def _directions(
    shapes: tuple[torch.Size, ...], dtype: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Fixed random rows of mean zero for each weight; for each row of all, the square of its length
    and how long it is.
    """
    fixed = []
    for shape in shapes:
        rows = torch.randn(shape, generator=torch.Generator().manual_seed(_DIRECTIONS_SEED)).to(device, dtype)
        fixed.append(rows - rows.mean(1, keepdim=True))
    fan_in = torch.cat([torch.full((channels,), float(size)) for channels, size in shapes]).to(device, dtype)
    return fixed, _vecdots(fixed, fixed), fan_in


def is_standardized(weight: torch.Tensor, parameters: list[torch.Tensor]) -> bool:
    """Whether the closed form holds, tried on a random gradient. Tensors in float64."""
    if weight.ndim < 2 or weight[0].numel() < 3:
        return False
    others = [parameter for parameter in parameters if parameter.shape != weight.shape]
    if len(others) != len(parameters) - 1 or any(parameter.numel() != len(weight) for parameter in others):
        return False
    closed, _ = standardized([weight], [parameters])
    generator = torch.Generator().manual_seed(_DIRECTIONS_SEED + 1)
    gradient = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight)
    true = pull_back([weight], parameters, [gradient])
    (claimed,) = closed.pull_back([gradient])
    size = torch.stack([part.norm() for part in true]).norm()
    error = torch.stack([(a.flatten() - b.flatten()).norm() for a, b in zip(true, claimed, strict=True)]).norm()
    return bool(error <= _AGREEMENT * size)


def general_square_norms(
    weights: list[torch.Tensor], parameters: list[torch.Tensor], rows: list[torch.Tensor]
) -> torch.Tensor:
    """(m,) squares of norms after pulling every example's gradient back; rows are (m, *shape of a
    weight).
    """
    typed = [row.to(weight.dtype) for row, weight in zip(rows, weights, strict=True)]
    pulled = pull_back(weights, parameters, typed, batched=True)
    return global_norms(part.reshape(len(part), -1) for part in pulled).square()
