"""Where rows lie: the table of the operations that engine "graph" knows, each of which computes every row by itself.

In every value that the batch touches, rows lie along exactly one dimension, of outer * rows * inner entries: windows
of one image may lie between rows, or be repeated around them. An operation that is not in the table, or that is told
to work along the rows, is refused, and its model left to `torch.func`, where rows cannot meet. So no made-up images
need show that no row learns its place, how many others there are, or anything of them.
"""

import dataclasses
import math
import operator
from typing import Any

import torch
from torch.fx import Node

from sfumato.torch_internals import OpOverload, arguments_of


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


_ARITHMETIC = (operator.mul, operator.floordiv, operator.add, operator.sub)
# Arguments that may hold the number of rows: they make shapes of it.
_SHAPE_ARGUMENTS = ("size", "shape", "sizes", "repeats")

# How an operation treats rows; of most, the first word is enough.
_TABLE: dict[str, tuple[Any, ...]] = {
    name: kind
    for kind, names in {
        # Each entry by itself, besides what PyTorch tags as such.
        ("entries",): """clone contiguous detach alias to _to_copy type_as where masked_fill dropout native_dropout
            alpha_dropout feature_dropout feature_alpha_dropout bernoulli normal_functional uniform exponential
            rand_like randn_like zeros_like ones_like full_like empty_like fill relu6 hardswish hardtanh mish selu elu
            softplus log_sigmoid gelu silu prelu rrelu clamp expand_as divide multiply subtract""",
        # They change where entries lie, not their order.
        ("view",): "view reshape _unsafe_view flatten unflatten view_as reshape_as",
        # They take nothing of a tensor but its type, device or shape.
        ("made",): "zeros ones full empty rand randn randint new_zeros new_ones new_full new_empty sym_size",
        # A dimension of theirs says where values lie.
        ("moved",): """transpose permute movedim moveaxis swapaxes unsqueeze squeeze stack t mT numpy_T expand
            broadcast_to broadcast_tensors repeat repeat_interleave matmul mm bmm addmm baddbmm""",
        # They work along the dimensions that they are told, which must not be the rows'.
        ("along",): """sum mean amax amin max min argmax argmin var std var_mean norm linalg_vector_norm logsumexp
            softmax _softmax log_softmax _log_softmax cumsum cumprod sort argsort topk flip roll all any unbind split
            split_with_sizes chunk narrow slice select index_select gather slice_scatter select_scatter cat concat
            unfold glu normalize""",
        # They work on the last so many dimensions; rows must lie before these.
        ("last", 1): "linear layer_norm rms_norm native_layer_norm",
        ("last", 2): "scaled_dot_product_attention tril triu",
        ("last", 3): "pixel_shuffle pixel_unshuffle",
        # They take rows first and then channels, followed by so many dimensions; None: by any number.
        ("first", 1): """conv1d conv_transpose1d avg_pool1d max_pool1d adaptive_avg_pool1d reflection_pad1d
            replication_pad1d upsample_nearest1d upsample_linear1d col2im""",
        ("first", 2): """conv2d conv_transpose2d avg_pool2d max_pool2d max_pool2d_with_indices adaptive_avg_pool2d
            adaptive_max_pool2d _adaptive_avg_pool2d reflection_pad2d replication_pad2d upsample_nearest2d
            upsample_bilinear2d upsample_bicubic2d im2col""",
        ("first", 3): "conv3d conv_transpose3d avg_pool3d max_pool3d adaptive_avg_pool3d",
        ("first", None): """group_norm native_group_norm instance_norm batch_norm _native_batch_norm_legit_no_training
            channel_shuffle""",
        ("pad",): "pad constant_pad_nd",
        ("embedding",): "embedding",
        ("index",): "index",
        ("einsum",): "einsum",
    }.items()
    for name in names.split()
}
_DIMENSIONS = ("dim", "dims", "dim0", "dim1", "dimension")
_ALL = 2**63 - 1  # the end of a slice that has none
_ALONG_ROWS = "acts along the dimension of the rows"


