r"""The one public way to a privatisable gradient: a sum of clipped per-example gradients."""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from sfumato.clipping.comparison import complaint as complaint_of
from sfumato.clipping.comparison import complaint_of_speed
from sfumato.clipping.draws import draw_seeds
from sfumato.clipping.func import FuncEngine
from sfumato.clipping.graph.engine import GraphEngine, SiteReport
from sfumato.clipping.graph.passes import LOW_PRECISIONS
from sfumato.clipping.law import Law, Truth, first_line, refuse_lazy
from sfumato.clipping.norms import at_least_float32
from sfumato.clipping.numerics import are_exact
from sfumato.clipping.protocol import Batch, ClippedGrad, Engine, Loss, add_to, is_out_of_memory
from sfumato.clipping.reference import ReferenceEngine
from sfumato.clipping.signature import signature
from sfumato.clipping.stand_in import put_back
from sfumato.errors import InputError

# Below, gradients of norm C have entries whose squares vanish in float32: they would be taken for zero, and not be
# clipped.
MIN_CLIPPING_NORM = 1e-12
_SLOW = ', or use engine="reference", which is slow'
ENGINES: dict[str, Callable[..., Engine]] = {"graph": GraphEngine, "func": FuncEngine, "reference": ReferenceEngine}

# Float values that the per-example gradients and saved activations of one microbatch may take:
# 256 MiB in float32. The cost of calling each operation is small beside its work from some
# hundred examples on (28x28 and 8x8 images, one and two CPU threads).
_MICROBATCH_VALUES = 2**26
_MICROBATCH_MAX = 512
# The last microbatch is filled up to a multiple of this fraction of the others' size: few shapes,
# so that the device's prepared kernels are found again, and little work on padding.
_PADDING_STEPS = 8


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
) -> "GradFn":
    r"""Turns a model and a per-row loss into a function that sums clipped per-example gradients.

    For examples :math:`x_1, \dots, x_B` with K views each, that function computes

    .. math:: \sum_i s \min(1, C / \|g_i\|_2)\, g_i, \quad g_i = \frac1K \sum_j \nabla_\theta \ell(\theta, x_{ij}),

    where C is ``clipping_norm`` and s is 1/C if ``rescale_to_unit_norm``, else 1
    (`De et al. (2022) <https://arxiv.org/abs/2204.13650>`_, Eq. 3 and 4). Noise and the
    division by the expected batch size are the caller's.

    Guarantee: putting one example in or leaving it out moves the sum by at most
    ``grad_fn.sensitivity`` in L2 norm, up to float rounding. Padding, and examples whose
    loss or gradient norm is not finite, contribute exactly zero. The model is left as it
    was: parameters, buffers and every ``.grad``.

    At its first batch the function holds the model and the engine to that, on made-up images alone
    (`sfumato.clipping.law`): they must agree with plain autograd on single images, whatever lies beside these and came
    before them.

    Random numbers inside the model (dropout, stochastic depth) are drawn for each view by itself from ``key`` and the
    example's number: PyTorch's own generator hands them out by place, so that one image more would change all others'
    masks.

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
            moves by no more than float rounding. None: as many as fit in 256 MiB, at most 512.
        engine: "graph" (the fast one), "func" (torch.func), "reference" (one view at a time,
            plain autograd) or "auto": the first of them that takes the model; `GradFn.refusal` says why not the faster.
        methods: What an earlier `GradFn.methods` recorded, to repeat its rounding. With no more than
            {"memory_format": "contiguous"} nothing is measured, and every run rounds alike.
        precision: "bf16" rounds images and weights where they meet, and what follows, to bfloat16. Parameters,
            norms, coefficients and sums stay in float32. Engine "graph" alone.
        compile: Compile the whole of a microbatch to one graph, which takes a minute or two once. Engine
            "graph" alone; every microbatch is then filled up to the same size.

    Returns:
        ``grad_fn(inputs, *targets, is_padding=None, key=None, example_ids=None) -> ClippedGrad``; see
        `GradFn.__call__`.

    Raises:
        InputError: (a ValueError) If ``clipping_norm`` is not positive and finite or another
            argument is out of range; at the first batch, if the model mixes examples or a
            trainable parameter has no per-example gradient (it is named).
    """
    if not (math.isfinite(clipping_norm) and clipping_norm >= MIN_CLIPPING_NORM):
        raise InputError(
            f"clipping_norm must be finite and at least {MIN_CLIPPING_NORM:g}, not {clipping_norm}: it bounds what "
            "one example contributes, and "
            "gradients shorter than that have squares that float32 does not hold. Choose a larger one, or scale the "
            "loss."
        )
    if augmult < 0:
        raise InputError(f"augmult must be at least 0, not {augmult}. 0 means no augmentation.")
    if microbatch_size is not None and microbatch_size < 1:
        raise InputError(f"microbatch_size must be at least 1, not {microbatch_size}. Leave it out to have it chosen.")
    if engine not in ("auto", *ENGINES):
        raise InputError(f'engine "{engine}" is unknown. Known are auto, {", ".join(ENGINES)}.')
    if precision not in LOW_PRECISIONS:
        raise InputError(f'precision "{precision}" is unknown. Known are {", ".join(LOW_PRECISIONS)}.')
    if (compile or precision != "float32") and engine not in ("auto", "graph"):
        raise InputError(f'compile and precision "bf16" need engine "graph", not "{engine}".')
    return GradFn(
        model,
        loss_fn,
        clipping_norm,
        augmult,
        rescale_to_unit_norm,
        microbatch_size,
        engine,
        methods,
        precision,
        compile,
    )


