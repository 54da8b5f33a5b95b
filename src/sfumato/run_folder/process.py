"""Which process this is: what one opened, another that was forked off it has no part in."""

import os

_num_forks = 0


def _forked() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_forked)


def this_process() -> tuple[int, int]:
    """Tells a process from those that it was forked from: in a container, both may have one number."""
    return os.getpid(), _num_forks