class Rows:
    """Follows the rows through a graph, operation by operation, in the graph's order.

    Args:
        images: The graph's input, rows first.
    """

    def __init__(self, images: Node) -> None:
        self._around: dict[Node, tuple[int, int]] = {images: (1, 1)}  # outer, inner

    def holds(self, node: Node) -> bool:
        """Whether rows lie in what an operation gives."""
        return node in self._around

    def layout(self, node: Node) -> Layout:
        """Where rows lie in what an operation gives, which is one tensor."""
        return Layout(_row_dim(node), *self._around[node])

    def misuse(self, node: Node) -> str | None:
        """What an operation on data does with rows that it may not, in words; None if nothing."""
        made = node.meta.get("val")
        if isinstance(made, (torch.SymInt, int)) and not isinstance(made, bool):
            is_size = node.target in _ARITHMETIC or name_of(node) == "sym_size"
            return None if is_size and _is_multiple(made) else "computes with the number of rows"
        if node.target is operator.getitem:
            return self._hand_on(node, [other for other in node.all_input_nodes if other in self._around])
        if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
            return "is not one of PyTorch's operations"
        given, name = arguments_of(node.target, node.args, node.kwargs), name_of(node)
        for argument, value in given.items():
            if argument not in _SHAPE_ARGUMENTS and any(_is_number_of_rows(entry) for entry in _entries(value)):
                return "computes with the number of rows"
        kind, *details = _TABLE.get(name, ("entries" if torch.Tag.pointwise in node.target.tags else "unknown",))
        data = [other for other in node.all_input_nodes if other in self._around and kind != "made"]
        if not data and not any(_row_dims(value) for value in _tensors(made)):
            return None  # made of a tensor's type and of constants: there are no rows in it
        return self._refusal(name, kind, details, given, data) or self._hand_on(node, data)

    def _refusal(self, name: str, kind: str, details: list[Any], given: dict[str, Any], data: list[Node]) -> str | None:
        """Why an operation of that kind does not compute each row by itself."""
        if kind == "unknown":
            return "is not known to compute each row by itself"
        if kind == "last":
            return None if all(_row_dim(other) < _ndim(other) - details[0] for other in data) else _ALONG_ROWS
        if kind == "first":
            image = next(iter(given.values()))
            is_first = data == [image] and _row_dim(image) == 0 and details[0] in (None, _ndim(image) - 2)
            return "takes statistics of all rows" if given.get("training") else None if is_first else _ALONG_ROWS
        if kind == "pad":
            return None if _row_dim(data[0]) < _ndim(data[0]) - len(given["pad"]) // 2 else "adds rows"
        if kind == "embedding":
            return None if given["weight"] not in self._around else "looks rows up in a table made of rows"
        if kind == "index":
            picks = [index for index in given["indices"] if index is not None]
            meet = any(index in self._around or index.meta["val"].dtype == torch.bool for index in picks)
            is_left = not meet and given["indices"][_row_dim(given["self"]) :][:1] in ([], [None])
            return None if is_left else "picks rows by their place"
        if kind == "einsum":
            return self._refusal_of_einsum(given)
        if kind == "along" and not (name in ("max", "min") and "other" in given):
            return self._refusal_along(name, given, data)
        if name == "repeat_interleave" and not (isinstance(given.get("repeats"), int) and given.get("dim") is not None):
            return "repeats rows"
        return None

    def _refusal_along(self, name: str, given: dict[str, Any], data: list[Node]) -> str | None:
        is_whole = given.get("start") in (None, 0) and given.get("end") in (None, _ALL) and given.get("step") == 1
        if name in ("slice", "slice_scatter") and is_whole:
            return None
        if name == "gather" and given["index"] not in self._around:
            return "picks rows by their place"  # a shared index may be shorter than the rows
        told = [given[argument] for argument in _DIMENSIONS if argument in given]
        dims = [dim for entry in told for dim in _entries(entry)]
        if not dims or not all(isinstance(dim, int) for dim in dims):
            return "acts on all rows at once"
        return _ALONG_ROWS if any(dim % _ndim(other) == _row_dim(other) for other in data for dim in dims) else None

    def _refusal_of_einsum(self, given: dict[str, Any]) -> str | None:
        """The rows must bear one label in every operand that has them, and keep it."""
        equation = given["equation"].replace(" ", "")
        inputs, arrow, output = equation.partition("->")
        if not arrow or "." in equation:
            return "adds rows up"
        operands = zip(inputs.split(","), given["tensors"], strict=True)
        labels = {part[_row_dim(operand)] for part, operand in operands if operand in self._around}
        return None if len(labels) == 1 and next(iter(labels)) in output else "adds rows up"

    def _hand_on(self, node: Node, data: list[Node]) -> str | None:
        """Notes where the rows of a result lie."""
        name = name_of(node)
        known = {self._around[other] for other in data}
        for value in _tensors(node.meta.get("val")):
            dims = _row_dims(value)
            if len(dims) > 1 or any(not _is_multiple(value.shape[dim]) for dim in dims):
                return "takes rows together in groups"
            if not dims and (not data or 0 in value.shape):
                continue
            if not dims:
                return "makes one value of all rows"
            per_row = _per_row(value.shape[dims[0]])
            if not data:  # the same for every row
                known = {(1, per_row)}
            elif _TABLE.get(name) == ("view",):
                known = _refolded(data[0].meta["val"].shape, self._around[data[0]], value.shape)
            elif name in ("repeat", "repeat_interleave"):
                outer, inner = self._around[data[0]]
                factor = per_row // (outer * inner)
                known = {(outer * factor, inner) if name == "repeat" else (outer, inner * factor)}
            if len(known) != 1 or math.prod(next(iter(known))) != per_row:
                return "joins rows that lie in different orders, or folds them so that they change their places"
            self._around[node] = next(iter(known))
        return None


