"""Commands for runs that exist: fork, delete, prune, rescore, adjust, pause, resume, report, doctor, down."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rl_core.execution import StageName

app = typer.Typer()
out = Console()

Sets = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; may be repeated.")]
Run = Annotated[str, typer.Argument(help="Name of a run.")]
Why = Annotated[str, typer.Option("--why", help="Reason, for those who read the run later.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@app.command()
def fork(
    run: Run,
    new: Annotated[str, typer.Argument(help="Name of the new run.")],
    iteration: Annotated[int, typer.Option("--iteration", min=0, help="First iteration that is the new run's own.")],
    from_: Annotated[StageName, typer.Option("--from", help="First stage of it to execute.")] = "generate",
    set_: Sets = [],  # noqa: B006 - typer copies it
) -> None:
    """Start a new run from the outputs of another one up to a stage; nothing is copied."""
    from tasks.lineage.forks import fork

    fork(run, new, iteration, from_, set_)
    out.print(f"{new} goes on from {run} at iteration {iteration}, {from_}: rlstages run {new}", highlight=False)


@app.command()
def delete(
    run: Run,
    with_versions: Annotated[
        bool, typer.Option("--with-versions", help="Also remove the model versions in MLflow that lead to it.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Remove a run's folder. Refused while a fork, an alias in MLflow or a process needs it."""
    from tasks.lineage.deletion import check_deletable, delete

    bytes_ = check_deletable(run, with_versions)
    if yes or typer.confirm(f"remove run {run}, {bytes_ / 1e9:.2f} GB?"):
        delete(run, with_versions)
        out.print(f"run {run} is gone", highlight=False)


@app.command()
def prune(
    run: Run,
    keep_trainer_states: Annotated[
        int | None, typer.Option(min=1, help="Also remove the optimizer states of all but so many newest policies.")
    ] = None,
    yes: Yes = False,
) -> None:
    """List what no iteration, model version or fork of a run needs, and remove it."""
    from tasks.lineage.retention import plan, print_plan, remove

    found = plan(run, keep_trainer_states)
    print_plan(out, run, found)
    if found and (yes or typer.confirm("remove all of it?")):
        remove(run, keep_trainer_states)


@app.command()
def rescore(
    run: Run,
    set_: Sets = [],  # noqa: B006 - typer copies it
) -> None:
    """What other rewards would have said of a run's completions; the run itself is not touched."""
    from tasks.rescore import print_comparison, rescore

    with out.status("rescoring") as shown:
        found = rescore(run, set_, lambda done, of: shown.update(f"rescored {done} of {of} iterations"))
    print_comparison(out, found)


@app.command()
def adjust(
    run: Run,
    set_: Sets = [],  # noqa: B006 - typer copies it
    why: Why = "",
) -> None:
    """Change settings of a run from its next iteration on, also while it runs. Without --set: list the changes."""
    from tasks.live.adjustments import adjust, print_adjustments

    if set_:
        adjust(run, set_, why)
    print_adjustments(out, run)


@app.command()
def pause(run: Run, why: Why = "") -> None:
    """Let a run stop before its next iteration until it is resumed."""
    from tasks.live.pausing import pause

    pause(run, why)
    out.print(f"{run} stops before its next iteration; `rlstages resume {run}` lets it go on", highlight=False)


@app.command()
def resume(run: Run) -> None:
    """Let a paused run go on."""
    from tasks.live.pausing import resume

    resume(run)
    out.print(f"{run} goes on if a process works on it, else start it: rlstages run {run}", highlight=False)


@app.command()
def report(
    run: Run,
    output: Annotated[Path | None, typer.Option("--output", help="HTML file; default: report.html of the run.")] = None,
) -> None:
    """Write one self-contained HTML page about a run."""
    from tasks.report import write_report

    out.print(f"{write_report(run, output)}", soft_wrap=True, highlight=False)


@app.command()
def doctor(fix: Annotated[bool, typer.Option("--fix", help="Repair what can be repaired.")] = False) -> None:
    """Look for slots, flow runs, processes and folders that crashes left behind, and at the disk."""
    from tasks.doctor import examine, print_findings

    findings = examine(fix)
    print_findings(out, findings)
    if any(not finding.repaired for finding in findings):
        raise typer.Exit(1)


@app.command()
def down() -> None:
    """Stop the servers and the worker that `rlstages up` started here."""
    from tasks.servers.local import stop

    stop(out)
