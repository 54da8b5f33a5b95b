"""Which dimension of a tensor counts the images, found by changing one image and looking."""

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from sfumato.clipping.graph.export import Capture, module_path
from sfumato.errors import InputError
from sfumato.torch_internals import tree_map

# Two numbers of rows: the dimension that differs between them counts rows.
_ROWS, _OTHER_ROWS = 3, 5
# Relative difference above which a value has moved: rounding stays below it.
_ROUNDING = 1e-5
# Operations that give their input back where nothing is dropped.
_DROPOUT = ("aten.dropout", "aten.alpha_dropout", "aten.feature_dropout", "aten.feature_alpha_dropout")


@dataclasses.dataclass(frozen=True)
class Layout:
    """The rows of a batch lie along one dimension of a tensor, of size outer * rows * inner.

    Attributes:
        dim: That dimension.
        outer: What varies more slowly than the row along it.
        inner: What varies faster: windows of one image, for example.
    """

    dim: int
    outer: int
    inner: int

    def by_example(self, tensor: torch.Tensor, examples: int, views: int) -> torch.Tensor:
        """Puts the examples first: (examples, *shape of the tensor for one example's rows)."""
        if self.dim == 0 and self.outer == 1:  # all lie where they belong
            return tensor.reshape(examples, views * self.inner, *tensor.shape[1:])
        split = tensor.unflatten(self.dim, (self.outer, examples, views, self.inner))
        return split.movedim(self.dim + 1, 0).flatten(self.dim + 1, self.dim + 3)


def find_layouts(
    capture: Capture, model: torch.nn.Module, parameters: dict[str, torch.Tensor], row: torch.Tensor
) -> dict[Node, Layout]:
    """The layout of every tensor that goes into a site or comes out of one.

    Runs the graph on made-up images, once for each image with that one changed. An operation
    whose result mixes images, or where images cannot be told apart, is refused by its module's
    path.

    Args:
        parameters: Trainable parameters by name, none of them so special (zero, say) that it hides
            what comes after.
        row: (1, ...): shape, type and device of an input.
    """
    wanted = {other for node in capture.sites for other in (node, *node.all_input_nodes)} & {
        capture.input,
        *capture.data,
    }
    wanted |= set(capture.outputs)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(_OTHER_ROWS, *row.shape[1:], generator=generator).to(row)
    changed = torch.randn(_OTHER_ROWS, *row.shape[1:], generator=generator).to(row)
    shared = capture.state(model) | {node: parameters[name] for name, node in capture.parameters.items()}
    with torch.no_grad():
        capture.shared.run(shared)

        def run(rows: torch.Tensor, marked: int | None) -> dict[Node, Any]:
            values = {**shared, capture.input: rows}
            capture.data.run(values, keep=wanted.__contains__, call=_Marking(len(rows), marked))
            return values

        before, more = run(images[:_ROWS], None), run(images, None)
        tensors = {node: before[node] for node in wanted if isinstance(before[node], torch.Tensor)}
        for node in capture.data:
            if node in tensors and tensors[node].is_complex():
                raise InputError(
                    f"{node.target} in '{module_path(node) or 'the model'}' gives complex "
                    "numbers, for which engine "
                    '"graph" has no rule. '
                    'Use engine="reference".'
                )
        candidates = {node: _candidates(node, tensor.shape, more[node].shape) for node, tensor in tensors.items()}
        for i in range(_ROWS):
            rows = images[:_ROWS].clone()
            rows[i] = changed[i]
            after = run(rows, i)
            for node, tensor in tensors.items():
                moved = _moved(tensor, after[node])
                candidates[node] = [layout for layout in candidates[node] if not _elsewhere(moved, layout, i)]
    layouts = {}
    for node, found in candidates.items():
        if len(found) == 1 and _counts_rows(tensors[node], more[node], found[0]):
            raise InputError(
                f"{node.target} in '{module_path(node) or 'the model'}' depends on the number of "
                "rows, which would tell how many images were drawn. Replace it by an operation "
                "on each image alone."
            )
        if len(found) != 1:
            where = f"{node.target} in '{module_path(node) or 'the model'}'"
            if found:
                raise InputError(
                    f'{where} does not show which of its rows belong to which example, which engine "graph" needs to '
                    'know. Lay images along the first dimension, or use engine="func".'
                )
            raise InputError(
                f"{where} mixes examples, so per-example gradients do not exist and no privacy guarantee holds. "
                "Replace it by an operation on each image alone."
            )
        layouts[node] = found[0]
    return layouts


