r"""The one public way to a privatisable gradient: a sum of clipped per-example gradients."""

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from operator import itemgetter

import torch
from torch import nn

from sfumato.clipping.clip import Clip, are_exact, at_least_float32, convolutions
from sfumato.clipping.graph.engine import GraphEngine, SiteReport
from sfumato.clipping.microbatch import Summed
from sfumato.clipping.prepared import Prepared
from sfumato.clipping.protocol import Batch, ClippedGrad, Loss, Speed
from sfumato.clipping.random_layers import draw_seeds
from sfumato.errors import InputError

_NO_KEY = (
    "the model draws random numbers: give key, 32 bytes of this step alone, and example_ids, the "
    "number of each image (in a PrivateLoop key=update.key, example_ids=update.indices). A place in the batch is no "
    "such number, since one image more would change all others' masks."
)
# From the indices of a microbatch's examples to their inputs, (m, ...) or (m, K, ...), and targets.
Load = Callable[[torch.Tensor], Sequence[torch.Tensor]]


def clipped_grad(
    model: nn.Module,
    loss_fn: Loss,
    *,
    clipping_norm: float,
    augmult: int = 0,
    per_view: bool = False,
    rescale_to_unit_norm: bool = True,
    microbatch_size: int | None = None,
    engine: str = "auto",
    methods: dict[str, str] | None = None,
    precision: str = "float32",
    compile: bool = False,
    workers: int | None = None,
) -> "GradFn":
    r"""Turns a model and a loss into a function that sums clipped per-example gradients.

    For examples :math:`x_1, \ldots, x_B` with K views each, that function computes

    .. math:: \sum_i s \min(1, C / \|g_i\|_2)\, g_i, \quad g_i = \sum_j w_{ij} \nabla_\theta \ell(\theta, x_{ij}),

    where C is ``clipping_norm``, s is 1/C if ``rescale_to_unit_norm``, else 1, and every weight w is 1/K unless it is
    given (`De et al. (2022) <https://arxiv.org/abs/2204.13650>`_, Eq. 3 and 4). Noise and the division by the expected
    batch size are the caller's.

    Guarantee: putting one example in or leaving it out moves the sum by at most ``grad_fn.sensitivity`` in L2 norm, up
    to float rounding. Padding, and examples whose loss or gradient norm is not finite, contribute exactly zero. The
    model is left as it was: parameters, buffers and every ``.grad``.

    Before its first batch (`GradFn.prepare`) the function holds model, loss and engine to that, on made-up images alone
    (`sfumato.clipping.engine_check`). What changes afterwards in the model's own code, in hooks or in attributes,
    needs `prepare` again; other parameters, modes, shapes and types are noticed.

    Random numbers inside the model (dropout, stochastic depth) are drawn for each view by itself from ``key`` and the
    example's number: PyTorch's generator hands them out by place, and one image more would change all others' masks.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)  # output w.x: its gradient is x
        >>> grad_fn = clipped_grad(model, lambda outputs: outputs[:, 0], clipping_norm=1.0)
        >>> out = grad_fn(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
        >>> out.grad_norms, out.grad_sum["weight"]
        (tensor([5.0000, 0.5000]), tensor([[0.9000, 1.2000]]))

    Args:
        model: Any module without cross-example operations. Parameters that require no gradient are left out; a
            parameter under two names counts once, under its first.
        loss_fn: ``loss_fn(outputs, *targets)`` is called with one row at a time (a batch of one), through
            `torch.func.vmap`, and returns that row's loss, of shape () or (1,): `torch.nn.CrossEntropyLoss()` does. It
            is a function of that row alone.
        clipping_norm: C > 0, the L2 bound for one example, in units of the gradient norm.
        augmult: K, views per example. 0: inputs are (B, C, H, W). K >= 1: (B, K, C, H, W); the model sees rows of
            single views and each target is repeated K times.
        per_view: Views have targets of their own, (B, K, ...) each, and behind these their weights w, (B, K), are
            given: a person's images, for example, each with its label.
        rescale_to_unit_norm: Divide the sum by C: the sensitivity is 1, and the learning rate does not depend on C.
        microbatch_size: The most examples that a worker differentiates at once: speed and memory only, the result
            moves by no more than float rounding. None: 8 to 128, by the size of the gradients, and fewer where memory
            holds no more (`sfumato.clipping.microbatch`).
        engine: "graph" (the fast one), "func" (torch.func), "reference" (one view at a time, plain autograd) or "auto":
            the first of them that takes the model; `GradFn.refusal` says why not the faster.
        methods: What an earlier `GradFn.methods` recorded, to repeat its rounding. With no more than {"memory_format":
            "contiguous"} nothing is measured, and every run rounds alike.
        precision: "float32" is that on every device, whatever PyTorch was told. "tf32" lets a GPU round what goes into
            convolutions to 10 bits; products of matrices, norms and sums stay in float32. "bf16" rounds images and
            weights where they meet, and what follows, to bfloat16; parameters, norms, coefficients and sums stay in
            float32. Engine "graph" alone.
        compile: Compile the whole of a microbatch to one graph, the loss included, which takes a minute or two once.
            Engine "graph" alone; every microbatch is then filled up to the same size.
        workers: Microbatches computed at once on a CPU, by one thread each, where the engine allows it: small
            operations leave a second core idle, a second microbatch does not. 1: one after another, by all threads.
            None: as many as PyTorch has threads, and `load` is called by one at a time.

    Returns:
        ``grad_fn(inputs, *targets, is_padding=None, key=None, example_ids=None) -> ClippedGrad``;
        see `GradFn.__call__`, and `GradFn.sum_over` for examples that memory does not hold at once.

    Raises:
        InputError: (a ValueError) If an argument is out of range; at the first batch, if the model mixes examples or a
            trainable parameter has no per-example gradient (it is named).
    """
    speed = Speed(engine, microbatch_size, methods, precision, compile, workers)
    return GradFn(model, loss_fn, Clip(clipping_norm, rescale_to_unit_norm), augmult, per_view, speed)


