"""Notes the errors that operations raise, whoever handles them."""

from typing import Any

from torch.overrides import TorchFunctionMode

from sfumato.torch_internals import TorchDispatchMode


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
