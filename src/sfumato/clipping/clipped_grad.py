r"""The one public way to a privatisable gradient: a sum of clipped per-example gradients."""

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from sfumato.clipping.coefficient import Clip
from sfumato.clipping.draws import draw_seeds
from sfumato.clipping.graph.engine import GraphEngine, SiteReport
from sfumato.clipping.identity import identity
from sfumato.clipping.inputs import as_views, example_numbers, refuse_modes, seeding_of
from sfumato.clipping.law import refuse_lazy
from sfumato.clipping.norms import at_least_float32
from sfumato.clipping.numerics import convolutions
from sfumato.clipping.preparation import Preparation
from sfumato.clipping.protocol import Batch, ClippedGrad, Loss, add_to
from sfumato.clipping.speed import Speed
from sfumato.clipping.stand_in import grads_kept, interrupts_wait
from sfumato.clipping.workers import Workers
from sfumato.errors import InputError
from sfumato.torch_internals import keep_device_guard

# Below, gradients of norm C have entries whose squares vanish in float32: they would be taken for
# zero, and not be clipped.
MIN_CLIPPING_NORM = 1e-12
# Above, 1 / C times a gradient vanishes in float32.
MAX_CLIPPING_NORM = 1e30
# From the indices of a microbatch's examples to their inputs, (m, ...) or (m, K, ...), and targets.
Load = Callable[[torch.Tensor], Sequence[torch.Tensor]]


def clipped_grad(
    model: nn.Module,
    loss_fn: Loss,
    *,
    clipping_norm: float,
    augmult: int = 0,
    rescale_to_unit_norm: bool = True,
    microbatch_size: int | None = None,
    engine: str = "auto",
    methods: dict[str, str] | None = None,
    precision: str = "float32",
    compile: bool = False,
    workers: int = 1,
) -> "GradFn":
    r"""Turns a model and a per-row loss into a function that sums clipped per-example gradients.

    For examples :math:`x_1, \dots, x_B` with K views each, that function computes

    .. math:: \sum_i s \min(1, C / \|g_i\|_2)\, g_i, \quad g_i = \frac1K \sum_j \nabla_\theta
    \ell(\theta, x_{ij}),

    where C is ``clipping_norm`` and s is 1/C if ``rescale_to_unit_norm``, else 1
    (`De et al. (2022) <https://arxiv.org/abs/2204.13650>`_, Eq. 3 and 4). Noise and the
    division by the expected batch size are the caller's.

    Guarantee: putting one example in or leaving it out moves the sum by at most
    ``grad_fn.sensitivity`` in L2 norm, up to float rounding. Padding, and examples whose
    loss or gradient norm is not finite, contribute exactly zero. The model is left as it
    was: parameters, buffers and every ``.grad``.

    Before its first batch (`GradFn.prepare`) the function holds the model and the engine to that,
    on made-up images alone (`sfumato.clipping.law`): they must agree with plain autograd on single
    images, whatever lies beside these and came before them.

    Random numbers inside the model (dropout, stochastic depth) are drawn for each view by itself
    from ``key`` and the example's number: PyTorch's own generator hands them out by place, so that
    one image more would change all others' masks.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)  # output w.x: its gradient is x
        >>> grad_fn = clipped_grad(model, lambda outputs: outputs[:, 0], clipping_norm=1.0)
        >>> out = grad_fn(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
        >>> out.grad_norms, out.grad_sum["weight"]
        (tensor([5.0000, 0.5000]), tensor([[0.9000, 1.2000]]))

    Args:
        model: Any module without cross-example operations. Parameters that require no
            gradient are left out; a parameter under two names counts once, under its first.
        loss_fn: ``loss_fn(outputs, *targets) -> (rows,)``, one loss for each row.
        clipping_norm: C > 0, the L2 bound for one example, in units of the gradient norm.
        augmult: K, views per example. 0: inputs are (B, C, H, W). K >= 1: (B, K, C, H, W);
            the model sees rows of single views and each target is repeated K times.
        rescale_to_unit_norm: Divide the sum by C, so that the sensitivity is 1 and the
            learning rate does not depend on C.
        microbatch_size: Examples differentiated at once: speed and memory only, the result
            moves by no more than float rounding. None: 8 to 128, by the size of the gradients, and
            fewer where memory holds no more (`sfumato.clipping.microbatch`).
        engine: "graph" (the fast one), "func" (torch.func), "reference" (one view at a time,
            plain autograd) or "auto": the first of them that takes the model; `GradFn.refusal` says
            why not the faster.
        methods: What an earlier `GradFn.methods` recorded, to repeat its rounding. With no more
            than {"memory_format": "contiguous"} nothing is measured, and every run rounds alike.
        precision: "float32" is that on every device, whatever PyTorch was told. "tf32" lets a GPU
            round what goes into convolutions to 10 bits; products of matrices, norms and sums stay
            in float32. "bf16" rounds images and weights where they meet, and what follows, to
            bfloat16; parameters, norms, coefficients and sums stay in float32. Engine "graph" alone.
        compile: Compile the whole of a microbatch to one graph, which takes a minute or two once.
            Engine "graph" alone; every microbatch is then filled up to the same size.
        workers: Microbatches computed at once on a CPU, by one thread each, where the engine allows
            it.

    Returns:
        ``grad_fn(inputs, *targets, is_padding=None, key=None, example_ids=None) -> ClippedGrad``;
        see `GradFn.__call__`, and `GradFn.sum_over` for examples that memory does not hold at once.

    Raises:
        InputError: (a ValueError) If ``clipping_norm`` is not positive and finite or another
            argument is out of range; at the first batch, if the model mixes examples or a
            trainable parameter has no per-example gradient (it is named).
    """
    if isinstance(clipping_norm, bool) or not isinstance(clipping_norm, (int, float)):
        raise InputError(f"clipping_norm must be a number, not {clipping_norm!r}.")
    if clipping_norm > MAX_CLIPPING_NORM and math.isfinite(clipping_norm):
        raise InputError(
            f"clipping_norm must be at most {MAX_CLIPPING_NORM:g}, not {clipping_norm:g}: divided by a larger "
            "one, gradients vanish in float32. Choose a smaller one."
        )
    if not (math.isfinite(clipping_norm) and clipping_norm >= MIN_CLIPPING_NORM):
        raise InputError(
            f"clipping_norm must be finite and at least {MIN_CLIPPING_NORM:g}, not "
            f"{clipping_norm}: it bounds what one example contributes, and gradients shorter than "
            "that have squares that float32 does not hold. Choose a larger one, or scale the "
            "loss."
        )
    if isinstance(augmult, bool) or not isinstance(augmult, int) or augmult < 0:
        raise InputError(f"augmult must be a whole number, at least 0, not {augmult!r}. 0 means no augmentation.")
    speed = Speed(engine, microbatch_size, methods, precision, compile, workers)
    return GradFn(model, loss_fn, clipping_norm, augmult, rescale_to_unit_norm, speed)