def name_of(node: Node) -> str:
    """An operation's name without its overload: "conv2d", "add"."""
    target = node.target
    if isinstance(target, OpOverload):
        return target.overloadpacket.__name__
    return getattr(target, "__name__", str(target))


def module_path(node: Node) -> str:
    """The dotted path of the module that an operation belongs to."""
    stack = node.meta.get("nn_module_stack")
    return list(stack.values())[-1][0] if stack else ""


def draws(node: Node) -> bool:
    """Whether an operation draws random numbers: dropout of nothing does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    given = arguments_of(node.target, node.args, node.kwargs)
    return bool(given.get("p", given.get("dropout_p", True))) and given.get("train") is not False


def _refolded(shape: torch.Size, rows: tuple[int, int], other: torch.Size) -> set[tuple[int, int]]:
    """Where rows lie after a view; nowhere if otherwise than one after another."""

    def around(shape: torch.Size) -> tuple[int, int]:
        (dim,) = (dim for dim, size in enumerate(shape) if _is_number_of_rows(size))
        return math.prod(int(size) for size in shape[:dim]), math.prod(int(size) for size in shape[dim + 1 :])

    (before, after), (new_before, new_after) = around(shape), around(other)
    outer, inner = before * rows[0], rows[1] * after  # of the whole list of entries
    if not new_before or not new_after or outer % new_before or inner % new_after:
        return set()
    return {(outer // new_before, inner // new_after)}


def _entries(value: Any) -> list[Any]:
    return [entry for each in value for entry in _entries(each)] if isinstance(value, (list, tuple)) else [value]


def _is_number_of_rows(value: Any) -> bool:
    if isinstance(value, Node):
        value = value.meta.get("val")
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and bool(value.node.expr.free_symbols)


def _row_dims(value: torch.Tensor) -> list[int]:
    """The dimensions whose size depends on the number of rows."""
    return [dim for dim, size in enumerate(value.shape) if _is_number_of_rows(size)]


def _tensors(made: Any) -> list[torch.Tensor]:
    return [value for value in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(value, torch.Tensor)]


def _row_dim(node: Node) -> int:
    return _row_dims(_tensors(node.meta["val"])[0])[0]


def _ndim(node: Node) -> int:
    return _tensors(node.meta["val"])[0].ndim


def _is_multiple(size: Any) -> bool:
    """Whether a size is the number of rows times a whole number, or has nothing to do with it."""
    if not _is_number_of_rows(size):
        return True
    symbols = size.node.expr.free_symbols
    return len(symbols) == 1 and bool((size.node.expr / next(iter(symbols))).is_Integer)


def _per_row(size: Any) -> int:
    return int(size.node.expr / next(iter(size.node.expr.free_symbols)))
