"""A user's loss on many examples, so that none can tell what another's is.

PyTorch traces the loss of one example (its outputs for K views, its target) and that loss's gradient
to a graph, on shapes alone. A graph that holds only operations that raise no error and draw no
numbers, whatever their values, is then applied to all examples side by side (`torch.func.vmap`).
None of the user's code runs in it: it can neither catch an error, count, nor keep anything, and no
formula is chosen by values. The graph is traced anew for each call, since the loss may have been
changed between two of them, unless it is marked `unchanging`.

Any other loss (it branches on values, holds a `try` or another library, has a backward pass of its
own) is called for one example after another, and everything that it keeps is put back after each
(`Kept`).
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.func import grad_and_value, vmap
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from sfumato.clipping.kept import Kept
from sfumato.clipping.outputs import is_usual
from sfumato.clipping.protocol import Loss
from sfumato.torch_internals import OpOverload, make_graph, tree_flatten, tree_unflatten

F = TypeVar("F", bound=Callable[..., Any])
# Losses (m,), and for each of the outputs the gradient of their sum; None for whole numbers.
LossesAndGradients = tuple[torch.Tensor, list[torch.Tensor | None]]


class ErrorsSeen(TorchFunctionMode):
    """Within, notes the first error that an operation raises, whoever handles it."""

    error: Exception | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self.error = self.error or error
            raise


class _Tracing(ErrorsSeen):
    """The same, and no tensor of the user's is given the memory of one that holds no numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__set__":
            self.error = RuntimeError("it sets an attribute of a tensor")
            raise self.error
        return super().__torch_function__(func, types, args, kwargs)


def unchanging(function: F) -> F:
    """Promises that a loss is a function of its arguments alone, now and later, so that its graph is
    traced once.
    """
    function.is_unchanging = True  # type: ignore[attr-defined]
    return function


