"""`sfumato resume`: goes on with a run, by what its folder says."""

import shlex

import typer

from sfumato.cli import options, output
from sfumato.cli.train import show_result, trust_options
from sfumato.run_folder.ledger import MOST_LOST


def resume(
    context: typer.Context,
    run: options.Run,
    data_root: options.DataRoot = None,
    device: options.Device = "auto",
    max_lost: options.MaxLost = MOST_LOST,
    trust: options.Trust = None,
    no_cache: options.NoCache = False,
    json_: options.Json = False,
) -> None:
    """Goes on with an interrupted run; one that is complete shows its result again."""
    if no_cache:
        from sfumato.data import store

        context.with_resource(store.switched_off())
    from sfumato.training.interrupt import Interrupted
    from sfumato.training.trainer import resume as go_on

    try:
        result = go_on(run, data_root=data_root, device=device, max_lost=max_lost, trust=trust or ())
    except Interrupted as interrupted:
        words = ["sfumato", "resume", str(run), *trust_options(trust or [])]
        words += ["--data-root", str(data_root)] if data_root is not None else []
        words += ["--device", device] if device != "auto" else []
        words += ["--no-cache"] if no_cache else []
        output.note(f"{interrupted}; everything is kept. Go on with: {shlex.join(words)}")
        raise typer.Exit(1) from None
    if json_:
        output.print_json(result.as_json())
    else:
        show_result(result, trust or [])