class GradFn:
    """What `clipped_grad` returns: call it on a batch.

    Attributes:
        clipping_norm: C, as it was given.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        clipping_norm: float,
        augmult: int,
        rescale_to_unit_norm: bool,
        speed: Speed,
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self.clipping_norm = clipping_norm
        self._augmult = augmult
        self._rescale = rescale_to_unit_norm
        self._speed = speed
        self._prepared: Preparation | None = None
        self._batch_size: int | None = None
        self._preparing = threading.Lock()
        self._computing = threading.Lock()
        self._pool = Workers(speed.workers)
        self._targets: tuple[torch.Tensor, ...] = ()  # their kinds, at the last call

    @property
    def sensitivity(self) -> float:
        """Bound on one example's contribution to `grad_sum`, in L2 norm: what the noise is a
        multiple of.
        """
        return 1.0 if self._rescale else self.clipping_norm

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
        """Examples differentiated at once; None until `prepare` decides."""
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
    def parallel(self) -> bool:
        """Whether several threads may call it at once; False before `prepare`."""
        return self._prepared is not None and self._prepared.engine.parallel

    @property
    def num_workers(self) -> int:
        """How many microbatches are computed at once."""
        return self._workers.count

    def identity(self) -> str:
        """A digest of what is computed, as far as it can be told (`sfumato.clipping.identity`)."""
        return identity(self._model, self._loss_fn, self._prepared.engine if self._prepared else None)

    def parameters_fixed(self) -> AbstractContextManager[None]:
        """A context for many calls at the same parameters and buffers: what depends on them alone
        is computed once.

        A change inside counts from the next call on.
        """
        return self._prepared.engine.parameters_fixed() if self._prepared else nullcontext()

    def prepare(self, inputs: torch.Tensor, *targets: torch.Tensor, batch_size: int | None = None) -> Preparation:
        """Settles engine, methods and the microbatch's size before a run, and tries a microbatch of
        made-up images.

        Args:
            inputs: One example or more as they will be: shape, type and device count, values do
                not.
            targets: Likewise.
            batch_size: Examples of a call, expected: a public number.

        Returns:
            What was settled.

        Raises:
            InputError: See `clipped_grad`.
            MachineError: If memory does not hold one example.
        """
        views = as_views(inputs, targets, self._augmult)
        # Methods are chosen by their speed, so in a thread like those that will compute.
        pool = self._pool if "graph" in self._speed.engines else Workers(1)
        keep_device_guard()
        with self._preparing, interrupts_wait():  # a thread of the pool cannot make them wait
            self._prepared, self._batch_size = None, batch_size  # if this fails, the next call begins anew
            (prepared,) = pool.map(bool, lambda _, tries: self._preparation(views, targets, tries), [True])
            self._prepared = prepared
            self._targets = tuple(target[:0] for target in targets)
            return prepared

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
            targets: Each (B, ...): one for each example.
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
        views = as_views(inputs, targets, self._augmult, is_padding)
        real = torch.arange(len(views), device=views.device) if is_padding is None else (~is_padding).nonzero()[:, 0]
        prepared = self._prepared_for(views, targets) if len(real) else None
        numbers = None
        if prepared is not None and prepared.engine.draw_dims:
            numbers = example_numbers(example_ids, views)
        load: Load = lambda rows: [inputs[rows], *(target[rows] for target in targets)]  # noqa: E731
        ids = None if numbers is None else numbers[real.to(numbers.device)]
        out = self._sum(prepared, real, load, key, ids, targets)
        grad_norms, losses = torch.zeros(2, len(views), dtype=out.grad_norms.dtype, device=views.device)
        grad_norms[real], losses[real] = out.grad_norms, out.losses
        return ClippedGrad(out.grad_sum, grad_norms, losses, self.sensitivity)

    def sum_over(
        self, indices: torch.Tensor, load: Load, *, key: bytes | None = None, is_fresh: bool = False
    ) -> ClippedGrad:
        """The same for examples that memory need not hold at once: each microbatch is loaded in its
        turn.

        Args:
            indices: (B,) int64: which examples. For models that draw random numbers they are
                `example_ids`.
            load: From (m,) indices to inputs, (m, ...) or (m, K, ...), and targets, each (m, ...).
                Called by several threads where there are several workers, and by a thread of its own,
                one microbatch ahead, where there is one, but for engines "func" and "reference", which
                hold other tensors in the model meanwhile; so it must not change the model. The last
                microbatch may ask for an example twice.
            key: As in a call.
            is_fresh: Whether what `load` returns is new memory each time, which nothing writes to
                afterwards. Else it is copied, and loaded by one thread at a time.

        Raises:
            InputError: As in a call.
        """
        if not isinstance(indices, torch.Tensor) or indices.dtype != torch.int64 or indices.ndim != 1:
            raise InputError("indices must be a tensor of int64 numbers, one for each example.")
        prepared, targets = None, []
        if len(indices):
            inputs, *targets = load(indices[:1])
            prepared = self._prepared_for(as_views(inputs, tuple(targets), self._augmult), tuple(targets))
        turn = threading.Lock()

        def copied(rows: torch.Tensor) -> Sequence[torch.Tensor]:
            with turn:
                return [part.clone() for part in load(rows)]

        return self._sum(prepared, indices, load if is_fresh else copied, key, indices, tuple(targets))

    def verify(self, seed: int) -> None:
        """Holds the engine to the law once more, at the parameters as they are now
        (`sfumato.clipping.law`).

        Args:
            seed: What the made-up images are drawn from; another one finds other things.

        Raises:
            InputError: If the law no longer holds: the model or its loss has changed what it
                computes.
        """
        if self._prepared is not None:
            refuse_modes()
            with convolutions("float32"):
                self._prepared.verify(self._coefficient, seed)

    def _sum(
        self,
        prepared: Preparation | None,
        rows: torch.Tensor,
        load: Load,
        key: bytes | None,
        example_ids: torch.Tensor | None,
        targets: tuple[torch.Tensor, ...],
    ) -> ClippedGrad:
        """The one loop over microbatches.

        Args:
            prepared: None where there are no rows.
            rows: (B,), what `load` takes.
            example_ids: (B,), the number of each row's image.
            targets: Of some examples: shapes and types count.
        """
        parameters = {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        dtype = next(
            (torch.promote_types(parameter.dtype, torch.float32) for parameter in parameters.values()), torch.float32
        )
        if prepared is None:
            refuse_lazy(self._model)
            if self._prepared is not None:  # a loss that counts its calls must not tell that nobody was drawn
                self._prepared.engine.losses.renew(targets or self._targets)
            zeros = {
                name: at_least_float32(torch.zeros_like(parameter, requires_grad=False))
                for name, parameter in parameters.items()
            }
            norms, losses = torch.zeros(2, 0, dtype=dtype, device=rows.device)
            return ClippedGrad(zeros, norms, losses, self.sensitivity)
        self._targets = tuple(target[:0] for target in targets)
        seeding = seeding_of(key, example_ids) if prepared.engine.draw_dims else None

        def filled_up(positions: torch.Tensor) -> torch.Tensor:
            """The last microbatch repeats an example, and does not count it."""
            return torch.cat([positions, positions[:1].expand(prepared.filled(len(positions)) - len(positions))])

        records = torch.is_grad_enabled()  # a thread has a mode of its own

        def loaded(positions: torch.Tensor) -> Sequence[torch.Tensor]:
            with torch.set_grad_enabled(records):
                return load(rows[filled_up(positions)])

        def clipped(positions: torch.Tensor, examples: Sequence[torch.Tensor]) -> ClippedGrad:
            count, places = len(positions), filled_up(positions)
            filled = len(places)
            inputs, *given = (part.detach() for part in examples)
            targets = tuple(given)
            views = as_views(inputs, targets, self._augmult)
            if len(views) != filled:
                raise InputError(f"load gave {len(views)} examples for {filled} indices. Give one for each.")
            if not (prepared.fits(views) and prepared.knows(targets)):
                raise InputError("load gave examples of another shape or type than the first. Make them alike.")
            is_real = torch.arange(filled, device=views.device) < count
            seeds = None
            if seeding is not None:
                own_key, ids = seeding
                seeds = draw_seeds(own_key, ids[places].to(views.device), views.shape[1])
            kept = grads_kept(self._model) if prepared.name != "graph" else nullcontext()
            # Each thread has a mode of its own. An interrupt in the middle would leave PyTorch's
            # modes switched on for whatever this process does next.
            with interrupts_wait(), torch.no_grad(), kept:
                out = prepared.engine.clipped_sum(self._coefficient, Batch(views, targets, is_real, seeds))
            return ClippedGrad(out.grad_sum, out.grad_norms[:count], out.losses[:count])

        grad_sum: dict[str, torch.Tensor] = {}
        norms, losses = [], []
        microbatches = torch.arange(len(rows), device=rows.device).split(prepared.microbatch_size)
        alone = nullcontext() if prepared.engine.parallel else self._computing
        prepared.engine.losses.renew(targets)
        with alone, convolutions(self._speed.precision), prepared.engine.parameters_fixed():
            for out in self._workers.map(loaded, clipped, microbatches):
                add_to(grad_sum, out.grad_sum)
                norms.append(out.grad_norms)
                losses.append(out.losses)
        if prepared.name != "graph":
            prepared.note()
        return ClippedGrad(grad_sum, torch.cat(norms).to(dtype), torch.cat(losses).to(dtype), self.sensitivity)

    @property
    def _coefficient(self) -> Clip:
        return Clip(self.clipping_norm, self._rescale)

    @property
    def _workers(self) -> Workers:
        return self._pool if self.parallel else Workers(1, ahead=False)

    def _preparation(self, views: torch.Tensor, targets: tuple[torch.Tensor, ...], tries: bool) -> Preparation:
        with convolutions("float32"):
            return Preparation(
                self._model,
                self._loss_fn,
                self._speed,
                self._coefficient,
                views,
                targets,
                batch_size=self._batch_size,
                tries=tries,
            )

    def _prepared_for(self, views: torch.Tensor, targets: tuple[torch.Tensor, ...]) -> Preparation:
        """What holds for such a batch, made anew where it has to be."""
        # Threads may call at once. While one computes by torch.func, the model holds other tensors.
        alone = nullcontext() if self.parallel else self._computing
        with alone, self._preparing:
            prepared = self._prepared
            if prepared is not None and prepared.fits(views) and prepared.is_current():
                if prepared.knows(targets):
                    return prepared
                with contextlib.suppress(InputError), convolutions("float32"):
                    prepared.take(views, targets, self._coefficient)
                    return prepared
            self._prepared = None  # if this fails, the next call begins anew
            self._prepared = self._preparation(views, targets, tries=False)
            return self._prepared
