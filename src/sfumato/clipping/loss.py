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

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.func import grad_and_value, vmap
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from sfumato.clipping.kept import Kept
from sfumato.clipping.outputs import is_usual
from sfumato.clipping.protocol import Loss
from sfumato.torch_internals import OpOverload, TorchDispatchMode, make_graph, tree_flatten, tree_unflatten

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


class KernelErrorsSeen(TorchDispatchMode):
    """The same for what runs in a backward pass, where a mode of functions is off: hooks, and
    backward passes of the model's own.
    """

    error: Exception | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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


_UNCHANGING: "weakref.WeakSet[Any]" = weakref.WeakSet()
_user_code = threading.RLock()
"""The code of users' losses is called by one thread at a time, whichever loss it is: they may share
what they keep.
"""


def unchanging(function: F) -> F:
    """Promises that a loss is a function of its arguments alone, now and later, so that its graph is
    traced once.
    """
    _UNCHANGING.add(function)  # an attribute would be copied by functools.wraps
    return function


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Outputs and targets of some structure, shapes and types."""

    leaves: tuple[Any, ...]  # what is no tensor, in its place
    structure: Any
    parts: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]  # of outputs, then of targets
    num_outputs: int
    views: int

    @property
    def key(self) -> tuple[Any, ...]:
        return self.parts, self.num_outputs, str(self.structure), tuple(map(repr, self.leaves)), self.views

    @property
    def floats(self) -> tuple[int, ...]:
        """The outputs that have a gradient."""
        return tuple(place for place in range(self.num_outputs) if self.parts[place][1].is_floating_point)

    def nested(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Outputs as the model returns them."""
        found = iter(tensors)
        return tree_unflatten([next(found) if leaf is _TENSOR else leaf for leaf in self.leaves], self.structure)


class _Tensor:
    """Stands for a tensor among what a model returns."""

    def __repr__(self) -> str:
        return "tensor"


_TENSOR = _Tensor()


