"""What crashes leave behind: found, told, and with `fix` repaired. Nothing that a living process uses is touched.

Who lives is decided by the lock of the run and by the process table, never by what Prefect or MLflow still show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.markup import escape

from tasks.settings import runs_dir
from tasks.storage.store import RunStore

Kind = Literal["server", "slot", "flow run", "task run", "schedule", "process", "folder", "mlflow", "disk"]


@dataclass
class Finding:
    """One thing that was looked at.

    Attributes:
        kind: what it is.
        what: what was found.
        todo: what is to be done about it; empty where all is well and the line only informs.
        repaired: nothing is left to do: it was repaired, or all was well.
    """

    kind: Kind
    what: str
    todo: str = ""
    repaired: bool = False

    def __post_init__(self) -> None:
        self.repaired = self.repaired or not self.todo


def examine(fix: bool = False) -> list[Finding]:
    """Look at everything; with `fix`, repair what can be repaired without a decision of a person."""
    from tasks.doctor import checks, server

    stores = known_stores()
    found = [*checks.processes(fix), *checks.folders(stores, fix), *checks.mlflow(stores, fix)]
    return [*server.server(stores, fix), *found, *checks.disk(stores)]


def known_stores() -> list[RunStore]:
    found = [path.parent.name for path in sorted(runs_dir().glob("*/run.json"))]
    return [RunStore(runs_dir(), name) for name in found if ".partial-" not in name]


def print_findings(console: Console, findings: list[Finding]) -> None:
    """A line per finding, what is wrong with what to do about it, and how it stands altogether."""
    for finding in findings:
        mark = "[green]ok[/]" if not finding.todo else "[green]repaired[/]" if finding.repaired else "[red]wrong[/]"
        console.print(f"{mark:<22} {finding.kind:<9} {escape(finding.what)}", highlight=False, soft_wrap=True)
        if not finding.repaired:
            console.print(f"{'':<19} {escape(finding.todo)}", style="dim", highlight=False, soft_wrap=True)
    wrong = [finding for finding in findings if not finding.repaired]
    repaired = [finding for finding in findings if finding.todo and finding.repaired]
    if repaired:
        console.print(f"{len(repaired)} repaired")
    blind = any(finding.kind == "server" for finding in findings)
    well = "all is well but for the Prefect server, which was not looked at" if blind else "all is well"
    console.print(f"[red]{len(wrong)} to mend[/]" if wrong else f"[yellow]{well}[/]" if blind else f"[green]{well}[/]")
