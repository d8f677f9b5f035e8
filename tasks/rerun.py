"""What a rerun of a stage may be: checked before the record of its iteration says so."""

from __future__ import annotations

from rl_core.errors import RunError
from rl_core.execution import StageName
from rl_core.stages import STAGES
from tasks.session import Session


def stages_to_make(
    session: Session,
    iteration: int,
    from_stage: StageName,
    to_stage: StageName | None = None,
    overrides: list[str] | None = None,
) -> list[StageName]:
    """The iteration's stages up to `to_stage`, which may be absent. Raises `RunError` and `ConfigError`."""
    total = session.config.iterations
    if not 0 <= iteration < total:
        raise RunError(
            f"run {session.store.name!r} has no iteration {iteration}", expected=f"0 to {total - 1}", got=str(iteration)
        )
    names = session.iterations.stages_due(iteration)
    due = [name for name in STAGES if name in names]
    last = to_stage or due[-1]
    for name in (from_stage, last):
        if name not in due:
            raise RunError(f"iteration {iteration} has no stage {name}", todo="see evaluate.every in the recipe")
    if due.index(last) < due.index(from_stage):
        raise RunError(
            "a rerun cannot end before it begins", expected=f"{from_stage} or a later stage", got=f"to {last}"
        )
    session.facts(session.iterations.overridden(iteration, overrides or []), iteration)
    return due[: due.index(last) + 1]
