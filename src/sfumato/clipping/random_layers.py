"""Random numbers inside a model, drawn for each view by itself: from the step's key, the example's
number and the view's.

PyTorch's generator hands random numbers out by place: leave one image out, and all images after
it meet other masks, so that the clipped sum moves by far more than one contribution. Here the
numbers of a view depend on nothing but (key, example, view, how many draws came before), so that
a clipped gradient is a function of its own image, whatever the batch, the microbatches, the
threads and the engine. They need not be secret: any fixed numbers keep one image's bound.
"""

import hashlib
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sfumato.errors import InputError
from sfumato.torch_internals import TorchDispatchMode, arguments_of

_UNIT = 2.0**-24
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
# Of PyTorch's operations, at the level where dropout, stochastic depth and attention have been taken apart; some end
# in "_", "_like" or "_functional".
_KINDS = ("bernoulli", "uniform", "normal", "exponential", "rand", "randn", "randint", "native_dropout")
_MORE = (
    "the model draws more random numbers than it did for made-up images: what it draws would "
    "depend on values or on the number of calls. Draw as many for each image at every call."
)


def draw_seeds(key: bytes, example_ids: torch.Tensor, views: int) -> torch.Tensor:
    """(B, K, 2) 32-bit words, one pair for each view of each example.

    Args:
        key: Of this step.
        example_ids: (B,) int64: which examples these are, the same in every batch.
        views: K >= 1.
    """
    digest = hashlib.sha256(b"random numbers inside a model" + key).digest()
    words = [int.from_bytes(digest[4 * i : 4 * i + 4], "little", signed=True) for i in range(4)]
    low, high = (example_ids & 0xFFFFFFFF).to(torch.int32), (example_ids >> 32).to(torch.int32)
    view = torch.arange(views, dtype=torch.int32, device=example_ids.device)
    lanes = []
    for lane in range(2):
        of_example = _mix(_mix(low ^ words[lane]) + high ^ words[2 + lane])
        lanes.append(_mix(of_example[:, None] + _mix(view + words[lane])))
    return torch.stack(lanes, dim=-1)


class KeyedDraws(TorchDispatchMode):
    """Within, every random operation gives the numbers of the rows that it draws for.

    Args:
        seeds: (B, K, 2) from `draw_seeds`; None: nothing may be drawn.
        dims: For each draw in turn, the dimension that counts rows (`shapes` of two runs tell).
            None: there is one row.
        grouped: Whether `torch.func.vmap` over the B examples is in use: tensors then come as (B,
            *of one example's K rows).
        refusal: What is said where nothing more may be drawn.

    Attributes:
        shapes: What was drawn so far, as the shapes of each draw.
        narrow: Whether an operation gave less than double precision.
    """

    def __init__(
        self,
        seeds: torch.Tensor | None,
        dims: Sequence[int] | None = None,
        *,
        grouped: bool = False,
        refusal: str = _MORE,
    ) -> None:
        super().__init__()
        self.seeds, self.dims, self.grouped, self.refusal = seeds, dims, grouped, refusal
        self.shapes: list[tuple[int, ...]] = []
        self.narrow = False
        self._held = ExitStack()

    def __enter__(self) -> "KeyedDraws":
        if self.seeds is not None and self.seeds.is_cuda:  # the others draw inside of one kernel, by place
            self._held.enter_context(sdpa_kernel(SDPBackend.MATH))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._held.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            out = func(*args, **(kwargs or {}))
            self.narrow |= isinstance(out, torch.Tensor) and out.dtype in _NARROW
            return out
        given = arguments_of(func, args, kwargs or {})
        if given.get("dropout_p") == 0 or given.get("train") is False or given.get("training") is False:
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        kind = name.removesuffix("_").removesuffix("_like").removesuffix("_functional")
        dtype = given.get("dtype") or getattr(given.get("self"), "dtype", None) or torch.float32
        if kind not in _KINDS or dtype.is_complex or "out" in given:
            raise InputError(
                f"the model draws random numbers by {name}, which cannot be drawn for each image by itself. Use "
                "dropout, bernoulli, rand, randn, randint, normal_ or exponential_ draws with one entry or more for "
                "each row."
            )
        made = self._made(kind, given)
        return given["self"].copy_(made) if name.endswith("_") else made

    def _made(self, kind: str, given: dict[str, Any]) -> Any:
        """What an operation gives: a new tensor of a given size, or like what it takes."""
        like = [given[name] for name in ("self", "input", "mean", "std") if isinstance(given.get(name), torch.Tensor)]
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in like)) if like else given["size"]
        device = given.get("device") or (like[0].device if like else None)
        default = torch.int64 if kind == "randint" else torch.get_default_dtype()
        dtype = given.get("dtype") or (like[0].dtype if like else default)
        if kind == "normal":
            return (self.normal(shape, device) * given["std"] + given["mean"]).to(dtype)
        if kind == "randn":
            return self.normal(shape, device).to(dtype)
        uniform = self.uniform(shape, device)
        if kind == "native_dropout":
            kept = 1 - given["p"]
            mask = uniform < kept
            return given["input"] * mask * (1 / kept if kept else 0.0), mask
        if kind == "bernoulli":
            return (uniform < given.get("p", given["self"])).to(dtype)
        if kind == "uniform":
            return (uniform * (given["to"] - given["from"]) + given["from"]).to(dtype)
        if kind == "exponential":
            return (-torch.log1p(-uniform) / given["lambd"]).to(dtype)
        if kind == "randint":
            low = given.get("low", 0)
            return ((uniform.double() * (given["high"] - low)).floor() + low).to(dtype)
        uniform = uniform.to(dtype)
        return uniform.clamp(max=1 - torch.finfo(dtype).eps / 2)  # rounded to fewer digits, the largest would be one

    def uniform(self, shape: Sequence[int], device: torch.device | str | None) -> torch.Tensor:
        """Uniform in [0, 1), float32, in steps of 2^-24; each row's numbers are its own."""
        if self.seeds is None or (self.dims is not None and len(self.shapes) >= len(self.dims)):
            raise InputError(self.refusal)
        site = len(self.shapes)
        self.shapes.append(tuple(shape))
        seeds = self.seeds.to(device or "cpu")
        own = list(shape[1:] if self.grouped else shape)
        groups, rows = seeds.shape[:2] if self.grouped else (1, seeds.shape[0] * seeds.shape[1])
        dim = 0 if rows == 1 or self.dims is None else self.dims[site]
        if rows > 1:
            if not own or own[dim] % rows:
                shown = f"random numbers of shape {tuple(shape)} for {rows} rows"
                raise InputError(f"the model draws {shown}: whose they are does not show.")
            own[dim] //= rows
        flat = _words(seeds.reshape(-1, 2), site, math.prod(own))  # (groups * rows, numbers of one row)
        numbers = flat.view(groups, rows, *own).movedim(1, 1 + dim) if rows > 1 else flat.view(groups, *own)
        return numbers.reshape(tuple(shape)).mul(_UNIT)

    def normal(self, shape: Sequence[int], device: torch.device | str | None) -> torch.Tensor:
        """Standard normal, float32, by Box and Muller."""
        radius, angle = self.uniform(shape, device), self.uniform(shape, device)
        return (-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * math.pi * angle)


