"""How to compute: what changes time, memory and rounding, and never what is claimed."""

import dataclasses

import torch

from sfumato.errors import InputError

# What images and weights are rounded to where they meet; None leaves them as they are.
LOW_PRECISIONS = {"float32": None, "tf32": None, "bf16": torch.bfloat16}
# The fastest first.
ENGINES = ("graph", "func", "reference")
# For `sfumato.models.layers.Classifier`, which it takes before all others.
CLOSED_FORM = "closed_form"


@dataclasses.dataclass(frozen=True)
class Speed:
    """Settings of `sfumato.clipping.clipped_grad` that decide speed alone.

    Attributes:
        engine: Of `ENGINES`, or "closed_form", or "auto": the first of them that takes the model.
        microbatch_size: Examples differentiated at once; None: see `sfumato.clipping.microbatch`.
        methods: How engine "graph" computes at each operation, as recorded; None: measured.
        precision: "float32", "tf32" or "bf16"; see `sfumato.clipping.clipped_grad`.
        compile: Whether a microbatch becomes one compiled graph.
        workers: Microbatches computed at once on a CPU, one thread each; 1: one after another, by
            all threads.

    Raises:
        InputError: If one of them is out of range, or two do not go together.
    """

    engine: str = "auto"
    microbatch_size: int | None = None
    methods: dict[str, str] | None = None
    precision: str = "float32"
    compile: bool = False
    workers: int = 1

    def __post_init__(self) -> None:
        if self.engine not in ("auto", CLOSED_FORM, *ENGINES):
            raise InputError(f'engine "{self.engine}" is unknown. Known are auto, {", ".join(ENGINES)}.')
        if self.microbatch_size is not None and not _is_count(self.microbatch_size):
            raise InputError(
                f"microbatch_size must be a whole number, at least 1, not {self.microbatch_size!r}. Leave it out to "
                "have it chosen."
            )
        if self.precision not in LOW_PRECISIONS:
            raise InputError(f'precision "{self.precision}" is unknown. Known are {", ".join(LOW_PRECISIONS)}.')
        if not _is_count(self.workers):
            raise InputError(f"workers must be a whole number, at least 1, not {self.workers!r}.")
        if self._needs_graph and self.engine not in ("auto", "graph"):
            raise InputError(f'compile and precision "bf16" need engine "graph", not "{self.engine}".')

    @property
    def engines(self) -> tuple[str, ...]:
        """The names to try, in order."""
        if self._needs_graph:
            return ("graph",)
        return ENGINES if self.engine == "auto" else (self.engine,)

    @property
    def _needs_graph(self) -> bool:
        return self.compile or self.precision == "bf16"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
