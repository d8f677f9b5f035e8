"""`math_answer` on the formats, near misses and oversized answers of public bug reports."""

from __future__ import annotations

import itertools
import resource
import time

import pytest

from rl_core.rewards.math import final_answer, math_answer

BOXES = "".join(rf"\boxed{{{i}}}" for i in range(1, 10))

C11 = [
    (r"1/3^{80}", r"1/3^{79}", 0),
    (r"1/3^{80}", r"\frac{1}{3^{80}}", 1),
    ("10^{-9}", "0", 0),
    (r"2 - 10^{-8}", r"2 + 10^{-8}", 0),
    (r"\pm 35", "35", 0),
    (r"\pm 35", "-35, 35", 1),
    ("0.5", "1/2", 1),
    (r"\sqrt{2}+10^{-20}", r"\sqrt{2}", 0),
    (r"\sqrt{2}\sqrt{3}", r"\sqrt{6}", 1),
]
C13 = [
    ("4,9", "(4,9)", 1),
    ("4,9", "49", 0),
    ("12,345", "12345", 1),
    ("[3.5,7.25]", "[3.5, 7.25]", 1),
    ("2500", "$2,500.00", 1),
    ("12,34", "1234", 0),
    ("4,9", "9, 4", 1),
    ("(4,9)", "(9,4)", 0),
    ("[4,9]", "(4,9)", 0),
    (r"\{9,4\}", r"\{4,9\}", 1),
    ("4,9", "4,9,9", 0),
    (r"[2,\infty)", r"\left[2, \infty\right)", 1),
    ("4 and 9", "9, 4", 1),
]
C14 = [
    ("8", r"\boxed{6} no, \boxed{8}", 1),
    ("6", r"\boxed{6} no, \boxed{8}", 0),
    ("C", r"\boxed{\text{C}}", 1),
    ("17", r"\fbox{17}", 1),
    (r"\frac{2}{5}", r"\boxed{\frac{2}{5}}", 1),
    ("17", r"\boxed{17", 0),
    ("3", BOXES, 0),
    ("9", BOXES, 1),
]
C16 = [
    ("29", r"\text{29}", 1),
    ("58", "**58**", 1),
    ("1/7", "0.142857142857143", 1),
    ("1/7", "0.142857142857144", 0),
    ("11/6", r"\dfrac{11}{6}", 1),
    ("200/3", "66.7", 0),
    (r"3.25\%", r"3.25\%", 1),
    ("-5", "\u22125", 1),
    ("12", "\uff11\uff12", 1),
    (r"m \in [2,\infty)", r"m \ge 2", 1),
    (r"50\%", "0.5", 1),
    (r"50\%", "50", 1),
    ("50", r"50\%", 1),
    ("0.5", r"50\%", 1),
    ("0.5", "50", 0),
    (r"50\%", "5000", 0),
]
C17 = [
    ("7", r"\boxed{9**9**9**9}", 0),
    ("7", r"\boxed{9^{9^{9^9}}}", 0),
    ("7", r"\boxed{10^{10^{10}}}", 0),
    ("7", r"\boxed{100000!}", 0),
    ("7", r"\boxed{((9!)!)!}", 0),
    ("7", r"\boxed{(10^5)!}", 0),
    ("7", r"\boxed{\binom{10^9}{5\cdot 10^8}}", 0),
    ("7", r"\boxed{\sum_{i=1}^{1000000000} i^i}", 0),
    ("7", r"\boxed{e^{e^{e^{e^{e}}}}}", 0),
    ("(x+2)^{100000}", r"\boxed{(x+1)^{100000}}", 0),
    ("7", "(" * 40 + "7" + ")" * 40, 0),
    ("7", "|" * 40 + "x" + "|" * 40, 0),
    ("x+1", r"\boxed{" + "x^{" * 60 + "2" + "}" * 61, 0),
    ("x+1", r"\boxed{" + "{" * 100 + "x" + "}" * 101, 0),
    ("x+1", r"\boxed{(a+b+c+d+e)^{20}}", 0),
    ("9" * 5000, "9" * 5000, 1),
    ("9" * 5000, "0" + "9" * 5000 + ".0", 1),
    ("9" * 5000, "9" * 4999, 0),
    ("9" * 4999, "9" * 5000, 0),
    ("2", "\u00b2", 0),
    ("7", "the answer is " + "9" * 5000, 0),
]
MORE = [
    ("58", "The answer is 58.", 1),
    ("58", "So $x = 58$ and we are done.", 1),
    ("12345", "The total is 12,345 dollars", 1),
    ("72", "She sold 48+24\n#### 72", 1),
    (r"\sqrt{2}", "1.414214", 1),
    (r"\sqrt{2}", "1.414", 0),
    (r"\frac{\sqrt{3}}{2}", r"\sin(\pi/3)", 1),
    ("(x+1)^2", "x^2+2x+1", 1),
    ("(x+1)^2", "x^2+2x+2", 0),
    ("5", "x=5", 1),
    (r"2\frac{1}{2}", "2.5", 1),
    ("120", "5!", 1),
    ("Monday", "monday", 1),
    ("Monday", "Yadmon", 0),
    ("5", r"5 \text{ cm}", 1),
    ("1000", "1{,}000", 1),
    ("1000", "1e3", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\ 2\end{pmatrix}", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\ 3\end{pmatrix}", 0),
    ("3", r"\frac{1}{0}", 0),
    ("1", r"\frac{1", 0),
    ("1", "", 0),
]


@pytest.mark.parametrize(("gold", "text", "reward"), C11 + C13 + C14 + C16 + MORE)
def test_pairs(gold: str, text: str, reward: int) -> None:
    """C11, C13, C14, C16: gold first."""
    assert math_answer([text], answer=[gold]) == [float(reward)]


@pytest.mark.parametrize(("gold", "text", "reward"), C17)
def test_oversized_answers_cost_little(gold: str, text: str, reward: int) -> None:
    """C17: within 2 s and 512 MB each; no exception leaves the checker."""
    math_answer(["1+1"], answer=["x"])  # the first call imports sympy
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    assert math_answer([text], answer=[gold]) == [float(reward)]
    assert time.process_time() - started < 2.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024


@pytest.mark.parametrize("value", ["8", r"\frac{2}{5}", "4,9", r"50\%", r"\sqrt{2}+1"])
def test_the_form_of_the_gold_makes_no_difference(value: str) -> None:
    """C14: bare, boxed and after `####`, on both sides."""
    forms = [value, rf"\boxed{{{value}}}", f"#### {value}", f"some words\n#### {value}", rf"thus $\boxed{{{value}}}$."]
    for gold, text in itertools.product(forms, forms):
        assert math_answer([text], answer=[gold]) == [1.0]
        assert math_answer([text.replace(value, "13")], answer=[gold]) == [0.0]


def test_gold_of_any_type_and_missing_gold() -> None:
    assert math_answer(["12", "0.5", "5", "5"], answer=[12, 0.5, None, ""]) == [1.0, 1.0, None, None]


def test_require_box() -> None:
    assert math_answer(["5", r"\boxed{5}"], answer=["5", "5"], require_box=True) == [0.0, 1.0]


def test_final_answer_by_hand() -> None:
    assert final_answer(r"so \boxed{\frac{a}{\{b\}}} holds") == r"\frac{a}{\{b\}}"
    assert final_answer(r"\boxed{\boxed{5}}") == "5"
    assert final_answer(r"\boxed{1} then \boxed{2") is None
    assert final_answer("It is 7 apples and 1/2 pear. The answer is 8") == "8"