class ExampleLosses:
    """One loss for each example, of that example's outputs and targets alone, and its gradients with
    respect to these outputs.

    A loss that compares rows (with their mean, with each other's targets, with their number) sees
    one example's views only. Where an example's outputs hold NaN or infinity (less than infinite may
    be meant: a masked class) it sees zeros: its loss is NaN.
    """

    def __init__(self, loss_fn: Loss) -> None:
        self._loss_fn = loss_fn
        self._is_unchanging = getattr(loss_fn, "__func__", loss_fn) in _UNCHANGING
        self._kinds: dict[Any, _Kind] = {}
        self._graphs: dict[Any, GraphModule | None] = {}

    def renew(self) -> None:
        """For a new call: the loss may be another than at the last one. Before workers begin, for
        tracing puts back what the loss leads to.
        """
        if not self._is_unchanging:
            self._graphs = {}
            for kind in self._kinds.values():
                self._graph(kind)

    def is_traced(self, outputs: Any, targets: tuple[torch.Tensor, ...], views: int) -> bool:
        """Whether it is computed for all examples side by side."""
        return self._graph(_kind(outputs, targets, views)) is not None

    def __call__(self, outputs: Any, targets: tuple[torch.Tensor, ...], views: int) -> LossesAndGradients:
        """(m,) losses, each the mean over K views, and their gradients.

        Args:
            outputs: Any nesting of tensors (m, *shape of the model's output for K rows), without a
                gradient's history; what else is in it goes to the loss as it is.
            targets: Each (m, ...).
        """
        tensors = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]
        usual = is_usual(tensors)
        shown = [_where(usual, tensor, 0.0) if tensor.is_floating_point() else tensor for tensor in tensors]
        kind = _kind(outputs, targets, views)
        graph = self._graph(kind)
        if graph is not None:
            with torch.no_grad():  # a network that the loss holds may have parameters that train elsewhere
                gradients, losses = vmap(graph)(*shown, *targets)
        else:
            gradients, losses = self._one_by_one(kind, shown, targets)
        found = iter(gradients)
        by_output = [next(found) if tensor.is_floating_point() else None for tensor in tensors]
        return _where(usual, losses, torch.nan), by_output

    def _loss(self, kind: _Kind, *parts: torch.Tensor) -> torch.Tensor:
        """The mean loss of one example's outputs and targets; copies, for a loss may write to what it
        is given.
        """
        rows = kind.nested(part.clone() for part in parts[: kind.num_outputs])
        repeated = (target.expand(kind.views, *target.shape).clone() for target in parts[kind.num_outputs :])
        loss: torch.Tensor = self._loss_fn(rows, *repeated).mean()
        return loss

    def _graph(self, kind: _Kind) -> GraphModule | None:
        with _user_code:
            if kind.key not in self._graphs:
                self._kinds[kind.key] = kind
                self._graphs[kind.key] = self._traced(kind)
            return self._graphs[kind.key]

    def _traced(self, kind: _Kind) -> GraphModule | None:
        """From one example's outputs and targets to gradients, of the outputs that have one, and the
        loss; None where the loss is no such graph.
        """
        made_up = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in kind.parts]
        mean_loss = functools.partial(self._loss, kind)
        of_example = grad_and_value(mean_loss, argnums=kind.floats) if kind.floats else lambda *p: ((), mean_loss(*p))
        kept = Kept(self._loss_fn)
        try:
            # What the loss computes once and for all (a table in a cache) holds numbers from then on.
            with contextlib.suppress(Exception), torch.no_grad():
                mean_loss(*made_up)
            with _Tracing() as seen:  # a handler of the loss's own may take what tracing raises
                graph = make_graph(of_example, made_up)
            if seen.error is None and _is_harmless(graph):
                vmap(graph)(*(torch.stack([part, part]) for part in made_up))
                return graph
        except Exception:  # it looks at values, or does what no graph holds, or vmap does not take
            pass
        finally:
            kept.restore()
        return None

    def _one_by_one(
        self, kind: _Kind, shown: list[torch.Tensor], targets: tuple[torch.Tensor, ...]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        losses, gradients = [], [torch.zeros_like(tensor) for tensor in shown if tensor.is_floating_point()]
        with _user_code:
            kept = Kept(self._loss_fn)
            kept.require_all()
            for place in range(len(shown[0])):
                with torch.enable_grad():
                    own = [tensor[place].detach().requires_grad_(tensor.is_floating_point()) for tensor in shown]
                    try:
                        loss = self._loss(kind, *own, *(target[place] for target in targets))
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
            kept.require_unwritten()
        return gradients, torch.stack(losses)


def _kind(outputs: Any, targets: tuple[torch.Tensor, ...], views: int) -> _Kind:
    leaves, structure = tree_flatten(outputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    parts = tuple((part.shape[1:], part.dtype, part.device) for part in (*tensors, *targets))
    named = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return _Kind(named, structure, parts, len(tensors), views)


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
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.op != "call_function":
            return False
        if not isinstance(node.target, OpOverload):
            if getattr(node.target, "__name__", "") != "getitem":
                return False
            continue
        name, tags = node.target.overloadpacket.__name__, node.target.tags
        if node.target.namespace != "aten" or torch.Tag.nondeterministic_seeded in tags:
            return False
        if name.removesuffix("_") not in _HARMLESS and torch.Tag.pointwise not in tags:
            return False
        for number, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
                if given is not None and not _is_own(given):
                    return False
    return True


# What a tensor is made by, with memory of its own, besides what works entry by entry.
_FRESH = _names("clone zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full _to_copy")
# What shows its first argument's memory.
_VIEWS = _names(
    "detach alias view reshape _unsafe_view flatten unflatten transpose permute t movedim unsqueeze squeeze expand "
    "slice select narrow diagonal split split_with_sizes chunk unbind"
)


def _is_own(node: Any) -> bool:
    """Whether what is written to goes back to something that the graph made: through views, and
    through what wrote to it before.
    """
    while isinstance(node, Node) and node.op == "call_function":
        if isinstance(node.target, OpOverload):
            name, schema = node.target.overloadpacket.__name__, node.target._schema
            aliases = any(value.alias_info is not None for value in (*schema.arguments, *schema.returns))
            if not aliases and (name in _FRESH or torch.Tag.pointwise in node.target.tags):
                return True
            if name not in _VIEWS and not (name.endswith("_") and aliases):
                return False
        node = node.args[0]
    return False