@dataclasses.dataclass(frozen=True)
class _Clip:
    """What a gradient of each norm is multiplied by: s min(1, C / norm). Two that are equal are the same function."""

    clipping_norm: float
    rescale: bool

    def __call__(self, norms: torch.Tensor) -> torch.Tensor:
        scale = (
            torch.clamp(1 / norms, max=1 / self.clipping_norm)
            if self.rescale
            else torch.clamp(self.clipping_norm / norms, max=1.0)
        )
        # Below, float32 has few digits left and would round up: such a gradient is left out.
        return torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)


class GradFn:
    """What `clipped_grad` returns: call it on a batch.

    Attributes:
        sensitivity: Bound on one example's contribution to `grad_sum`, in L2 norm: what
            the noise is a multiple of.
        clipping_norm: C, as it was given.
        microbatch_size: Examples differentiated at once; None until the first batch decides.
        engine: The name of the engine in use; "auto" until the first batch decides.
        refusal: Why "auto" could not take engine "graph", and why not "func" where it took "reference", which
            computes one image at a time and is slow; None if it could.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        clipping_norm: float,
        augmult: int,
        rescale_to_unit_norm: bool,
        microbatch_size: int | None,
        engine: str,
        methods: dict[str, str] | None,
        precision: str,
        compile: bool,
    ) -> None:
        self.microbatch_size = microbatch_size
        self.engine = self._wanted = engine
        self._model = model
        self._loss_fn = loss_fn
        self.clipping_norm = clipping_norm
        self._augmult = augmult
        self._rescale = rescale_to_unit_norm
        self._methods = methods
        self._precision = precision
        self._compiles = compile
        self._engine: Engine | None = None
        self._is_double = True
        self._targets: set[Any] = set()
        self.refusal: str | None = None
        self._preparing = threading.Lock()

    @property
    def methods(self) -> dict[str, str]:
        """How engine "graph" computes at each operation: decides speed and rounding. Empty for other engines, and
        before the first batch.
        """
        return {} if self._engine is None else dict(self._engine.methods)

    @property
    def site_reports(self) -> list[SiteReport]:
        """Every place where a weight meets images, as engine "graph" sees it; empty for other engines, and before the
        first batch.
        """
        return self._engine.site_reports() if isinstance(self._engine, GraphEngine) else []

    @property
    def parallel(self) -> bool:
        """Whether several threads may call it at once; False before the first batch."""
        return self._engine is not None and self._engine.parallel

    @property
    def sensitivity(self) -> float:
        return 1.0 if self._rescale else self.clipping_norm

    def parameters_fixed(self) -> AbstractContextManager[None]:
        """A context for many calls at the same parameters and buffers: what depends on them alone is computed once.

        Whoever changes one of them inside gets gradients at the old values.
        """
        return nullcontext() if self._engine is None else self._engine.parameters_fixed()

    def __call__(
        self,
        inputs: torch.Tensor,
        *targets: torch.Tensor,
        is_padding: torch.Tensor | None = None,
        key: bytes | None = None,
        example_ids: torch.Tensor | None = None,
    ) -> ClippedGrad:
        """The sum of the clipped gradients of a batch; any number of examples is allowed, none included.

        Args:
            inputs: (B, ...), or (B, K, ...) where ``augmult`` = K >= 1.
            targets: Each (B, ...): one for each example.
            is_padding: (B,) booleans: examples that do not count.
            key: For models that draw random numbers, else not looked at: 32 bytes *of this step alone*. With one
                key for all steps an image would meet the same masks at every step.
            example_ids: For models that draw random numbers, else not looked at: (B,) int64, which image each example
                is, the same whenever it is drawn. Its place in the batch is no such number: it changes with who else is
                drawn, and one image more would change all others' masks.

        Raises:
            InputError: See `clipped_grad`; or if key or example_ids are missing.
        """
        _refuse_cached()
        views = self._as_views(inputs, targets, is_padding)  # (B, K, ...)
        real = torch.arange(len(views), device=views.device) if is_padding is None else (~is_padding).nonzero()[:, 0]
        if len(real) and not (self._is_prepared(views) and _kinds(targets) in self._targets):
            with self._preparing:  # threads may call at once
                if not self._is_prepared(views):
                    self._targets = set()
                    self._prepare(views, targets, len(real))
                    self._note(views)
                elif _kinds(targets) not in self._targets:
                    self._prepare(views, targets, len(real), self._engine)
                self._targets.add(_kinds(targets))
        parameters = {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        dtype = next(
            (torch.promote_types(parameter.dtype, torch.float32) for parameter in parameters.values()), torch.float32
        )
        grad_norms, losses = torch.zeros(2, len(views), dtype=dtype, device=views.device)
        grad_sum: dict[str, torch.Tensor] = {}
        if len(real) == 0:
            refuse_lazy(self._model)
            grad_sum = {
                name: at_least_float32(torch.zeros_like(parameter, requires_grad=False))
                for name, parameter in parameters.items()
            }
            return ClippedGrad(grad_sum, grad_norms, losses)
        assert self._engine is not None and self.microbatch_size is not None
        seeds = self._seeds(key, example_ids, views)
        # What a model's own code notes of private images in its attributes goes again.
        kept = put_back(self._model) if self.engine != "graph" else nullcontext()
        with self._engine.parameters_fixed(), torch.no_grad(), kept:
            for chosen in real.split(self.microbatch_size):
                # The last microbatch repeats an example, and does not count it.
                filled = torch.cat([chosen, chosen[:1].expand(self._filled(len(chosen)) - len(chosen))])
                is_real = torch.arange(len(filled), device=views.device) < len(chosen)
                own_seeds = None if seeds is None else seeds[filled]
                batch = Batch(views[filled], tuple(target[filled] for target in targets), is_real, own_seeds)
                out = self._engine.clipped_sum(self._coefficient, batch)
                add_to(grad_sum, out.grad_sum)
                grad_norms[chosen] = out.grad_norms[: len(chosen)].to(dtype)
                losses[chosen] = out.losses[: len(chosen)].to(dtype)
        if self.engine != "graph":  # what the model's own code noted in helpers is no change from outside
            self._note(views)
        return ClippedGrad(grad_sum, grad_norms, losses)

    def verify(self, seed: int) -> None:
        """Holds the engine to the law once more, at the parameters as they are now (`sfumato.clipping.law`).

        Args:
            seed: What the made-up images are drawn from; another one finds other things.

        Raises:
            InputError: If the law no longer holds: the model or its loss has changed what it computes.
        """
        if self._engine is not None:
            _refuse_cached()
            truth = self._law.truth(self._is_double, seed, shifted=False)
            assert self.microbatch_size is not None
            self._hold(self._engine, truth, self.microbatch_size if self._compiles else 2)

    def _filled(self, count: int) -> int:
        """How many examples a microbatch of so many is filled up to: few sizes, so that prepared kernels are found
        again.
        """
        assert self.microbatch_size is not None
        if self.engine == "reference" or count >= self.microbatch_size:
            return count
        step = self.microbatch_size if self._compiles else -(-self.microbatch_size // _PADDING_STEPS)
        return -(-count // step) * step

    def _seeds(self, key: bytes | None, example_ids: torch.Tensor | None, views: torch.Tensor) -> torch.Tensor | None:
        """Of the random numbers inside the model; None if it draws none."""
        assert self._engine is not None
        if not self._engine.draw_dims:
            return None
        if not isinstance(key, bytes) or len(key) != 32 or example_ids is None:
            raise InputError(
                "the model draws random numbers: give key, 32 bytes of this step alone, and example_ids, the number "
                "of each image. "
                "A place in the batch is no such number, since one image more would change all others' masks."
            )
        if example_ids.shape != (len(views),) or example_ids.dtype != torch.int64:
            raise InputError(
                f"example_ids must be one int64 for each of the {len(views)} examples, not {example_ids.dtype} "
                f"{tuple(example_ids.shape)}."
            )
        return draw_seeds(key, example_ids.to(views.device), views.shape[1])

    @property
    def _coefficient(self) -> "_Clip":
        return _Clip(self.clipping_norm, self._rescale)

    def _as_views(
        self, inputs: torch.Tensor, targets: tuple[torch.Tensor, ...], is_padding: torch.Tensor | None
    ) -> torch.Tensor:
        if not isinstance(inputs, torch.Tensor) or not all(isinstance(target, torch.Tensor) for target in targets):
            raise InputError("inputs and targets must be tensors. Convert them, by torch.as_tensor for example.")
        if self._augmult and (inputs.ndim < 3 or inputs.shape[1] != self._augmult):
            raise InputError(
                f"inputs of shape {tuple(inputs.shape)} do not hold augmult = {self._augmult} views per example. Give "
                "them as (B, K, C, H, W)."
            )
        for target in targets:
            if len(target) != len(inputs):
                raise InputError(
                    f"targets for {len(target)} examples do not match inputs of {len(inputs)}. Give one target for "
                    "each example."
                )
        if is_padding is not None and (is_padding.dtype != torch.bool or is_padding.shape != (len(inputs),)):
            raise InputError(
                f"is_padding must be one boolean for each of the {len(inputs)} examples, not {is_padding.dtype} "
                f"{tuple(is_padding.shape)}."
            )
        if torch.is_autocast_enabled(inputs.device.type):
            raise InputError(
                "torch.autocast would round norms and sums, on which privacy rests. Leave it, and give "
                'precision="bf16" instead.'
            )
        if not are_exact("matmul", inputs.device):
            raise InputError(
                "float32 products are set to fewer digits (TF32 or bfloat16), which would round norms and sums, on "
                "which privacy rests."
                ' Call torch.set_float32_matmul_precision("highest"), and give precision="bf16" for speed.'
            )
        return inputs if self._augmult else inputs.unsqueeze(1)

    def _prepare(
        self,
        views: torch.Tensor,
        targets: tuple[torch.Tensor, ...],
        count: int,
        engine: Engine | None = None,
    ) -> None:
        """Finds an engine that keeps the law, and settles how it computes. Looks at shapes and types of what it is
        given, never at values.

        Args:
            count: So many examples will be computed at once, if the microbatch holds as many.
            engine: One that keeps the law with other targets, to be taken again if it does with these.
        """
        self._engine = None  # if this fails, the next call begins anew
        row = torch.zeros(1, *views.shape[2:], dtype=views.dtype, device=views.device)
        self._law = Law(self._model, self._loss_fn, row, tuple(target[:0] for target in targets), views.shape[1])
        truth = self._law.examine()
        self._is_double = truth.double
        if self.microbatch_size is None:
            num_parameters = sum(parameter.numel() for parameter in self._model.parameters() if parameter.requires_grad)
            self.microbatch_size = max(
                1, min(_MICROBATCH_MAX, _MICROBATCH_VALUES // (num_parameters + views.shape[1] * truth.values_saved))
            )
        if engine is not None:
            with contextlib.suppress(InputError):
                self._hold(engine, truth, self._filled(min(count, self.microbatch_size)))
                self._engine = engine
                return
            self._targets = set()
        names = tuple(ENGINES) if self._wanted == "auto" else (self._wanted,)  # the fastest first
        if self._compiles or self._precision != "float32":
            names = ("graph",)
        refusals: list[str] = []
        for name in names:
            self.engine = name
            try:
                self._engine = self._build(name, row, truth, self._filled(min(count, self.microbatch_size)))
                break
            except InputError as refusal:  # what keeps it from the fast engine keeps nothing from the general one
                if name == names[-1]:
                    raise
                refusals.append(str(refusal))
        self.refusal = "; and ".join(refusal.rstrip(".") for refusal in refusals) or None

    def _build(self, name: str, row: torch.Tensor, truth: Truth, count: int) -> Engine:
        """An engine of that name, tried on so many made-up examples.

        Raises:
            InputError: If it cannot take the model, or breaks the law.
        """
        engine: Engine
        try:
            if name == "graph":
                engine = GraphEngine(self._model, self._loss_fn, row, self._methods, self._precision, self._compiles)
            else:
                engine = ENGINES[name](self._model, self._loss_fn, row, self._methods)
            engine.draw_dims = truth.draw_dims
            engine.choose_methods(self._law.batch(count, truth))
        except InputError:
            raise
        except Exception as error:  # engines raise whatever the model's code runs into
            if is_out_of_memory(error):
                raise
            raise InputError(f'engine "{name}" fails on this model: {first_line(error)}') from error
        self._hold(engine, truth, count)
        return engine

    def _hold(self, engine: Engine, truth: Truth, count: int) -> None:
        with engine.parameters_free():
            with engine.plainly():
                complaint = complaint_of(self._law, engine, truth)
            if complaint is None and engine.rounds_by:
                complaint = complaint_of_speed(self._law, engine, truth, self._coefficient, count)
        if complaint is not None:
            others = _SLOW if self._wanted in ("graph", "func") else ""
            raise InputError(f'engine "{self.engine}" {complaint}. Take that out{others}.')

    def _is_prepared(self, views: torch.Tensor) -> bool:
        if self._engine is None or self._shape != _shape(views):
            return False
        return self._signature.holds(signature(self._model))

    def _note(self, views: torch.Tensor) -> None:
        """What the engine is for: with another mode, layer, setting, hook, image size or precision it is another."""
        self._shape, self._signature = _shape(views), signature(self._model)


def _refuse_cached() -> None:
    if parametrize._cache_enabled:
        raise InputError(
            "torch.nn.utils.parametrize.cached() keeps weights from call to call, with a record that autograd has used "
            "up, and gradients would be wrong. Leave it: `with grad_fn.parameters_fixed():` computes weights once."
        )


def _kinds(targets: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """A loss may be another function of two targets than of one, and draw random numbers for them."""
    return tuple((target.shape[1:], target.dtype, target.device) for target in targets)


def _shape(views: torch.Tensor) -> tuple[Any, ...]:
    return views.shape[2:], views.dtype, views.device, are_exact("conv", views.device)
