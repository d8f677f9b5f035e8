"""Tasks from rows of a file, in either of the two usual forms; which one is seen from the columns.

* verl: `prompt` is a list of messages and `reward_model` holds `ground_truth`; rewards get `ground_truth` and every
  other column (`data_source`, `extra_info`, ...) as it stands.
* TRL: `prompt` is text or a list of messages; rewards get every other column as it stands.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from rl_core.environments.base import Params, Prompt, ReadRows, Split, check_heldout, near, shuffled
from rl_core.errors import ConfigError, DataError
from rl_core.fingerprint import canonical_json, sha256_text
from rl_core.rewards.contract import RESERVED


class DatasetParams(Params):
    path: str | tuple[str, ...] = Field(min_length=1)
    """File of training rows (`.jsonl`, `.json`, `.parquet`), or a list of files read one after the other."""
    heldout_path: str | tuple[str, ...] | None = Field(default=None, min_length=1)
    """File or files of held-out rows, in their order."""
    heldout_rows: int | None = Field(default=None, ge=1)
    """Instead: take so many rows out of `path`, chosen by a hash of the prompt and so independent of row order."""
    shuffle: bool = True
    """Every epoch in its own order; false keeps the order of the file."""
    text_prompt: Literal["user", "raw"] = "user"
    """A prompt given as text: a user turn for the chat template, or raw text to be continued."""
    system: str | None = Field(default=None, min_length=1)
    """A system turn put before prompts that have none."""
    merge_system: bool = False
    """Put the system text at the head of the first user turn, for chat templates that refuse a system turn."""

    @model_validator(mode="after")
    def _one_source(self) -> DatasetParams:
        if (self.heldout_path is None) == (self.heldout_rows is None):
            raise ValueError(
                "give either heldout_path or heldout_rows: evaluation needs problems that are not trained on"
            )
        if self.text_prompt == "raw" and self.system is not None:
            raise ValueError("a raw text prompt has no turns; leave system out, or set text_prompt = 'user'")
        return self


@dataclass(frozen=True)
class _Row:
    messages: list[dict[str, str]]
    data: dict[str, Any]
    prompt_key: str
    text: str


class DatasetEnvironment:
    """A data set held in memory. Rows whose prompt is also held out are left out of training (`excluded` counts them).

    Raises:
        DataError: no rows, a row that breaks the form, or values that JSON cannot hold; names the file and the row.
    """

    Params: ClassVar[type[DatasetParams]] = DatasetParams

    def __init__(self, params: DatasetParams, run_seed: int, read_rows: ReadRows) -> None:
        self._params = params
        self._run_seed = run_seed
        train = _load(params.path, params, read_rows)
        if params.heldout_path is not None:
            heldout = _load(params.heldout_path, params, read_rows)
        else:
            heldout = sorted(train, key=lambda row: (row.prompt_key, row.text))[: params.heldout_rows]
        keys = {row.prompt_key for row in heldout}
        kept = [row for row in train if row.prompt_key not in keys]
        if not kept:
            raise DataError(
                f"no training rows are left in {params.path}",
                expected="rows whose prompt is not held out",
                got=f"{len(train)} rows, {len(heldout)} of them held out or with the prompt of one that is",
                todo="lower environment.params.heldout_rows, or take the held-out prompts out of the training file",
            )
        taken = len(heldout) if params.heldout_path is None else 0
        self.excluded = len(train) - len(kept) - taken
        self._prompts: dict[Split, list[Prompt]] = {"train": _name(kept), "heldout": _name(heldout)}
        content = hashlib.sha256(canonical_json({"shuffle": params.shuffle, "train": len(kept)}).encode())
        for row in (*kept, *heldout):
            content.update(b"\n" + row.text.encode())
        self.digest = content.hexdigest()

    def size(self, split: Split) -> int | None:
        return len(self._prompts[split])

    def prompt(self, split: Split, position: int) -> Prompt:
        prompts = self._prompts[split]
        if split == "heldout":
            check_heldout(position, len(prompts))
            return prompts[position]
        if self._params.shuffle:
            return prompts[shuffled(self._run_seed, len(prompts), position)[1]]
        return prompts[position % len(prompts)]


def _name(rows: list[_Row]) -> list[Prompt]:
    # Ids come from the content, so they name the same task after rows were added, removed or moved.
    seen: Counter[str] = Counter()
    prompts = []
    for row in rows:
        digest = sha256_text(row.text)[:16]
        seen[digest] += 1
        name = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        prompts.append(Prompt(prompt_id=name, messages=row.messages, data=row.data))
    return prompts


def _load(paths: str | tuple[str, ...], params: DatasetParams, read_rows: ReadRows) -> list[_Row]:
    loaded = []
    for path in (paths,) if isinstance(paths, str) else paths:
        rows = read_rows(path)
        if not rows:
            raise DataError(f"{path} has no rows", expected="at least one row", got="an empty data set")
        is_verl = _is_verl(rows[0])
        for number, row in enumerate(rows, start=1):
            loaded.append(_row(row, f"{path} row {number} of {len(rows)}", is_verl, params))
    return loaded


def _is_verl(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("reward_model"), dict) and isinstance(row.get("prompt"), list)


def _row(row: Any, where: str, is_verl: bool, params: DatasetParams) -> _Row:
    if not isinstance(row, dict):
        raise DataError(f"{where} is no row", expected="an object with named columns", got=type(row).__name__)
    if "prompt" not in row:
        names = [str(name) for name in row]
        raise DataError(f"{where} has no column `prompt`", got=f"columns {names}", todo=near("prompt", names))
    data = {name: value for name, value in row.items() if name != "prompt"}
    if is_verl:
        if not (_is_verl(row) and "ground_truth" in row["reward_model"]):
            raise DataError(
                f"{where} is not in the verl form of the first row",
                expected="`prompt` as a list of messages and `reward_model` with `ground_truth`",
            )
        if "ground_truth" in data:
            raise DataError(f"{where} has both `ground_truth` and `reward_model.ground_truth`", todo="keep one of them")
        data["ground_truth"] = row["reward_model"]["ground_truth"]
    if clash := sorted(RESERVED.keys() & data.keys()):
        raise DataError(
            f"{where}: column `{clash[0]}` has a name that rewards use for another value",
            got=f"columns {sorted(data)}",
            todo="rename the column",
        )
    messages = _messages(row["prompt"], where, params)
    try:
        prompt_key, text = canonical_json(messages), f"[{canonical_json(messages)},{canonical_json(data, 'row')}]"
        text.encode()
    except ConfigError as error:
        raise DataError(
            f"{where} holds a value that JSON cannot keep",
            expected=error.expected,
            got=f"{error.message.split()[0]} is {error.got}",
            todo="correct the row, or write the value as text",
        ) from error
    except UnicodeEncodeError as error:
        raise DataError(f"{where} holds text that is not valid Unicode", got=str(error)) from error
    # Through the text and back: what rewards get is exactly what the table of trajectories stores.
    return _Row(messages=messages, data=json.loads(text)[1], prompt_key=sha256_text(prompt_key), text=text)


def _messages(prompt: Any, where: str, params: DatasetParams) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{where} has an empty prompt")
        if params.text_prompt == "raw":
            return [{"role": "raw", "content": prompt}]
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where} has no prompt", expected="text or a list of messages", got=repr(prompt)[:80])
    messages = [_message(item, f"{where}, message {index}") for index, item in enumerate(prompt, start=1)]
    if params.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": params.system})
    _check_turns([message["role"] for message in messages], where)
    if not messages[-1]["content"].strip():
        raise DataError(f"{where} has an empty prompt")
    if params.merge_system and messages[0]["role"] == "system":
        text = f"{messages[0]['content']}\n\n{messages[1]['content']}"
        messages[:2] = [{"role": "user", "content": text}]
    return messages


def _message(item: Any, where: str) -> dict[str, str]:
    if not isinstance(item, dict) or not all(isinstance(item.get(key), str) for key in ("role", "content")):
        raise DataError(f"{where} is no message", expected="text under `role` and `content`", got=repr(item)[:80])
    if extra := sorted(key for key, value in item.items() if key not in ("role", "content") and value is not None):
        raise DataError(
            f"{where} has parts that a text prompt cannot hold",
            expected="`role` and `content` only",
            got=", ".join(extra),
        )
    return {"role": item["role"], "content": item["content"]}


def _check_turns(roles: list[str], where: str) -> None:
    turns = roles[1:] if roles[0] == "system" else roles
    wanted = ["user" if index % 2 == 0 else "assistant" for index in range(len(turns))]
    if turns != wanted or len(turns) % 2 == 0:
        raise DataError(
            f"{where}: the roles of the messages are out of order",
            expected="an optional `system` turn, then `user` and `assistant` in turn, ending with `user`",
            got=", ".join(roles),
            todo="correct the row: many chat templates refuse such a prompt, and in the middle of a run",
        )