class DrawShapes(KeyedDraws):
    """Within, every draw gives its middle: what shapes are drawn is all that is asked."""

    def __init__(self) -> None:
        super().__init__(None)

    def uniform(self, shape: Sequence[int], device: torch.device | str | None) -> torch.Tensor:
        self.shapes.append(tuple(shape))
        return torch.full(tuple(shape), 0.5, device=device)


def row_dims(single: Sequence[tuple[int, ...]], batch: Sequence[tuple[int, ...]], rows: int) -> tuple[int, ...]:
    """For each draw, the dimension along which the rows of a batch lie, from what one row and what
    a batch of rows drew.

    Raises:
        InputError: If a draw is for all rows together, or the number of draws differs.
    """
    if len(single) != len(batch):
        raise InputError(
            "the number of random numbers that the model draws depends on its images or on how many there are, so that "
            "one image would shift another's. Draw as many for each image, whatever it shows."
        )
    dims = []
    for one, many in zip(single, batch, strict=True):
        grown = [dim for dim, (size, larger) in enumerate(zip(one, many, strict=False)) if size != larger]
        if len(one) != len(many) or len(grown) != 1 or many[grown[0]] != rows * one[grown[0]]:
            raise InputError(
                f"the model draws random numbers of shape {many} for {rows} rows: they belong to the whole batch. "
                'Draw for each row (torchvision\'s StochasticDepth: mode="row"), or leave the layer out.'
            )
        dims.append(grown[0])
    return tuple(dims)


def _words(seeds: torch.Tensor, site: int, count: int) -> torch.Tensor:
    """(rows, count) numbers of 24 bits, as float32: a hash of seed, draw and position."""
    position = torch.arange(count, dtype=torch.int32, device=seeds.device)
    first, second = (_mix(seeds[:, lane] + _signed(site * 0x9E3779B9 + lane)) for lane in range(2))
    hashed = _mix(_mix(position ^ first[:, None]) + second[:, None])
    return (hashed & 0xFFFFFF).to(torch.float32)


def _mix(word: torch.Tensor) -> torch.Tensor:
    """A bijection of 32 bits in which every bit depends on every other (C. Wellons, lowbias32).
    PyTorch's int32 wraps around.
    """
    word = word ^ ((word >> 16) & 0xFFFF)
    word = word * 0x7FEB352D
    word = word ^ ((word >> 15) & 0x1FFFF)
    word = word * _signed(0x846CA68B)
    return word ^ ((word >> 16) & 0xFFFF)


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - 2**32 if word >= 2**31 else word
