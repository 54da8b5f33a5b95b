"""From a model to its sites and its groups of weights: what the engine needs to know before it sees
an image.
"""

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from sfumato.clipping.graph.export import Capture, capture, module_path
from sfumato.clipping.graph.parametrization import Group, group_weights, is_standardized
from sfumato.clipping.graph.rows import Layout
from sfumato.clipping.graph.rules import GradSite, named_args, refuse
from sfumato.clipping.probe import shifted
from sfumato.errors import InputError


@dataclasses.dataclass(frozen=True)
class Traced:
    """What tracing a model gives: nothing in it depends on parameter values or images."""

    capture: Capture
    sites: dict[Node, GradSite]
    groups: tuple[Group, ...]
    outputs: dict[Node, Layout]


def trace(model: nn.Module, row: torch.Tensor) -> Traced:
    """Traces a model and finds its sites.

    Args:
        row: (1, ...): an input, of which only shape, type and device are used.

    Raises:
        InputError: If the model cannot be traced, mixes examples, or has a site without a rule (it
            is named).
    """
    traced = capture(model, row)
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: shifted(value.detach(), generator) for name, value in model.named_parameters() if value.requires_grad
    }
    sites = {}
    for node, weights in traced.sites.items():
        arguments = named_args(node, node.args, dict(node.kwargs))
        names = {traced.weights[name]: name for name in weights}
        weight_of = {
            argument: names[value]
            for argument, value in arguments.items()
            if isinstance(value, Node) and value in names
        }
        arg_layouts = {
            argument: traced.rows.layout(value)
            for argument, value in arguments.items()
            if isinstance(value, Node) and traced.rows.holds(value)
        }
        if set(weight_of.values()) != set(weights):
            raise InputError(f"{node.target} takes trainable parameters in a way that there is no rule for")
        refuse(node, module_path(node))
        site = GradSite(node, weight_of, arg_layouts, traced.rows.layout(node))
        sites[node] = site
    groups = []
    for weights, sources in group_weights(traced.sources):
        groups.append(Group(weights, sources, _kind(traced, model, parameters, weights, sources)))
    return Traced(traced, sites, tuple(groups), {node: traced.rows.layout(node) for node in traced.outputs})


def _kind(
    traced: Capture,
    model: nn.Module,
    parameters: dict[str, torch.Tensor],
    weights: tuple[str, ...],
    sources: tuple[str, ...],
) -> str:
    if weights == sources and len(weights) == 1:
        return "parameter"
    _refuse_low_precision(traced, weights, sources[0])
    if len(weights) > 1:
        return "general"
    with torch.enable_grad():
        exact = {name: value.double().requires_grad_(name in sources) for name, value in parameters.items()}
        values = {node: _wide(value) for node, value in traced.state(model).items()} | {
            node: exact[name] for name, node in traced.parameters.items()
        }
        try:
            traced.shared.run(values)
        except RuntimeError:  # types that are written into the graph meet others
            return "general"
        weight = values[traced.weights[weights[0]]]
        if weight.dtype != torch.float64:
            return "general"
        return "standardized" if is_standardized(weight, [exact[name] for name in sources]) else "general"


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _refuse_low_precision(traced: Capture, weights: tuple[str, ...], source: str) -> None:
    """Refuses weights computed in less than float32: their norms would be those of gradients that
    the way back then rounds.
    """
    way = {traced.weights[name] for name in weights}
    for node in (*reversed(traced.shared.nodes), *traced.parameters.values()):
        if node not in way:
            continue
        way.update(node.all_input_nodes)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize < 4:
            raise InputError(
                f"a weight is computed from parameter '{source}' in {value.dtype}: the clipped sum would be rounded on "
                'the way back. Compute it in float32, with precision "bf16" if the rest shall be in bfloat16'
            )
