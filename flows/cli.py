"""`rlstages`: the command line. Each command is a few lines; what it shows is made in `tasks/`."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console

from flows import operate
from flows.operate import Run, Sets
from rl_core.errors import RlstagesError, StageError
from rl_core.execution import StageName
from rl_core.recipes import config_json
from tasks import settings
from tasks.display.console import Display, print_end, print_error

app = typer.Typer(
    help="RL post-training of language models as a pipeline of durable stages. With --debug, errors show a traceback.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models = typer.Typer(help="Models known by name.", no_args_is_help=True)
app.add_typer(models, name="models")
out, err = Console(), Console(stderr=True)

Iteration = Annotated[int, typer.Option("--iteration", min=0, help="Number of the iteration, from 0.")]


@app.command()
def run(
    target: Annotated[str, typer.Argument(help="A recipe (file or short name) or the name of a run.")],
    set_: Sets = [],  # noqa: B006 - typer copies it
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")] = False,
) -> None:
    """Start a run, or continue it where it stopped."""
    from tasks.launch import prepare_run, resolve_config

    config = resolve_config(target, set_)
    if dry_run:
        out.print_json(json.dumps(config_json(config)))
        return
    with out.status("checking model, environment and rewards"):
        name = prepare_run(target, set_)
    made = _flow("training_run", run=name)
    if made["began_at"] == made["iterations"]:
        out.print(f"nothing to do: all {made['iterations']} iterations are complete")
    _end(name)


@app.command()
def rerun(
    run: Run,
    iteration: Iteration,
    from_: Annotated[StageName, typer.Option("--from", help="First stage to execute again.")],
    to: Annotated[StageName | None, typer.Option("--to", help="Last stage; the next run makes the rest.")] = None,
    set_: Sets = [],  # noqa: B006 - typer copies it
    force: Annotated[bool, typer.Option("--force", help="Execute all later stages too.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Drop the overrides of earlier reruns.")] = False,
) -> None:
    """Execute a stage of a past iteration again; what follows it runs only where its inputs changed."""
    from tasks.display.status import check_run

    check_run(run, iteration)
    made = _flow(
        "stage",
        run=run,
        iteration=iteration,
        from_stage=from_,
        to_stage=to,
        overrides=set_ or ([] if reset else None),
        force=force,
    )
    if "made_to" in made:
        out.print(f"iteration {iteration} is made up to {made['made_to']}: `rlstages run {run}` makes the rest")
    elif made["stale_after"] is not None:
        out.print(f"policy {iteration + 1} changed: `rlstages run {run}` makes the later iterations anew")


@app.command()
def status(run: Annotated[str | None, typer.Argument(help="Name of a run; without one, all of them.")] = None) -> None:
    """Where a run stands: iterations, metrics, outputs, seconds."""
    from tasks.display.status import print_runs, print_status

    print_status(out, run) if run else print_runs(out)


@app.command()
def show(
    run: Run, iteration: Iteration, groups: Annotated[int, typer.Option(min=1, help="Groups per list.")] = 2
) -> None:
    """Samples of an iteration with rewards and advantages: its best and its worst groups."""
    from tasks.display.status import print_samples

    print_samples(out, run, iteration, groups)


@models.command("list")
def list_models() -> None:
    """Names, descriptions, licences."""
    from rl_core.models import MODELS

    for name, model in MODELS.items():
        out.print(f"[bold]{name}[/]  {model.description} ({model.license})", highlight=False)


@models.command()
def fetch(name: Annotated[str, typer.Argument(help="A name from `rlstages models list`.")]) -> None:
    """Make a model's folder below models/ if it is not there."""
    from tasks.launch import ensure_model
    from tasks.worker import Worker

    worker = Worker(settings.STATE_DIR / "logs")
    try:
        with out.status(f"making models/{name}"):
            folder = ensure_model(name, worker)
    finally:
        worker.close()
    out.print(f"{folder}", soft_wrap=True, highlight=False)


@app.command()
def up(
    host: Annotated[str, typer.Option(help="Address to listen at; there is no password.")] = "127.0.0.1",
    prefect_port: Annotated[int, typer.Option(help="Port of the Prefect server.")] = settings.PREFECT_PORT,
    mlflow_port: Annotated[int, typer.Option(help="Port of the MLflow server.")] = settings.MLFLOW_PORT,
    database_url: Annotated[
        str | None, typer.Option(help="Prefect's database, as postgresql+asyncpg://...; default: SQLite in .state/.")
    ] = None,
    limit: Annotated[
        list[str], typer.Option(metavar="TAG=SLOTS", help="Stages with this tag at a time; 0: no limit. Repeatable.")
    ] = [],  # noqa: B006 - typer copies it
    detach: Annotated[bool, typer.Option("--detach", help="Leave them running in the background.")] = False,
) -> None:
    """Run a Prefect server, MLflow's pages and a worker on this machine until Ctrl-C or `rlstages down`."""
    from tasks.servers import local
    from tasks.servers.processes import UpOptions

    local.up(out, UpOptions(host, prefect_port, mlflow_port, database_url, limit, detach))


app.registered_commands.extend(operate.app.registered_commands)


def _flow(flow: str, **parameters: Any) -> dict[str, Any]:
    """Call the flow of a name, from the file of that name, in this process with the terminal display around it."""
    from tasks.servers.local import connect

    with out.status("connecting to Prefect"):
        connect()
        found = getattr(import_module(f"flows.{flow}"), flow)
        settings.quiet_console()
    with Display(out):
        result: dict[str, Any] = found(**parameters)
    return result


def _end(name: str) -> None:
    from tasks.display.status import closing_lines

    print_end(out, closing_lines(name))


def main() -> None:
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    settings.apply_defaults()
    # Prefect hands SIGTERM on when its flow has ended; an orderly exit is what ends the embedded server too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app(arguments, standalone_mode=True)
    except RlstagesError as error:
        if debug:
            traceback.print_exc()
        print_error(err, error)
        sys.exit(2 if error.user_error else 1)
    except SystemExit as end:
        if end.code in (130, 143):
            err.print("stopped; the same command continues it")
        raise
    except Exception as error:
        if debug:
            raise
        unknown = StageError(f"{type(error).__name__}: {error}", todo="repeat with --debug for the traceback")
        print_error(err, settings.lost_server(error) or unknown)
        sys.exit(1)


if __name__ == "__main__":
    main()
