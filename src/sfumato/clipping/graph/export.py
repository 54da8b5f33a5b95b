"""A model as a list of operations, and where its trainable parameters meet its images.

Every value of the model's graph is *shared* (computed from parameters and constants alone,
the same for all examples) or *data* (touched by the batch). An operation on data that takes
a shared value with a trainable parameter in it is a *site*: only there does a per-example
gradient arise. The trainable shared values that sites take are the *weights*; each is a
parameter, or derived from parameters by functions that all examples share.
"""

import contextlib
import dataclasses
import functools
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node
from torch.fx.node import map_arg

from sfumato.clipping.graph.parametrization import Group, group_weights, is_standardized
from sfumato.clipping.graph.rows import Layout, Rows, draws, module_path
from sfumato.clipping.graph.rules import refuse
from sfumato.clipping.graph.rules.site import GradSite, named_args
from sfumato.clipping.probe import shifted
from sfumato.errors import InputError, first_line
from sfumato.torch_internals import HigherOrderOperator, OpOverload, quick_group_norm, tree_unflatten

# Rows that the graph is traced with; any number but one stands for "any number".
_TRACED_ROWS = 6
_RECURRENT = tuple(f"{kind}{cell}" for kind in ("rnn_tanh", "rnn_relu", "gru", "lstm") for cell in ("", "_cell"))
# Operations that only check something, or that do nothing.
_ASSERTIONS = ("_assert_scalar", "_assert_tensor_metadata", "_assert_async", "sym_constrain_range")


@dataclasses.dataclass(frozen=True)
class Traced:
    """A model's operations in order, sorted by what touches them. Nothing in it depends on values of parameters or
    images.

    Attributes:
        input: Stands for the rows.
        shared: Operations on shared values alone.
        data: Operations that the batch touches, in order.
        sites: Those of `data` that take a weight.
        weights: Name -> the trainable shared values that sites take.
        sources: A weight's name -> the trainable parameters that it is computed from.
        groups: Of weights, see `Group`.
        outputs: The operations whose results the model returns, and where rows lie in these.
    """

    input: Node
    shared: tuple[Node, ...]
    data: tuple[Node, ...]
    sites: dict[Node, GradSite]
    weights: dict[str, Node]
    sources: dict[str, tuple[str, ...]]
    groups: tuple[Group, ...]
    outputs: dict[Node, Layout]
    _placeholders: dict[Node, tuple[str, str]]
    _constants: Mapping[str, Any]
    _results: tuple[Any, ...]
    _out_spec: Any

    @functools.cached_property
    def parameters(self) -> dict[str, Node]:
        """The trainable parameters' names -> what stands for them."""
        return {name: node for node, (kind, name) in self._placeholders.items() if kind == "parameter"}

    @functools.cached_property
    def used(self) -> set[Node]:
        """What operations on the batch take, or the model returns."""
        taken = {other for node in self.data for other in node.all_input_nodes}
        return taken | {*self.outputs, *self.weights.values()}

    @functools.cached_property
    def random(self) -> set[Node]:
        """Those of `data` that draw random numbers."""
        return set(filter(draws, self.data))

    @functools.cached_property
    def last_uses(self) -> dict[Node, list[Node]]:
        """Each operation on data, and the inputs that no later one takes."""
        last = {other: node for node in self.data for other in node.all_input_nodes}
        return {node: [other for other in node.all_input_nodes if last[other] is node] for node in self.data}

    def state(self, model: nn.Module) -> dict[Node, Any]:
        """What the graph is given besides the images: parameters, buffers, constants, none of them
        to be differentiated.

        A model that computes in double precision for a while finds its float32 constants as wide.
        """
        tensors = dict(model.named_parameters(remove_duplicate=False))
        tensors |= dict(model.named_buffers(remove_duplicate=False))  # type: ignore[arg-type]
        wide = torch.float64 in {tensor.dtype for tensor in tensors.values()}
        values = {}
        for node, (kind, name) in self._placeholders.items():
            value: Any = self._constants[name] if kind == "constant" else tensors[name]
            if isinstance(value, torch.Tensor):
                is_narrow = wide and kind == "constant" and value.dtype == torch.float32
                value = value.double() if is_narrow else value.detach()
            values[node] = value
        return values

    def compute_shared(self, values: dict[Node, Any]) -> None:
        """Adds to what the graph is given all that no image touches."""
        for node in self.shared:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]

    def output(self, values: Mapping[Node, Any]) -> Any:
        """The model's output, in the structure that the model gives it."""
        return tree_unflatten(map_arg(self._results, values.__getitem__), self._out_spec)