class GradFn:
    """What `clipped_grad` returns: call it on a batch, from one thread at a time."""

    def __init__(self, model: nn.Module, loss_fn: Loss, clip: Clip, augmult: int, per_view: bool, speed: Speed) -> None:
        if isinstance(augmult, bool) or not isinstance(augmult, int) or augmult < 0:
            raise InputError(f"augmult must be a whole number, at least 0, not {augmult!r}. 0 means no augmentation.")
        if per_view and not augmult:
            raise InputError("per_view needs augmult: the number of views that have targets of their own.")
        self._model, self._loss_fn, self._clip = model, loss_fn, clip
        self._augmult, self._per_view, self._speed = augmult, per_view, speed
        self._prepared: Prepared | None = None
        # What a user reads from, a file, say, may give one thread what another asks for.
        self._loading = threading.Lock() if speed.workers is None else nullcontext()

    @property
    def clipping_norm(self) -> float:
        """C, as it was given."""
        return self._clip.clipping_norm

    @property
    def sensitivity(self) -> float:
        """Bound on one example's contribution to `grad_sum`, in L2 norm: what the noise is a
        multiple of.
        """
        return 1.0 if self._clip.rescale else self.clipping_norm

    @property
    def engine(self) -> str:
        """The name of the engine in use; before `prepare`, as it was asked for."""
        return self._prepared.name if self._prepared else self._speed.engine

    @property
    def refusal(self) -> str | None:
        """Why "auto" could not take engine "graph", and why not "func" where it took "reference",
        which computes one image at a time and is slow; None if it could.
        """
        return self._prepared.refusal if self._prepared else None

    @property
    def microbatch_size(self) -> int | None:
        """The most examples that a worker differentiates at once; None until `prepare` decides."""
        return self._prepared.microbatch_size if self._prepared else self._speed.microbatch_size

    @property
    def methods(self) -> dict[str, str]:
        """How engine "graph" computes at each operation: decides speed and rounding. Empty for
        other engines, and before `prepare`.
        """
        return dict(self._prepared.engine.methods) if self._prepared else {}

    @property
    def site_reports(self) -> list[SiteReport]:
        """Every place where a weight meets images, as engine "graph" sees it; empty for other
        engines, and before `prepare`.
        """
        engine = self._prepared.engine if self._prepared else None
        return engine.site_reports() if isinstance(engine, GraphEngine) else []

    @property
    def num_workers(self) -> int:
        """How many microbatches are computed at once."""
        return self._prepared.num_workers if self._prepared else 1

    def prepare(self, inputs: torch.Tensor, *targets: torch.Tensor, batch_size: int | None = None) -> Prepared:
        """Settles engine, methods and the microbatch's size, and checks model, loss and engine on made-up images.

        Args:
            inputs: One example or more as they will be: shape, type and device count, values do
                not.
            targets: Likewise, with the views' weights where targets are ``per_view``.
            batch_size: Examples of a call, expected: a public number.

        Raises:
            InputError: See `clipped_grad`.
            MachineError: If memory does not hold one example.
        """
        return self._settle(self._batch(inputs, targets), batch_size)

    def __call__(
        self,
        inputs: torch.Tensor,
        *targets: torch.Tensor,
        is_padding: torch.Tensor | None = None,
        key: bytes | None = None,
        example_ids: torch.Tensor | None = None,
    ) -> ClippedGrad:
        """The sum of the clipped gradients of a batch; any number of examples is allowed, none
        included.

        Args:
            inputs: (B, ...), or (B, K, ...) where ``augmult`` = K >= 1.
            targets: Each (B, ...): one for each example; where they are ``per_view``, each (B, K, ...), and behind
                them the views' weights, (B, K).
            is_padding: (B,) booleans: examples that do not count.
            key: For models that draw random numbers, else not looked at: 32 bytes *of this step
                alone*. With one key for all steps an image would meet the same masks at every step.
            example_ids: For models that draw random numbers, else not looked at: (B,) int64, which
                image each example is, the same whenever it is drawn. Its place in the batch is no
                such number: it changes with who else is drawn, and one image more would change all
                others' masks.

        Raises:
            InputError: See `clipped_grad`; or if key or example_ids are missing.
        """
        batch, parts = self._batch(inputs, targets), (inputs, *targets)
        real = torch.arange(len(inputs), device=inputs.device)
        if example_ids is not None and (example_ids.dtype != torch.int64 or example_ids.shape != (len(inputs),)):
            raise InputError(f"example_ids must be a tensor of one int64 for each of the {len(inputs)} examples.")
        if is_padding is not None:
            if is_padding.dtype != torch.bool or is_padding.shape != (len(inputs),):
                raise InputError(f"is_padding must be a tensor of one boolean for each of the {len(inputs)} examples.")
            real = real[~is_padding]
        if len(real) and not (self._prepared and self._prepared.is_of(self._model) and self._prepared.takes(batch)):
            self._settle(batch, self._prepared.batch_size if self._prepared else None)
        out = self._sum(lambda rows: list(map(itemgetter(rows), parts)), real, key, example_ids)
        grad_norms, losses = out.grad_norms.new_zeros(2, len(inputs))
        grad_norms[real], losses[real] = out.grad_norms, out.losses
        return ClippedGrad(out.grad_sum, grad_norms, losses, self.sensitivity, self.clipping_norm)

    def sum_over(self, load: Load, indices: torch.Tensor, *, key: bytes | None = None) -> ClippedGrad:
        """The same for examples that memory need not hold at once: each microbatch is loaded in its
        turn.

        Args:
            load: From (m,) indices to inputs and targets as in a call, (m, ...) each, in memory that nothing writes to
                afterwards. Called by other threads: one at a time, unless several ``workers`` are asked for.
            indices: (B,) int64: which examples. For models that draw random numbers they are
                `example_ids`.
            key: As in a call.

        Raises:
            InputError: As in a call.
        """
        if not isinstance(indices, torch.Tensor) or indices.dtype != torch.int64 or indices.ndim != 1:
            raise InputError("indices must be a tensor of int64 numbers, one for each example.")
        if len(indices) and not (self._prepared and self._prepared.is_of(self._model)):
            inputs, *targets = load(indices[:1])
            self._settle(self._batch(inputs, targets), self._prepared.batch_size if self._prepared else None)
        return self._sum(lambda places: load(indices[places]), torch.arange(len(indices)), key, indices)

    def _settle(self, batch: Batch, batch_size: int | None) -> Prepared:
        self._prepared = None  # if this fails, the next call begins anew
        self._prepared = Prepared(self._model, self._loss_fn, self._speed, self._clip, batch, batch_size)
        return self._prepared

    def _batch(self, inputs: torch.Tensor, targets: Sequence[torch.Tensor]) -> Batch:
        """Inputs and targets as engines take them.

        Raises:
            InputError: If shapes do not go together, or PyTorch is set to round norms and sums.
        """
        for given in (inputs, *targets):
            if not isinstance(given, torch.Tensor) or not given.ndim:
                raise InputError("inputs and targets must be tensors whose first dimension counts examples.")
            if len(given) != len(inputs):
                raise InputError(
                    f"targets for {len(given)} examples do not match inputs of {len(inputs)}. "
                    "Give one target for each example."
                )
        if self._augmult and (inputs.ndim < 3 or inputs.shape[1] != self._augmult):
            raise InputError(
                f"inputs of shape {tuple(inputs.shape)} do not hold augmult = {self._augmult} "
                "views per example. Give them as (B, K, C, H, W)."
            )
        if torch.is_autocast_enabled(inputs.device.type) or not are_exact("matmul", inputs.device):
            raise InputError(
                "PyTorch is set to round products to fewer digits (torch.autocast, or "
                "torch.set_float32_matmul_precision), and so norms and sums, on which privacy rests. Leave that, and "
                'give precision="bf16" for speed.'
            )
        views = inputs.detach() if self._augmult else inputs.detach().unsqueeze(1)
        shape, dtype = views.shape[:2], torch.float64 if views.dtype == torch.float64 else torch.float32
        if self._per_view:
            if not targets or targets[-1].shape != shape or any(target.shape[:2] != shape for target in targets):
                raise InputError(f"views' targets and weights must be of shape {tuple(shape)} and more dimensions.")
            *targets, weights = targets
            weights = weights.to(dtype)
        else:
            of_examples, targets = targets, []
            for target in of_examples:
                targets.append(target.unsqueeze(1).expand(*shape, *target.shape[1:]))
            weights = torch.full(shape, 1 / shape[1], dtype=dtype, device=views.device)
        is_real = torch.ones(len(views), dtype=torch.bool, device=views.device)
        return Batch(views, tuple(targets), weights, is_real)

    def _sum(self, load: Load, rows: torch.Tensor, key: bytes | None, ids: torch.Tensor | None) -> ClippedGrad:
        """The one loop over microbatches of these rows, whose images have these numbers."""
        prepared = self._prepared
        if not len(rows) or prepared is None:
            trained = {name: value for name, value in self._model.named_parameters() if value.requires_grad}
            zeros = {name: at_least_float32(torch.zeros_like(value)).detach() for name, value in trained.items()}
            norms, losses = next(iter(zeros.values())).new_zeros(2, 0)
            return ClippedGrad(zeros, norms, losses, self.sensitivity, self.clipping_norm)
        engine, parts = prepared.engine, prepared.microbatches(rows)

        def loaded(places: torch.Tensor) -> Batch:
            missing = prepared.microbatch_size - len(places) if prepared.has_one_size else 0
            filled = torch.cat([places, places[:1].expand(missing)])
            with self._loading, torch.no_grad():
                inputs, *targets = load(filled)
            batch = self._batch(inputs, targets)
            if len(batch.inputs) != len(filled) or not prepared.takes(batch):
                raise InputError("load must give one example for each index, all of one shape and type.")
            batch.is_real[len(places) :] = False
            if not prepared.draw_dims:
                return batch
            if ids is None or not isinstance(key, bytes) or len(key) != 32:
                raise InputError(_NO_KEY)
            seeds = draw_seeds(key, ids[filled.to(ids.device)].to(batch.inputs.device), batch.inputs.shape[1])
            return dataclasses.replace(batch, seeds=seeds, draw_dims=prepared.draw_dims)

        def clipped(batch: Batch) -> Summed:
            with torch.no_grad():  # each thread has a mode of its own
                return Summed(batch, engine.clipped_sum(self._clip, evaluated, batch))

        total: dict[str, torch.Tensor] = {}
        norms, losses = list[torch.Tensor](), list[torch.Tensor]()

        with convolutions(self._speed.precision):
            evaluated, waiting = engine.evaluate(), list[Summed | None]()
            behind = 1 if prepared.on_gpu else 0  # a GPU computes the next one while it is asked for this one
            for latest in chain(self._map(prepared, loaded, clipped, parts), [None] * behind):
                waiting.append(latest)
                if len(waiting) <= behind or (one := waiting.pop(0)) is None:
                    continue
                summed = one.out.grad_sum if engine.leaves_out else one.of_finite(clipped)
                for name in [*summed]:
                    part = summed.pop(name)  # the others' memory is for what workers compute meanwhile
                    total[name] = total[name].add_(part) if name in total else part
                count = len(parts[len(norms)])  # the others fill up
                norms.append(one.out.grad_norms[:count])
                losses.append(one.out.losses[:count])
        return ClippedGrad(total, torch.cat(norms), torch.cat(losses), self.sensitivity, self.clipping_norm)

    def _map(
        self,
        prepared: Prepared,
        load: Callable[[torch.Tensor], Batch],
        clipped: Callable[[Batch], Summed],
        parts: Sequence[torch.Tensor],
    ) -> Iterator[Summed]:
        """Of each microbatch, in order: side by side, or one after another, with the next one loaded meanwhile."""
        if prepared.num_workers > 1:
            yield from prepared.threads.map(lambda part: clipped(load(part)), parts)
            torch.set_num_threads(torch.get_num_threads())  # what is set last is what a thread to come begins with
            return
        batch = load(parts[0])
        for following in [*parts[1:], None]:
            ahead = None if following is None else prepared.threads.submit(load, following)
            yield clipped(batch)
            if ahead is not None:
                batch = ahead.result()
