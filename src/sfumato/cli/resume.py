"""`sfumato resume`: goes on with a run, by what its folder says."""

from sfumato.cli import options, output
from sfumato.cli.train import resume_command, show_result
from sfumato.run_folder.ledger import MOST_LOST


def resume(
    run: options.Run,
    data_root: options.DataRoot = None,
    device: options.Device = "auto",
    max_lost: options.MaxLost = MOST_LOST,
    trust: options.Trust = None,
    no_cache: options.NoCache = False,
    json_: options.Json = False,
) -> None:
    """Goes on with an interrupted run; one that is complete shows its result again."""
    from sfumato.training.trainer import resume as go_on

    again = resume_command(run, trust or [], device, no_cache, max_lost, data_root)
    with output.interruptible(command=again, kept="everything is kept"):
        result = go_on(run, data_root=data_root, device=device, max_lost=max_lost, trust=trust or ())
    output.answer(result, json_, lambda result: show_result(result, trust or []))