def trace(model: nn.Module, row: torch.Tensor) -> Traced:
    """Traces a model in its present mode, and finds its sites.

    Args:
        model: Takes one tensor of rows.
        row: (1, ...): one input, of which only shape, type and device are used.

    Raises:
        InputError: If the model cannot be traced for any number of rows, or has an operation that may join rows; if a
            trainable parameter reaches no operation on the images, or a site gives what no per-example gradient is
            known of (it is named).
    """
    program = _export(model, torch.zeros(_TRACED_ROWS, *row.shape[1:], dtype=row.dtype, device=row.device))
    program.graph.eliminate_dead_code()  # what nothing takes may count rows
    images, placeholders = _inputs(program, model)
    parameters_of = {
        node: frozenset([name] if kind == "parameter" else []) for node, (kind, name) in placeholders.items()
    }
    rows, touched = Rows(images), {images}  # by the batch
    shared, data, meetings = [], [], []
    names: dict[Node, str] = {}  # of weights
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output") or any(name in str(node.target) for name in _ASSERTIONS):
            continue
        where = f"{node.target} in '{module_path(node) or 'the model'}'"
        _rewrite(node, where)
        inputs = node.all_input_nodes
        if touched.isdisjoint(inputs):
            if draws(node):
                raise InputError(f"{where} draws random numbers for all rows together.")
            parameters_of[node] = frozenset().union(*(parameters_of[other] for other in inputs))
            shared.append(node)
            continue
        reason = rows.misuse(node)
        if reason is not None:
            raise InputError(f"{where} {reason}: what a row gives could depend on the others.")
        taken = {other: _weight_name(other, placeholders) for other in inputs if parameters_of.get(other)}
        touched.add(node)
        data.append(node)
        names |= taken
        if taken:
            meetings.append(node)
    weights = {name: node for node, name in names.items()}
    sources = {name: tuple(sorted(parameters_of[node])) for name, node in weights.items()}
    results = tuple(program.graph.output_node().args[0])
    trained = [name for kind, name in placeholders.values() if kind == "parameter"]
    _refuse_unused(trained, set().union(*sources.values()), results, touched)
    sites = {node: _site(node, rows, names) for node in meetings}
    outputs = {node: rows.layout(node) for node in results if isinstance(node, Node)}
    own = placeholders, program.constants, results, program.call_spec.out_spec
    plain = Traced(images, tuple(shared), tuple(data), sites, weights, sources, (), outputs, *own)
    return dataclasses.replace(plain, groups=tuple(_grouped(plain, model)))


def _inputs(program: Any, model: nn.Module) -> tuple[Node, dict[Node, tuple[str, str]]]:
    """What stands for the images, and of each other input its kind and name."""
    trainable = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    named = dict(model.named_parameters(remove_duplicate=False))
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs):
        raise InputError("the model changes its own buffers or parameters in a forward pass.")
    kinds = {InputKind.USER_INPUT: "rows", InputKind.PARAMETER: "frozen"}
    kinds |= {InputKind.BUFFER: "buffer", InputKind.CONSTANT_TENSOR: "constant"}
    nodes = {node.name: node for node in program.graph.nodes}
    found: dict[Node, tuple[str, str]] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind not in kinds:
            raise InputError(f"the model's graph has an input of kind {spec.kind.name}.")
        own = trainable.get(id(named.get(spec.target)))
        found[nodes[spec.arg.name]] = ("parameter", own) if own else (kinds[spec.kind], spec.target)
    images = [node for node, (kind, _) in found.items() if kind == "rows"]
    if len(images) != 1:
        raise InputError(f"the model takes {len(images)} inputs, not one tensor of rows.")
    del found[images[0]]
    return images[0], found


def _rewrite(node: Node, where: str) -> None:
    """Puts others in the place of operations that hold for one memory format alone, or have no derivative."""
    if node.op != "call_function":
        raise InputError(f"{where} is not one operation.")
    if node.target is torch.ops.aten.view.default:
        node.target = torch.ops.aten.reshape.default  # the same for any memory format
    if node.target is torch.ops.aten.type_as.default:  # of its second argument it takes the type alone
        own, other = (each.meta["val"] for each in node.args)  # type: ignore[union-attr]
        if own.device == other.device:
            node.target, node.args = torch.ops.aten.to.dtype, (node.args[0], other.dtype)
    if node.target is torch.ops.aten.copy.default:  # left by an assignment to a slice; it has no derivative
        into, source = (other.meta["val"] for other in node.args[:2])  # type: ignore[union-attr]
        if into.dtype != source.dtype or into.device != source.device or tuple(into.shape) != tuple(source.shape):
            raise InputError(f"{where} assigns to a part of a tensor, with another type or shape.")
        node.target, node.args, node.kwargs = torch.ops.aten.clone.default, (node.args[1],), {}


def _site(node: Node, rows: Rows, names: dict[Node, str]) -> GradSite:
    """An operation on data that takes weights of these names."""
    arguments = named_args(node, node.args, dict(node.kwargs))
    nodes = {argument: value for argument, value in arguments.items() if isinstance(value, Node)}
    weight_of = {argument: names[value] for argument, value in nodes.items() if value in names}
    if set(weight_of.values()) != {names[other] for other in node.all_input_nodes if other in names}:
        raise InputError(f"{node.target} takes trainable parameters in a way that there is no rule for")
    refuse(node)
    arg_layouts = {argument: rows.layout(value) for argument, value in nodes.items() if rows.holds(value)}
    return GradSite(node, weight_of, arg_layouts, rows.layout(node))


