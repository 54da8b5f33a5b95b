"""Scale and shift of group, layer, instance and RMS norm."""

from typing import Any

import torch
from torch.nn import functional as F

from sfumato.clipping.graph.rules.site import GradSite, MaterializedGrads, SiteRecord, call, channel_sums

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
    inputs, groups, (rows, channels) = args["input"], args["num_groups"], args["input"].shape[:2]
    affine: dict[str, Any] = {
        name: None if args[name] is None else args[name].detach().repeat(rows) for name in ("weight", "bias")
    }
    leaves = {name: value.requires_grad_() for name, value in affine.items() if name in site.weight_of}
    num_images = -(-rows // max(1, _MAX_GROUPS // groups))
    parts = [(inputs, *affine.values())]
    if num_images > 1:  # else splitting would copy all of the gradient on its way back
        of_rows = inputs.chunk(num_images)
        size = len(of_rows[0]) * channels
        splits = ([None] * len(of_rows) if value is None else value.split(size) for value in affine.values())
        parts = list(zip(of_rows, *splits, strict=True))
    outputs = []
    for part, weight, bias in parts:
        one_image = part.reshape(1, len(part) * channels, -1)
        outputs.append(F.group_norm(one_image, len(part) * groups, weight, bias, args["eps"]).view_as(part))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs), leaves


def has_statistics(site: GradSite, args: dict[str, Any]) -> bool:
    """Whether `with_statistics` knows this call: group or layer norm in float32 at least; of
    bfloat16 PyTorch rounds the statistics.
    """
    return site.operation in ("group_norm", "layer_norm") and args["input"].dtype in (torch.float32, torch.float64)


def with_statistics(site: GradSite, args: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The norm as it is, and its arguments with mean and 1 / standard deviation, for `affine`: of each row's groups,
    (rows, groups), or of what a layer norm normalises, (rows, ..., 1).
    """
    if site.operation == "layer_norm":
        of_layer = (args[name] for name in ("input", "normalized_shape", "weight", "bias", "eps"))
        output, mean, rstd = torch.native_layer_norm(*of_layer)
        return output, args | {"mean": mean.detach(), "rstd": rstd.detach()}
    inputs, last = args["input"], torch.channels_last
    keeps_last = inputs.ndim == 4 and not inputs.is_cuda and inputs.is_contiguous(memory_format=last)
    inputs = inputs.contiguous(memory_format=last if keeps_last else torch.contiguous_format)
    sizes: Any = *inputs.shape[:2], inputs.shape[2:].numel(), args["num_groups"], args["eps"]
    output, mean, rstd = torch.native_group_norm(inputs, args["weight"], args["bias"], *sizes)
    return output, args | {"mean": mean.detach(), "rstd": rstd.detach()}


def affine(record: SiteRecord, argument: str) -> MaterializedGrads:
    """Scale: the output's gradient times the normalised input; shift: the gradient; summed over
    positions.
    """
    if "rstd" in record.args and record.site.operation == "group_norm":
        return _of_group_norm(record, argument)
    product = record.example_grad()
    if argument == "weight":
        if "rstd" in record.args:
            normalized = (record.args["input"] - record.args["mean"]) * record.args["rstd"]
        else:  # scaled by one: without a scale PyTorch takes twice as long on a CPU
            ones = {"weight": torch.ones_like(record.args["weight"])}
            normalized = call(record.site.node, record.args | ones | ({"bias": None} if "bias" in record.args else {}))
        product = product * record.site.out_layout.by_example(normalized, record.examples, record.views)
    shape = record.args[argument].shape
    if record.site.operation in ("layer_norm", "rms_norm"):  # the last dimensions
        return MaterializedGrads(product.flatten(1, -1 - len(shape)).sum(dim=1))
    return MaterializedGrads(channel_sums(product))


def _of_group_norm(record: SiteRecord, argument: str) -> MaterializedGrads:
    """Sums of gradient times input come first: then no more than (rows, channels) values need
    normalising.
    """
    if argument == "bias":
        return MaterializedGrads(record.grad_by_channel.sum(1))
    inputs, grads = record.example_arg("input"), record.example_grad()  # (m, rows, C, *size)
    layout, per_group = record.site.arg_layouts["input"], inputs.shape[2] // record.args["num_groups"]
    of_groups = (layout.by_example(record.args[name], record.examples, record.views) for name in ("mean", "rstd"))
    mean, rstd = (values.repeat_interleave(per_group, dim=2) for values in of_groups)  # (m, rows, C)
    products = grads * inputs
    if products.ndim > 3:
        products = products.flatten(3).sum(3)
    return MaterializedGrads(((products - mean * record.grad_by_channel) * rstd).sum(1))