class _Marking:
    """Runs an operation, and marks one row of what was made from nothing but the number of rows.

    Tokens expanded to the batch are the same for every image; without a mark nothing would
    show which row of what follows is whose. Random draws are taken for ones, and dropout
    for nothing at all, so that equal images give equal values.
    """

    def __init__(self, rows: int, marked: int | None) -> None:
        self.rows, self.marked = rows, marked

    def __call__(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = _without_chance(node, args, kwargs)
        if self.marked is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if any(isinstance(other.meta.get("val"), torch.Tensor) and _is_data(other) for other in node.all_input_nodes):
            return value
        value = value.clone()
        for dim, (size, traced) in enumerate(zip(value.shape, node.meta["val"].shape, strict=True)):
            if size % self.rows == 0 and isinstance(traced, torch.SymInt):
                per_row = size // self.rows  # windows of one image, one after another: the same for each
                value.narrow(dim, self.marked * per_row, per_row).add_(1.0)
                break
        return value


def _without_chance(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation gives, with dropout left out and ones for random draws."""
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return target(*args, **kwargs)
    if str(target).startswith(_DROPOUT):
        return args[0]
    names = [argument.name for argument in target._schema.arguments]
    if "dropout_p" in names:  # attention
        given = dict(zip(names, args, strict=False)) | kwargs
        return target(**(given | {"dropout_p": 0.0}))
    return tree_map(
        lambda leaf: torch.ones_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, target(*args, **kwargs)
    )


def _is_data(node: Node) -> bool:
    """Whether the number of rows shows in the shape of a traced tensor."""
    return any(isinstance(size, torch.SymInt) for size in node.meta["val"].shape)


def _candidates(node: Node, shape: torch.Size, other: torch.Size) -> list[Layout]:
    dims = [dim for dim, (size, other_size) in enumerate(zip(shape, other, strict=True)) if size != other_size]
    if len(dims) != 1 or shape[dims[0]] % _ROWS or shape[dims[0]] * _OTHER_ROWS != other[dims[0]] * _ROWS:
        return []
    per_row = shape[dims[0]] // _ROWS
    return [Layout(dims[0], outer, per_row // outer) for outer in range(1, per_row + 1) if per_row % outer == 0]


def _moved(before: torch.Tensor, after: torch.Tensor, rounding: float = _ROUNDING) -> torch.Tensor:
    if not before.is_floating_point():
        return before != after
    before, after = before.double().nan_to_num(), after.double().nan_to_num()
    return (before - after).abs() > rounding * before.abs().max()


def _counts_rows(few: torch.Tensor, more: torch.Tensor, layout: Layout) -> bool:
    """Whether the same images give other values in a larger batch."""
    same = more.unflatten(layout.dim, (layout.outer, _OTHER_ROWS, layout.inner)).narrow(layout.dim + 1, 0, _ROWS)
    # Another number of rows may be another kernel, which rounds wide sums otherwise.
    return bool(_moved(few, same.flatten(layout.dim, layout.dim + 2), 1000 * _ROUNDING).any())


def _elsewhere(moved: torch.Tensor, layout: Layout, row: int) -> bool:
    """Whether anything moved that does not belong to this row."""
    by_row = moved.unflatten(layout.dim, (layout.outer, _ROWS, layout.inner)).movedim(layout.dim + 1, 0)
    return any(bool(by_row[other].any()) for other in range(_ROWS) if other != row)
