"""The README says what is there."""

from __future__ import annotations

import re
from pathlib import Path

from rl_core.algorithms import ALGORITHMS
from rl_core.metrics import glossary_markdown
from rl_core.rewards.builtin import REWARDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_glossary_is_the_one_of_the_code() -> None:
    table = re.search(r"<!-- glossary[^>]*-->\n(.*?)<!-- /glossary -->", README, re.DOTALL)
    assert table is not None and table[1].strip() == glossary_markdown().strip()


def test_tree_names_files_that_exist_and_misses_none() -> None:
    tree = re.search(r"## The tree\n\n```\n(.*?)```", README, re.DOTALL)
    assert tree is not None
    folder, named = Path(), set()
    for line in tree[1].splitlines():
        words = line.split()
        if not line.startswith(" ") and words[0].endswith("/"):
            folder = Path(words[0])
            assert (ROOT / folder).is_dir(), folder
            continue
        base = folder if line.startswith(" ") else Path()
        for word in words:
            if re.fullmatch(r"[a-z_./]+\.(py|yaml)|[a-z_]+/", word):
                assert (ROOT / base / word).exists(), base / word
                named.add((base / word).as_posix().rstrip("/"))
            else:
                break
    for package in ("flows", "tasks", "rl_core"):
        there = {p.relative_to(ROOT).as_posix() for p in (ROOT / package).glob("*.py") if p.name != "__init__.py"}
        there |= {p.parent.relative_to(ROOT).as_posix() for p in (ROOT / package).glob("*/__init__.py")}
        assert there <= named, f"not in the README's tree: {sorted(there - named)}"


def test_names_of_algorithms_and_rewards() -> None:
    for name in (*ALGORITHMS, *REWARDS):
        assert f"`{name}`" in README, name