class ExampleLosses:
    """One loss for each example, of that example's outputs and targets alone, and its gradients with
    respect to these outputs.

    A loss that compares rows (with their mean, with each other's targets, with their number) sees
    one example's views only. Where an example's outputs hold NaN or infinity (less than infinite may
    be meant: a masked class) it sees zeros: its loss is NaN.
    """

    def __init__(self, loss_fn: Loss) -> None:
        self._loss_fn = loss_fn
        self._is_unchanging = bool(getattr(loss_fn, "is_unchanging", False))
        self._graphs: dict[Any, GraphModule | None] = {}
        self._lock = threading.RLock()  # user's code is called by one thread at a time

    def renew(self) -> None:
        """For a new call: the loss may be another than at the last one."""
        if not self._is_unchanging:
            self._graphs = {}

    def is_traced(self, outputs: Any, targets: tuple[torch.Tensor, ...], views: int) -> bool:
        """Whether it is computed for all examples side by side."""
        leaves, structure = tree_flatten(outputs)
        return self._graph(leaves, structure, targets, views) is not None

    def __call__(self, outputs: Any, targets: tuple[torch.Tensor, ...], views: int) -> LossesAndGradients:
        """(m,) losses, each the mean over K views, and their gradients.

        Args:
            outputs: Any nesting of tensors (m, *shape of the model's output for K rows), without a
                gradient's history; what else is in it goes to the loss as it is.
            targets: Each (m, ...).
        """
        leaves, structure = tree_flatten(outputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        usual = is_usual(tensors)
        shown = [_where(usual, tensor, 0.0) if tensor.is_floating_point() else tensor for tensor in tensors]
        graph = self._graph(leaves, structure, targets, views)
        if graph is not None:
            with torch.no_grad():  # a network that the loss holds may have parameters that train elsewhere
                gradients, losses = vmap(graph)(*shown, *targets)
        else:
            gradients, losses = self._one_by_one(leaves, structure, shown, targets, views)
        found = iter(gradients)
        by_output = [next(found) if tensor.is_floating_point() else None for tensor in tensors]
        return _where(usual, losses, torch.nan), by_output

    def _of_example(self, leaves: list[Any], structure: Any, count: int, views: int) -> Callable[..., Any]:
        """From one example's output tensors and targets to gradients, of the outputs that have one, and
        the mean loss.
        """
        floats = tuple(
            number
            for number, leaf in enumerate(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            if leaf.is_floating_point()
        )

        def mean_loss(*parts: torch.Tensor) -> torch.Tensor:
            # Copies, for a loss may write to what it is given.
            own = (part.clone() for part in parts[:count])
            rows = tree_unflatten([next(own) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)
            repeated = (target.expand(views, *target.shape).clone() for target in parts[count:])
            loss: torch.Tensor = self._loss_fn(rows, *repeated).mean()
            return loss

        if floats:
            return grad_and_value(mean_loss, argnums=floats)
        return lambda *parts: ((), mean_loss(*parts))

    def _graph(
        self, leaves: list[Any], structure: Any, targets: tuple[torch.Tensor, ...], views: int
    ) -> GraphModule | None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        parts = [(part.shape[1:], part.dtype, part.device) for part in (*tensors, *targets)]
        others = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
        kind = (tuple(parts), str(structure), others, views)
        with self._lock:
            graphs = self._graphs
            if kind not in graphs:
                made_up = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in parts]
                kept = Kept(self._loss_fn)
                graphs[kind] = None
                try:
                    with _Tracing() as seen:  # a handler of the loss's own may take what tracing raises
                        graph = make_graph(self._of_example(leaves, structure, len(tensors), views), made_up)
                    if seen.error is None and _is_harmless(graph):
                        vmap(graph)(*(torch.stack([part, part]) for part in made_up))
                        graphs[kind] = graph
                except Exception:  # it looks at values, or does what no graph holds, or vmap does not take
                    pass
                finally:
                    kept.restore()
            return graphs[kind]

    def _one_by_one(
        self,
        leaves: list[Any],
        structure: Any,
        shown: list[torch.Tensor],
        targets: tuple[torch.Tensor, ...],
        views: int,
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        losses, gradients = [], [torch.zeros_like(tensor) for tensor in shown if tensor.is_floating_point()]
        with self._lock:
            kept = Kept(self._loss_fn)
            kept.require_all()
            for place in range(len(shown[0])):
                with torch.enable_grad():
                    own = [tensor[place].detach().requires_grad_(tensor.is_floating_point()) for tensor in shown]
                    given = iter([tensor.clone() for tensor in own])
                    rows = tree_unflatten(
                        [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure
                    )
                    repeated = (target[place].expand(views, *target.shape[1:]).clone() for target in targets)
                    try:
                        loss = self._loss_fn(rows, *repeated).mean()
                        floats = [tensor for tensor in own if tensor.requires_grad]
                        found: tuple[torch.Tensor | None, ...] = (None,) * len(floats)
                        if floats and loss.requires_grad:
                            found = torch.autograd.grad(loss, floats, allow_unused=True)
                    finally:
                        kept.restore()
                for gradient, of_example in zip(gradients, found, strict=True):
                    if of_example is not None:
                        gradient[place] = of_example
                losses.append(loss.detach())
        return gradients, torch.stack(losses)


def _where(condition: torch.Tensor, value: torch.Tensor, other: float) -> torch.Tensor:
    return torch.where(condition.view(-1, *[1] * (value.ndim - 1)), value, other)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What raises no error for any values, besides what PyTorch tags as working entry by entry. Not among
# them are decompositions and solvers, which refuse some matrices, and what checks its values
# (binary_cross_entropy). Indices outside of what they index raise: they come from labels.
_HARMLESS = _names(
    "clone contiguous detach alias to _to_copy lift_fresh_copy where masked_fill view reshape "
    "_unsafe_view flatten unflatten zeros ones full zeros_like ones_like full_like new_zeros new_ones "
    "new_full scalar_tensor arange eye transpose permute t movedim unsqueeze squeeze stack cat expand "
    "repeat split split_with_sizes chunk unbind slice select narrow slice_scatter select_scatter "
    "diagonal diag_embed select_backward slice_backward diagonal_backward expand_as flip roll tril "
    "triu sum mean amax amin max min argmax argmin var std var_mean std_mean norm linalg_vector_norm "
    "logsumexp _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod "
    "prod cummax cummin logcumsumexp sort argsort topk all any gather scatter scatter_add "
    "index_select index_add index index_put nll_loss_forward nll_loss_backward nll_loss2d_forward "
    "nll_loss2d_backward multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward "
    "multilabel_margin_loss_backward mse_loss mse_loss_backward smooth_l1_loss "
    "smooth_l1_loss_backward huber_loss huber_loss_backward soft_margin_loss "
    "soft_margin_loss_backward log_sigmoid_forward log_sigmoid_backward matmul mm bmm mv dot addmm "
    "addmv baddbmm outer copy fill zero constant_pad_nd masked_scatter _euclidean_dist sym_size "
)


def _is_harmless(graph: GraphModule) -> bool:
    """Whether a graph raises no error and draws no number whatever its inputs hold, and writes to
    nothing but what it made itself.
    """
    made: set[Any] = set()
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.op != "call_function":
            return False
        made.add(node)
        if not isinstance(node.target, OpOverload):
            if getattr(node.target, "__name__", "") != "getitem":
                return False
            continue
        name, tags = node.target.overloadpacket.__name__, node.target.tags
        if node.target.namespace != "aten" or torch.Tag.nondeterministic_seeded in tags:
            return False
        if name.removesuffix("_") not in _HARMLESS and torch.Tag.pointwise not in tags:
            return False
        for argument, given in zip(node.target._schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and not _is_own(given, made):
                return False
    return True


def _is_own(node: Any, made: set[Any]) -> bool:
    """Whether what is written to goes back to something that the graph made, and not through views to
    what it was given.
    """
    while node in made:
        views = isinstance(node.target, OpOverload) and node.target._schema.arguments
        source = node.args[0] if views and views[0].alias_info is not None else None
        if source is None:
            return True
        node = source
    return False
