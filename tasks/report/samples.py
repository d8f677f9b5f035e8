"""Completions for a report's sample browser: which ones, and the text of every token.

A page stays readable and small: of a long run it holds some iterations, of these the groups with the highest and the
lowest mean reward, and it says how many were left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from rl_core.manifest import Ref
from rl_core.schemas import ADVANTAGES, TRAJECTORIES, rewards_schema
from tasks.report.data import Made, RunData

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_ITERATIONS = 12
MAX_TOKENS = 250_000
"""Tokens of completions in a page, about 4 MB."""
MAX_GROUP_COMPLETIONS = 16
HEAD_TOKENS, TAIL_TOKENS = 512, 128
MAX_CHARACTERS = 4000
"""Of a message, of a task's data, and of a completion whose tokens cannot be shown."""
_UNFINISHED = "\ufffd"
_MAX_UNFINISHED = 8  # a character has at most four bytes: what is unfinished for longer is no character

Row = dict[str, Any]


class Samples:
    """The samples of a run. `tokens` lists every token text once: [id, text, is special]; completions hold indices."""

    def __init__(self, run: RunData) -> None:
        self._run = run
        self._index: dict[tuple[int, str], int] = {}
        self._tokenizers: dict[Path, Tokenizer | None] = {}
        self._allowance = 0
        self.tokens: list[tuple[int, str, bool]] = []
        self.made_iterations = [made for made in run.iterations if made.manifests.get("generate")]

    def collect(self) -> list[Row]:
        """A record per iteration shown, in order, with its groups from the best to the worst."""
        chosen = spread(len(self.made_iterations), MAX_ITERATIONS)
        shown: dict[int, Row] = {}
        room = MAX_TOKENS
        # The last and the first one first: what they leave of their shares goes to those between.
        for turn, position in enumerate(sorted(chosen, key=lambda i: (i != chosen[-1], i != chosen[0], i))):
            self._allowance = room // (len(chosen) - turn)
            before = self._allowance
            shown[position] = self._iteration(self.made_iterations[position])
            room -= before - self._allowance
        return [shown[position] for position in sorted(shown)]

    def _iteration(self, made: Made) -> Row:
        groups: dict[int, list[Row]] = {}
        for row in self._rows(made):
            groups.setdefault(row["group_id"], []).append(row)
        ranked = sorted(groups.values(), key=_mean_reward, reverse=True)
        tokenizer = self._tokenizer(made)
        found: dict[int, Row] = {}
        for rank in _from_both_ends(len(ranked)):
            if found and self._allowance <= 0:
                break
            found[rank] = self._group(ranked[rank], rank, tokenizer)
        return {
            "iteration": made.number,
            "groups": [found[rank] for rank in sorted(found)],
            "groups_left_out": len(ranked) - len(found),
            "tokens": tokenizer is not None,
        }

    def _rows(self, made: Made) -> list[Row]:
        """Trajectories with what scoring and advantage estimation said of them."""
        where = f"iteration {made.number}"
        folder = self._run.folder(made, "score")
        parts = sorted(folder.glob("part-*.parquet")) if folder else []
        columns = pq.read_schema(parts[0]).names if parts else []
        rewards = rewards_schema([c.removeprefix("reward_") for c in columns if c.startswith("reward_")])
        scores = _by_key(self._run.rows(folder, rewards, f"{where}, score"))
        advantages = _by_key(self._run.rows(self._run.folder(made, "advantage"), ADVANTAGES, f"{where}, advantage"))
        rows = self._run.rows(self._run.folder(made, "generate"), TRAJECTORIES, f"{where}, generate")
        found = []
        for row in rows:
            key = row["group_id"], row["sample_id"]
            score, advantage = scores.get(key, {}), advantages.get(key, {})
            found.append(
                row
                | {
                    "reward": score.get("reward"),
                    "components": {
                        name.removeprefix("reward_"): [value, score[name.replace("reward_", "reason_", 1)]]
                        for name, value in score.items()
                        if name.startswith("reward_")
                    },
                    "shaped": advantage.get("reward"),
                    "advantage": advantage.get("advantage"),
                    "keep": advantage.get("keep"),
                    "drop_reason": advantage.get("drop_reason"),
                }
            )
        return found

    def _group(self, rows: list[Row], rank: int, tokenizer: Tokenizer | None) -> Row:
        mean = _mean_reward(rows)
        order = sorted(rows, key=lambda row: (-_number(row["reward"]), row["sample_id"]))
        kept = {order[i]["sample_id"] for i in _from_both_ends(len(order))[:MAX_GROUP_COMPLETIONS]}
        shown = sorted((row for row in rows if row["sample_id"] in kept), key=lambda row: row["sample_id"])
        return {
            "group": rows[0]["group_id"],
            "rank": rank,
            "mean": mean if math.isfinite(mean) else None,
            "messages": [[m["role"], _short(m["content"])] for m in rows[0]["prompt_messages"]],
            "task": _short(_readable(rows[0]["env_data"])),
            "completions": [self._completion(row, tokenizer) for row in shown],
            "completions_left_out": len(rows) - len(shown),
        }

    def _completion(self, row: Row, tokenizer: Tokenizer | None) -> Row:
        ids: list[int] = row["completion_ids"]
        gap = [HEAD_TOKENS, len(ids) - TAIL_TOKENS] if len(ids) > HEAD_TOKENS + TAIL_TOKENS else []
        positions = [*range(gap[0]), *range(gap[1], len(ids))] if gap else list(range(len(ids)))
        made: Row = {
            "sample": row["sample_id"],
            "finish": row["finish_reason"],
            "length": len(ids),
            **{k: row[k] for k in ("reward", "shaped", "advantage", "keep", "drop_reason", "components", "truncated")},
        }
        if tokenizer is None:
            self._allowance -= len(row["text"]) // 4
            return made | {"text": _short(row["text"])}
        self._allowance -= len(positions)
        texts, special = token_texts(tokenizer, ids), special_ids(tokenizer)
        mask, logprobs = row["action_mask"], row["sampler_logprobs"]
        made["tokens"] = [self._token(ids[i], texts[i], ids[i] in special) for i in positions]
        made["logprobs"] = [round(logprobs[i], 4) for i in positions]
        if not all(mask):  # tokens that a tool or the environment wrote carry no advantage
            made["actions"] = [int(mask[i]) for i in positions]
        return made | ({"gap": gap} if gap else {})

    def _token(self, number: int, text: str, special: bool) -> int:
        key = (number, text)
        if key not in self._index:
            self._index[key] = len(self.tokens)
            self.tokens.append((number, text, special))
        return self._index[key]

    def _tokenizer(self, made: Made) -> Tokenizer | None:
        """The tokenizer that lies with the policy that sampled, else the starting model's; null without either."""
        policy = Ref.model_validate(made.record["policy"])
        places = [self._run.store.resolve(ref) / "tokenizer.json" for ref in (policy, self._run.store.base_model())]
        return next((found for place in places if (found := self._load(place))), None)

    def _load(self, path: Path) -> Tokenizer | None:
        from tokenizers import Tokenizer

        if not path.is_file():
            return None
        same = next((known for known in self._tokenizers if known.read_bytes() == path.read_bytes()), path)
        if same not in self._tokenizers:
            try:
                self._tokenizers[same] = Tokenizer.from_file(str(same))
            except Exception as error:  # the library raises plain `Exception` for a file it cannot read
                self._run.notes.append(f"{path.parent.name}/{path.name} cannot be read: {error}")
                self._tokenizers[same] = None
        return self._tokenizers[same]


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; joined they are the whole text, special tokens included.

    A token alone may be part of a character (byte-level vocabularies) or lose its space (metaspace), so each is decoded
    after the one before it; one that leaves a character unfinished adds nothing, and the one that ends it all of it.
    """
    texts: list[str] = []
    special = special_ids(tokenizer)
    start = read = 0  # tokens before `read` have their text; decoding from `start` on gives it a left context
    for end in range(1, len(ids) + 1):
        known = tokenizer.decode(list(ids[start:read]), skip_special_tokens=False)
        whole = tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
        unfinished = whole.endswith(_UNFINISHED) or len(whole) <= len(known)
        may_go_on = end < len(ids) and ids[end] not in special and end - read < _MAX_UNFINISHED
        if unfinished and may_go_on:
            texts.append("")
            continue
        texts.append(whole[len(known) :])
        start, read = read, end
    return texts


def special_ids(tokenizer: Tokenizer) -> set[int]:
    return {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def spread(count: int, limit: int) -> list[int]:
    """At most `limit` of the positions 0 to count - 1: the first, the last, and evenly spaced ones between them."""
    if count <= limit:
        return list(range(count))
    return sorted({round(i * (count - 1) / (limit - 1)) for i in range(limit)})


def _from_both_ends(count: int) -> list[int]:
    """0, count - 1, 1, count - 2, ..."""
    return [i // 2 if i % 2 == 0 else count - 1 - i // 2 for i in range(count)]


def _mean_reward(group: list[Row]) -> float:
    scored = [row["reward"] for row in group if row["reward"] is not None]
    return math.fsum(scored) / len(scored) if scored else -math.inf


def _number(value: float | None) -> float:
    return -math.inf if value is None else value


def _by_key(rows: list[Row]) -> dict[tuple[int, int], Row]:
    return {(row["group_id"], row["sample_id"]): row for row in rows}


def _readable(text: str) -> str:
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, indent=1)
    except ValueError:
        return text


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}… ({len(text)} characters)"
