"""The process that runs reward functions: loads them once, then answers calls until its parent closes the pipe."""

from __future__ import annotations

import re
import sys
import traceback
from typing import Any

from rl_core.config import RewardConfig
from rl_core.errors import WorkerError
from rl_core.rewards.contract import Reward, call_reward, check_result, load_reward
from tasks.processes.child import serve

_SURROGATE = re.compile("[\ud800-\udfff]")
_REASON_CHARACTERS, _TRACEBACK_CHARACTERS = 500, 20_000


def _load(configs: list[dict[str, Any]], rewards: dict[str, Reward]) -> dict[str, Any]:
    for data in configs:
        reward = load_reward(RewardConfig.model_validate(data))
        rewards[reward.name] = reward
    return {
        reward.name: {
            "digest": reward.digest,
            "wants": sorted(reward.wants),
            "needs": sorted(reward.needs),
            "takes_all": reward.takes_all,
        }
        for reward in rewards.values()
    }


def _call(reward: Reward, rows: list[dict[str, Any]], columns: list[str]) -> dict[str, Any]:
    try:
        result = call_reward(reward, rows, columns)
    except BaseException as error:  # also sys.exit: a reward must not end the process
        return {"failure": _describe(error), "traceback": _text(traceback.format_exc())[-_TRACEBACK_CHARACTERS:]}
    values, reasons = check_result(result, len(rows), reward.function)
    return {"values": values, "reasons": reasons}


def _describe(error: BaseException) -> str:
    try:
        text = " ".join(str(error)[: 2 * _REASON_CHARACTERS].split())
    except Exception:
        text = "(its message cannot be shown)"
    return _text(f"{type(error).__name__}: {text}" if text else type(error).__name__)[:_REASON_CHARACTERS]


def _text(text: str) -> str:
    """Text that can be stored: half characters become U+FFFD."""
    return _SURROGATE.sub("\ufffd", text)


def main() -> None:
    rewards: dict[str, Reward] = {}

    def handle(message: dict[str, Any], progress: Any) -> dict[str, Any]:
        match message["op"]:
            case "load":
                return _load(message["rewards"], rewards)
            case "call":
                return _call(rewards[message["reward"]], message["rows"], message["columns"])
        raise WorkerError(f"a reward process does not know the operation {message['op']!r}")

    serve(handle, int(sys.argv[1]))


if __name__ == "__main__":
    main()
