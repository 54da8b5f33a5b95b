"""Faults of the system, made up."""

import types


def of_the_system(function):
    """The same function as one of the module `os`: what it raises is the system's, not a signal's handler's."""
    return types.FunctionType(
        function.__code__,
        {**function.__globals__, "__name__": "os"},
        argdefs=function.__defaults__,
        closure=function.__closure__,
    )
