"""One iteration under another reward configuration: its rewards and advantages made anew, beside those it has."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, cast

import polars as pl

from rl_core.algorithms import resolve
from rl_core.config import RewardConfig, RunConfig
from rl_core.errors import ConfigError
from rl_core.fingerprint import canonical_json
from rl_core.manifest import Manifest, Ref
from rl_core.recipes import apply_overrides, build_config, config_json
from rl_core.schemas import ADVANTAGES, rewards_schema
from tasks.display.status import manifests
from tasks.iterations import Iterations
from tasks.score import check_unscored
from tasks.scoring.pool import weighted_total
from tasks.stage import StageContext, load_stage
from tasks.storage.store import RunStore
from tasks.storage.tables import read_table, write_table
from tasks.worker import Services

_KEY = ["group_id", "sample_id"]
_STAGES = ("generate", "score", "advantage")


class Rescorer:
    """Makes the new tables of one iteration after the other, in a folder of its own; close it at the end.

    Attributes:
        weights: per component its weights before and after, in order of appearance; none where it does not exist.
        called: per new component, completions its function was called for; 0: the stored values served.
        skipped: iterations that cannot be compared, and why.
    """

    def __init__(self, store: RunStore, overrides: list[str], folder: Path) -> None:
        self.weights: dict[str, tuple[list[float], list[float]]] = {}
        self.called: dict[str, int] = {}
        self.skipped: dict[int, str] = {}
        self._services = Services(folder / "logs")
        self._store, self._overrides, self._folder = store, overrides, folder
        self._iterations: dict[str, Iterations] = {}
        self._digests: dict[str, dict[str, str]] = {}

    def close(self) -> None:
        self._services.close_rewards()

    def compare(self, iteration: int) -> pl.DataFrame | None:
        """The completions of an iteration before and after, columns as in `rl_core.counterfactual` and those of its
        own components; null, and the reason noted, when it cannot be compared."""
        found = manifests(self._store, iteration)
        made = {stage: manifest for stage in _STAGES if (manifest := found.get(stage)) is not None}
        if lacking := [stage for stage in _STAGES if stage not in made]:
            word = "is damaged" if lacking[0] in found else "is not made yet"
            self.skipped[iteration] = f"its {lacking[0]} output {word}"
            return None
        record = self._store.iteration(iteration) or {"stages": {}}
        refs = {
            stage: Ref(path=str(self._store.folder(record["stages"][stage]["folder"])), digest=m.digest)
            for stage, m in made.items()
        }
        config = self._config(iteration, made)
        _check_reference(config, made["generate"])
        old_rewards = cast(list[dict[str, Any]], made["score"].identity["rewards"])
        old = read_table(Path(refs["score"].path), rewards_schema([reward["name"] for reward in old_rewards]))
        new = self._score(config, iteration, refs["generate"], made["score"], old.to_pylist())
        context = self._context(config, iteration, {"generate": refs["generate"], "score": new})
        load_stage("advantage").perform(context, self._services, _ignore)
        self._note_weights(old_rewards, config)
        sides = (
            _side("old", refs["score"].path, old_rewards, refs["advantage"].path),
            _side("new", new.path, [reward.model_dump() for reward in config.rewards], str(context.output)),
        )
        joined = sides[0].join(sides[1], on=_KEY, how="inner", validate="1:1")
        return joined.with_columns(pl.lit(iteration, dtype=pl.Int64).alias("iteration"))

    def _config(self, iteration: int, made: dict[str, Manifest]) -> RunConfig:
        """What the iteration was made with, in this run or the one it was forked from, then what is asked for."""
        owner = made["advantage"].run
        store = RunStore(self._store.path.parent, owner)
        if owner not in self._iterations:
            self._iterations[owner] = Iterations(store, store.config(), store.base_model())
        record = store.iteration(iteration) or {"overrides": []}
        data = config_json(self._iterations[owner].overridden(iteration, record["overrides"]))
        scored = cast(dict[str, Any], made["score"].identity)
        data["rewards"] = [{key: reward[key] for key in RewardConfig.model_fields} for reward in scored["rewards"]]
        data["scoring"] = scored["scoring"]
        data["evaluate"]["reward"] = ""  # may name a reward that is gone now; nothing is evaluated here
        return build_config(apply_overrides(data, self._overrides), f"iteration {iteration} with other settings")

    def _context(self, config: RunConfig, iteration: int, inputs: dict[str, Ref]) -> StageContext:
        output = Path(tempfile.mkdtemp(dir=self._folder))
        facts = {"rewards": self._sources(config)}
        return StageContext(config, iteration, inputs, output, facts, self._store.base_model())

    def _sources(self, config: RunConfig) -> dict[str, str]:
        """Digest of each reward's source as it is now; asked once for each set of rewards."""
        key = canonical_json([reward.model_dump(mode="json") for reward in config.rewards])
        if key not in self._digests:
            self._digests[key] = self._services.rewards(config).digests
        return self._digests[key]

    def _score(
        self, config: RunConfig, iteration: int, trajectories: Ref, before: Manifest, old: list[dict[str, Any]]
    ) -> Ref:
        """A rewards table under the new settings; functions are called only for components that the run lacks."""
        kept = self._kept(config, before, old)
        fresh: dict[tuple[int, int], dict[str, Any]] = {}
        called = [reward for reward in config.rewards if reward.name not in kept]
        if called:
            part = config.model_copy(update={"rewards": tuple(called)})
            context = self._context(part, iteration, {"generate": trajectories})
            load_stage("score").perform(context, self._services, _ignore)
            table = read_table(context.output, rewards_schema([reward.name for reward in called]))
            fresh = {(row["group_id"], row["sample_id"]): row for row in table.to_pylist()}
        for reward in config.rewards:
            self.called.setdefault(reward.name, 0)
            self.called[reward.name] += 0 if reward.name in kept else len(fresh)
        rows = []
        for row in old:
            made = {key: row[key] for key in _KEY}
            for reward in config.rewards:
                name = kept.get(reward.name, reward.name)
                source = row if reward.name in kept else fresh[row["group_id"], row["sample_id"]]
                made |= {f"{word}_{reward.name}": source[f"{word}_{name}"] for word in ("reward", "reason")}
            total = weighted_total(config.rewards, {r.name: made[f"reward_{r.name}"] for r in config.rewards})
            rows.append(made | {"reward": total, "status": "unscored" if total is None else "ok"})
        check_unscored(rows, config)
        output = Path(tempfile.mkdtemp(dir=self._folder))
        write_table(output / "part-0000.parquet", rows, rewards_schema([reward.name for reward in config.rewards]))
        return Ref(path=str(output), digest="")

    def _kept(self, config: RunConfig, before: Manifest, old: list[dict[str, Any]]) -> dict[str, str]:
        """New component → stored column with the same function, params and source.

        A column with gaps serves only under the same limits: another time-out or error policy may treat them otherwise.
        """
        sources = self._sources(config)
        stored = {
            canonical_json([reward["function"], reward["params"], reward["source"]]): str(reward["name"])
            for reward in cast(list[dict[str, Any]], before.identity["rewards"])
        }
        same_limits = before.identity["scoring"] == config.scoring.model_dump(mode="json")
        kept = {}
        for reward in config.rewards:
            params = reward.model_dump(mode="json")["params"]
            name = stored.get(canonical_json([reward.function, params, sources[reward.name]]))
            if name and (same_limits or all(row[f"reward_{name}"] is not None for row in old)):
                kept[reward.name] = name
        return kept

    def _note_weights(self, old: list[dict[str, Any]], config: RunConfig) -> None:
        pairs = [(0, reward["name"], reward["weight"]) for reward in old]
        pairs += [(1, reward.name, reward.weight) for reward in config.rewards]
        for side, name, weight in pairs:
            seen = self.weights.setdefault(name, ([], []))[side]
            if weight not in seen:
                seen.append(weight)


