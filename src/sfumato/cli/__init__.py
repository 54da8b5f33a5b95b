"""The command line. One file per command; nothing imports torch before it must."""

import gc
import io
import os
import signal
import sys
import traceback
import warnings

_INTERRUPTED = 130  # what typer makes of a KeyboardInterrupt


def main() -> None:
    """Runs one command and ends the process: 0 done, 2 the input is wrong, 1 anything else."""
    if sys.platform == "win32":
        sys.exit("error: files are locked as Linux and macOS do it, and Windows has no such locks. Run it in WSL.")
    # Threads that wait by spinning make steps many times slower on busy cores; read when torch is
    # imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):  # a name that the console's encoding lacks is spelled out
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    from sfumato.training.process import stop

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK") != "0":
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (what the ranks of one run found, the first one says)
    # Imports and traces make half a million objects that stay: to look through them for garbage takes a sixth of the
    # computing of a short run.
    gc.set_threshold(20_000)
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs one command; returns its exit status."""
    import typer

    from sfumato.errors import InputError, MachineError, is_out_of_memory

    warnings.simplefilter("ignore")  # what libraries warn of is not the user's concern; our own warnings are printed
    try:
        from sfumato.cli.app import app

        status = app(arguments or ["--help"], prog_name="sfumato", standalone_mode=False) or 0
        if status == _INTERRUPTED:
            raise KeyboardInterrupt
        return status
    except (InputError, MachineError) as error:
        status = 2 if isinstance(error, InputError) else 1
        return status if isinstance(error, InputError) and error.is_said else _fail(status, str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _fail(1, "interrupted. If a run had begun, go on with it by --resume.")
    except OSError as error:
        what = f"{error.filename or 'a file'}: {error.strerror or error}"
        return _fail(1, f"{what}. Mend that, then try again; a run goes on with --resume.")
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's usage errors, whose class depends on its version
            context = getattr(error, "ctx", None)
            if context and type(error).__name__ == "NoArgsIsHelpError":  # of a group without a command
                print(context.get_help(), file=sys.stderr)
                return 2
            said = error.format_message()
            said += "" if said.endswith((".", "?")) else "."
            return _fail(2, f"{said} See `{context.command_path if context else 'sfumato'} --help`.")
        if is_out_of_memory(error):
            remedy = "Lower training.microbatch_size, or leave it out; a run goes on with --resume."
            return _fail(1, f"out of memory. {remedy}")
        if os.environ.get("SFUMATO_DEBUG"):
            traceback.print_exc()
        first = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return _fail(1, f"internal fault: {first}. Set SFUMATO_DEBUG=1 to see where, and report it.")


def _fail(status: int, message: str) -> int:
    from sfumato.cli.output import plain

    one_line = plain(" ".join(message.split()))
    rank = os.environ.get("RANK", "0") if "TORCHELASTIC_RUN_ID" in os.environ else "0"
    print(f"error{'' if rank == '0' else f' of rank {rank}'}: {one_line}", file=sys.stderr)
    return status
