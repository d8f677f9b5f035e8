"""The one tree of errors.

    RlstagesError
    ├── UserError                 something a person can put right: exit code 2, never retried
    │   ├── ConfigError           a recipe, an override or a combination of settings
    │   ├── DataError             a prompt, a data set row, a table that breaks its contract
    │   ├── RewardContractError   a reward function whose signature or result breaks the contract
    │   ├── ModelError            a model or checkpoint that is missing or cannot be used
    │   └── RunError              a run that does not exist, exists already or is locked
    └── StageError                a stage that did not get through: retried as the recipe says
        ├── RewardFailedError     rewards failed for some rows and the recipe says `fail`
        ├── WorkerError           the worker died, was killed or answered nonsense
        ├── StageTimeoutError     the stage ran past its limit and its process was killed
        ├── NonFiniteError        a NaN or an infinity reached a place where it must not go on
        ├── CorruptOutputError    files do not match their manifest
        └── StorageError          the disk is full or refuses the write

Every error says what was expected, what was got and what to do. They cross process borders as plain dictionaries
(`to_dict`, `from_dict`), so nothing is pickled and the type survives.
"""

from __future__ import annotations

from typing import Any, ClassVar

MAX_CHARACTERS = 20_000
"""Of each part of an error. Prefect drops a log line of a million characters whole, and nobody reads one."""


def _shortened(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    begin, end = text[: MAX_CHARACTERS // 4], text[-MAX_CHARACTERS // 2 :]
    return f"{begin}\n... {len(text) - len(begin) - len(end):,} characters left out ...\n{end}"


class RlstagesError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: one sentence that says what went wrong and where.
        expected: what would have been right.
        got: what was found instead.
        todo: what the reader can do about it.
        details: free text, such as a user's own traceback.

    Of a part longer than `MAX_CHARACTERS` the middle is left out.
    """

    user_error: ClassVar[bool] = False
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, expected: str = "", got: str = "", todo: str = "", details: str = "") -> None:
        self.message = _shortened(message)
        super().__init__(self.message)
        self.expected = _shortened(expected)
        self.got = _shortened(got)
        self.todo = _shortened(todo)
        self.details = _shortened(details)

    def __str__(self) -> str:
        lines = [self.message]
        for label, text in (("expected", self.expected), ("got", self.got), ("to do", self.todo)):
            if text:
                lines.append(f"  {label}: {text}")
        if self.details:
            lines.append(self.details)
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, str]:
        """The error as JSON-plain data; `from_dict` is the inverse."""
        return {
            "type": type(self).__name__,
            "message": self.message,
            "expected": self.expected,
            "got": self.got,
            "todo": self.todo,
            "details": self.details,
        }


class UserError(RlstagesError, ValueError):
    user_error = True


class ConfigError(UserError):
    pass


class DataError(UserError):
    pass


class RewardContractError(UserError):
    pass


class ModelError(UserError):
    pass


class RunError(UserError):
    pass


class StageError(RlstagesError, RuntimeError):
    retryable = True


class RewardFailedError(StageError):
    pass


class WorkerError(StageError):
    pass


class StageTimeoutError(StageError):
    pass


class NonFiniteError(StageError):
    retryable = False


class CorruptOutputError(StageError):
    retryable = False


class StorageError(StageError):
    pass


def _tree(root: type[RlstagesError]) -> dict[str, type[RlstagesError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def from_dict(data: dict[str, str]) -> RlstagesError:
    """Rebuild an error that crossed a process border; an unknown type becomes a `StageError`."""
    fields = {k: data.get(k, "") for k in ("expected", "got", "todo", "details")}
    kind = _tree(RlstagesError).get(data.get("type", ""), StageError)
    return kind(data.get("message", "unknown error"), **fields)