def _ignore(done: int, total: int) -> None:
    pass


def _side(when: str, scores: str, rewards: list[dict[str, Any]], advantages: str) -> pl.DataFrame:
    """Totals, weighted components, advantages and keep before or after, [completions]."""
    schema = rewards_schema([reward["name"] for reward in rewards])
    weighted = [(pl.col(f"reward_{r['name']}") * r["weight"]).alias(f"{when}:{r['name']}") for r in rewards]
    scored = cast(pl.DataFrame, pl.from_arrow(read_table(Path(scores), schema)))
    scored = scored.select(*_KEY, pl.col("reward").alias(when), *weighted)
    found = cast(pl.DataFrame, pl.from_arrow(read_table(Path(advantages), ADVANTAGES)))
    found = found.select(*_KEY, *(pl.col(column).alias(f"{when}_{column}") for column in ("advantage", "keep")))
    return scored.join(found, on=_KEY, how="inner", validate="1:1")


def _check_reference(config: RunConfig, generated: Manifest) -> None:
    if resolve(config.algorithm, config.generate).needs_kl_penalty and generated.identity["reference"] is None:
        raise ConfigError(
            f"the completions of iteration {generated.iteration} have no log-probs of the reference policy",
            expected="a run that was sampled with algorithm.kl.place = 'reward'",
            todo="leave KL out of the reward, or fork the run from generate with these settings",
        )