def _refuse_unused(trained: list[str], reached: set[str], results: tuple[Any, ...], touched: set[Node]) -> None:
    """Refuses parameters that reach no image, and outputs that belong to no row."""
    for name in trained:
        if name not in reached:
            raise InputError(
                f"parameter '{name}' reaches no operation on the images, so it would never be trained. Freeze it by "
                "requires_grad_(False), or use it."
            )
    for value in results:
        if isinstance(value, Node) and not (value in touched and isinstance(value.meta["val"], torch.Tensor)):
            raise InputError("the model returns, besides what belongs to rows, a value of all rows.")


def _weight_name(node: Node, placeholders: dict[Node, tuple[str, str]]) -> str:
    """A parameter's own name; for a derived weight, its operation's name, which no parameter has."""
    return placeholders[node][1] if node in placeholders else f"{module_path(node)}:{node.name}"


def _grouped(traced: Traced, model: nn.Module) -> Iterator[Group]:
    """Groups of weights, and how each follows from its parameters: tried in float64, at other values of parameters."""
    generator = torch.Generator().manual_seed(0)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    parameters = {name: shifted(value.detach(), generator) for name, value in trained.items()}
    for weights, sources in group_weights(traced.sources):
        if weights == sources and len(weights) == 1:
            yield Group(weights, sources, "parameter")
            continue
        _refuse_low_precision(traced, weights, sources[0])
        is_closed = len(weights) == 1 and _is_standardized(traced, model, parameters, weights[0])
        yield Group(weights, sources, "standardized" if is_closed else "general")


def _is_standardized(traced: Traced, model: nn.Module, parameters: dict[str, torch.Tensor], weight: str) -> bool:
    sources = traced.sources[weight]
    with torch.enable_grad():
        exact = {name: value.double().requires_grad_(name in sources) for name, value in parameters.items()}
        values = {node: _wide(value) for node, value in traced.state(model).items()}
        values |= {node: exact[name] for name, node in traced.parameters.items()}
        try:
            traced.compute_shared(values)
        except RuntimeError:  # types that are written into the graph meet others
            return False
        value = values[traced.weights[weight]]
        return value.dtype == torch.float64 and is_standardized(value, [exact[name] for name in sources])


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _refuse_low_precision(traced: Traced, weights: Sequence[str], source: str) -> None:
    """Refuses weights computed in less than float32: their norms would be those of gradients that
    the way back then rounds.
    """
    way = {traced.weights[name] for name in weights}
    for node in (*reversed(traced.shared), *traced.parameters.values()):
        if node not in way:
            continue
        way.update(node.all_input_nodes)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize < 4:
            raise InputError(
                f"a weight is computed from parameter '{source}' in {value.dtype}: the clipped sum would be rounded on "
                'the way back. Compute it in float32, with precision "bf16" if the rest shall be in bfloat16'
            )


def _export(model: nn.Module, rows: torch.Tensor) -> Any:
    shapes: Any = ({0: torch.export.Dim("rows", min=2)},)
    try:
        first = next(iter(inspect.signature(model.forward).parameters.values()))
        if first.kind is inspect.Parameter.VAR_POSITIONAL:  # as of what wraps a model
            shapes = (shapes,)
        with _quiet(), torch.enable_grad():
            with quick_group_norm():
                program = torch.export.export(model, (rows,), dynamic_shapes=shapes, strict=False)
            rules = _rules_of_recurrent(program)
            return program.run_decompositions(rules) if rules or _writes(program) else program
    except RuntimeError as error:  # the exporter's own; what else the model's code raises goes on to `Prepared`
        reason = first_line(error)
        if reason.startswith("Constraints violated"):  # what follows speaks to who debugs the exporter
            reason = (
                "its code fixes how many rows there are. len(images) does that: write images.shape[0]; so does code "
                "that takes other paths for other numbers of images"
            )
        raise InputError(f"the model cannot be traced for any number of images: {reason}") from error


def _rules_of_recurrent(program: Any) -> dict[Any, Any]:
    """How PyTorch takes recurrent layers, which are one operation for all their steps, apart into
    products and sums.
    """
    targets = {node.target for node in program.graph.nodes if isinstance(node.target, OpOverload)}
    recurrent = [target for target in targets if target.overloadpacket.__name__ in _RECURRENT]
    rules = torch.export.default_decompositions() if recurrent else {}
    return {target: rules[target] for target in recurrent}


def _writes(program: Any) -> bool:
    """Whether an operation writes to a tensor in place, so that the list must be rewritten without:
    that takes as long as tracing.
    """
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    return any(
        target._schema.is_mutable if isinstance(target, OpOverload) else isinstance(target, HigherOrderOperator)
        for target in targets
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's warnings and logs are about itself, not about the user's model."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
