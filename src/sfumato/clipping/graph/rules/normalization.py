"""Scale and shift of group, layer, instance and RMS norm."""

from typing import Any

import torch
from torch.nn import functional as F

from sfumato.clipping.graph.rules.per_example import MaterializedGrads
from sfumato.clipping.graph.rules.site import GradSite, SiteRecord, call

# CUDA's backward pass of group norm counts the groups of one image by a grid's second dimension,
# which ends here.
_MAX_GROUPS = 65_535


def can_be_per_row(site: GradSite, args: dict[str, Any]) -> bool:
    """Whether `per_row` knows this call: group norm of rows that lie one after another."""
    if site.operation != "group_norm":
        return False
    layout = site.arg_layouts["input"]
    return layout.dim == 0 and layout.outer == 1 and args["input"].is_contiguous()


def per_row(site: GradSite, args: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Group norm with a scale and shift of its own for every row, at the price of group norm.

    The rows' groups are taken for groups of one large image, or of several where there are too
    many; what the kernel then adds up for each channel of that image is what belongs to one channel
    of one row.

    Returns:
        The output, and for each argument the (rows * channels,) leaf that stands for it.
    """
    rows, channels = args["input"].shape[:2]
    leaves: dict[str, torch.Tensor] = {}
    affine: list[torch.Tensor | None] = []
    for name in ("weight", "bias"):
        repeated = None if args[name] is None else args[name].detach().repeat(rows)
        if repeated is not None and name in site.weight_of:
            leaves[name] = repeated.requires_grad_()
        affine.append(repeated)

    def of_one_image(rows: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        one_image = rows.reshape(1, rows.shape[0] * channels, -1)
        return F.group_norm(one_image, rows.shape[0] * args["num_groups"], weight, bias, args["eps"]).view_as(rows)

    num_images = -(-rows // max(1, _MAX_GROUPS // args["num_groups"]))
    parts = args["input"].chunk(num_images)
    size = len(parts[0]) * channels
    of_parts = ([None] * len(parts) if value is None else value.split(size) for value in affine)
    outputs = [of_one_image(*part) for part in zip(parts, *of_parts, strict=True)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs), leaves


def has_statistics(site: GradSite, args: dict[str, Any]) -> bool:
    """Whether `with_statistics` knows this call: group norm in float32 at least; of bfloat16
    PyTorch rounds the statistics.
    """
    return (
        site.operation == "group_norm"
        and site.arg_layouts["input"].dim == 0
        and args["input"].dtype in (torch.float32, torch.float64)
    )


def with_statistics(args: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Group norm as it is, and its arguments with the mean and 1 / standard deviation of each row's
    groups, (rows, groups), for `affine`.
    """
    rows, channels = args["input"].shape[:2]
    channels_last = (
        args["input"].ndim == 4
        and not args["input"].is_cuda
        and args["input"].is_contiguous(memory_format=torch.channels_last)
    )
    inputs = args["input"].contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    positions = args["input"].shape[2:].numel()
    output, mean, rstd = torch.native_group_norm(
        inputs, args["weight"], args["bias"], rows, channels, positions, args["num_groups"], args["eps"]
    )
    return output, args | {"mean": mean.detach(), "rstd": rstd.detach()}


def affine(record: SiteRecord, argument: str) -> MaterializedGrads:
    """Scale: the output's gradient times the normalised input; shift: the gradient; summed over
    positions.
    """
    if "rstd" in record.args:
        return _of_group_norm(record, argument)
    product = record.example_grad()
    if argument == "weight":
        # Scaled by one: without a scale PyTorch takes twice as long on a CPU.
        plain = {"weight": torch.ones_like(record.args["weight"])} | ({"bias": None} if "bias" in record.args else {})
        normalized = call(record.site.node, record.args | plain)
        product = product * record.site.out_layout.by_example(normalized, record.examples, record.views)
    shape = record.args[argument].shape
    if record.site.operation in ("layer_norm", "rms_norm"):  # the last dimensions
        return MaterializedGrads(product.flatten(1, -1 - len(shape)).sum(dim=1))
    return MaterializedGrads(
        product.flatten(3).sum(dim=(1, 3)) if product.ndim > 3 else product.sum(dim=1)
    )  # (m, rows, C, *size)


def _of_group_norm(record: SiteRecord, argument: str) -> MaterializedGrads:
    """Sums of gradient times input come first: then no more than (rows, channels) values need
    normalising.
    """
    if argument == "bias":
        return MaterializedGrads(record.grad_by_channel.sum(1))
    inputs, grads = record.example_arg("input"), record.example_grad()  # (m, rows, C, *size)
    layout, channels = record.site.arg_layouts["input"], inputs.shape[2]
    mean, rstd = (
        layout.by_example(record.args[name], record.examples, record.views).repeat_interleave(
            channels // record.args["num_groups"], dim=2
        )
        for name in ("mean", "rstd")
    )  # (m, rows, C)
    products = grads * inputs
    if products.ndim > 3:
        products = products.flatten(3).sum(3)
    return MaterializedGrads(((products - mean * record.grad_by_channel) * rstd).sum(1))
