"""The two ways in which a command ends without doing its work."""


class InputError(ValueError):
    """The user's input is wrong: exit status 2.

    The message is one line: the object, the reason, the remedy.
    """


class MachineError(RuntimeError):
    """The machine failed, not the input (a full disk, a fault): exit status 1.

    The message is one line: what failed, what is left, how to go on.
    """
