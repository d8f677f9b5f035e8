"""Comparison of formulas that are no plain numbers: parsed by math-verify, evaluated only if sure to end."""

from __future__ import annotations

import importlib
import logging
import math
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.rewards.math import Number

_MAX_CHARACTERS = 400
_MAX_PARENTHESES, _MAX_BRACES, _MAX_BARS = 6, 20, 8  # the parser's time grows steeply with nesting
_MAX_NODES = 200
_MAX_LOG10 = 10_000.0  # digits of the largest number that is computed
_MAX_TERMS = 500
_MAX_SYMBOLIC_POWER = math.log10(32)
_DIGITS = 60
_COUNTING = ("sympy.functions.combinatorial", "sympy.functions.special")


def _sympy() -> Any:
    """Imported late: it takes half a second that other rewards need not spend."""
    return importlib.import_module("sympy")


def math_verify() -> Any:
    """Imported late, as sympy; without its warning that it sets no time limit."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return importlib.import_module("math_verify")


def symbolic_equal(gold: str, answer: str, numbers: tuple[Number | None, Number | None]) -> bool:
    """Whether two formulas are equal; `numbers` are their readings as plain numbers, where they have one."""
    a, b = _parse(gold), _parse(answer)
    if a is None or b is None:
        return False
    try:
        if _is_constant(a) and _is_constant(b):
            return _constants_equal(a, b, numbers)
        return bool(
            math_verify().verify(
                a, b, numeric_precision=30, float_rounding=12, timeout_seconds=None, allow_set_relation_comp=True
            )
        )
    except Exception:
        # sympy raises errors of every kind on odd input; none of them means that the answer is right.
        return False


def _parse(text: str) -> Any:
    """The formula as an unevaluated sympy object; None where it is none or is too big to be worked with."""
    if len(text) > _MAX_CHARACTERS or text.count("|") > _MAX_BARS:
        return None
    if nesting(text) > _MAX_PARENTHESES or nesting(text, "{}") > _MAX_BRACES:
        return None
    text = re.sub(r"\*\*", "^", text)
    library = math_verify()
    found = library.parse(
        f"${text}$",
        [library.LatexExtractionConfig(boxed_match_priority=-1)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    return found[0] if found and _is_small(found[0]) else None


def nesting(text: str, brackets: str = "()[]") -> int:
    """Depth of nested brackets of the given kinds."""
    depth = deepest = 0
    for sign in text:
        where = brackets.find(sign)
        depth += 0 if where < 0 else 1 - 2 * (where % 2)
        deepest = max(deepest, depth)
    return deepest


def _is_constant(expression: Any) -> bool:
    return isinstance(expression, _sympy().Expr) and not expression.free_symbols


def _is_small(expression: Any) -> bool:
    sympy = _sympy()
    if isinstance(expression, sympy.MatrixBase):
        expression = expression.as_immutable()
    if not isinstance(expression, sympy.Basic):
        return False
    endless = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Derivative, sympy.Limit)
    for count, node in enumerate(sympy.preorder_traversal(expression)):
        if count > _MAX_NODES or isinstance(node, endless):
            return False
    return _log10(expression) <= _MAX_LOG10 and _terms(expression) <= _MAX_TERMS


def _terms(node: Any) -> float:
    """An upper bound of the terms of a formula that is multiplied out."""
    sympy = _sympy()
    parts = [_terms(part) for part in node.args]
    if isinstance(node, sympy.Pow):
        power = abs(int(node.exp)) if isinstance(node.exp, sympy.Integer) and abs(node.exp) <= 100 else 1
        return min(math.comb(power + int(parts[0]) - 1, power), 10**9) if parts[0] < 10**6 else math.inf
    if isinstance(node, sympy.Mul):
        return math.prod(parts)
    return max(1.0, sum(parts))


def _log10(node: Any) -> float:
    """An upper bound of log10 of the size of the integers that evaluating a formula makes; inf: do not."""
    sympy = _sympy()
    if isinstance(node, sympy.Rational):
        return max(abs(int(node.p)).bit_length(), int(node.q).bit_length()) * math.log10(2)
    if isinstance(node, sympy.Float):
        return abs(math.log10(abs(float(node)))) if float(node) else 0.0
    if not getattr(node, "args", ()):
        return 1.0
    parts = [_log10(part) for part in node.args]
    if max(parts) > _MAX_LOG10:
        return math.inf
    if isinstance(node, sympy.Pow):
        if node.base.free_symbols and not node.exp.free_symbols and parts[1] > _MAX_SYMBOLIC_POWER:
            return math.inf
        return float(max(parts[0], 1.0) * 10.0 ** min(parts[1], 100.0))
    kind = type(node)
    if issubclass(kind, (sympy.exp, sympy.cosh, sympy.sinh, sympy.tanh)):
        return float(10.0 ** min(parts[0], 100.0))
    if issubclass(kind, (sympy.Add, sympy.Mul)):
        return float(sum(parts))
    if issubclass(kind, sympy.Function) and kind.__module__.startswith(_COUNTING):  # factorials and their kin
        return math.inf if max(parts) > 3.5 else float(sum(10.0**part * max(part, 1.0) for part in parts))
    return float(max(parts))


def _constants_equal(a: Any, b: Any, numbers: tuple[Number | None, Number | None]) -> bool:
    from rl_core.rewards.math import written_as

    sympy = _sympy()
    for number, other in ((numbers[0], b), (numbers[1], a)):
        if number is not None:
            value = other.doit()
            if isinstance(value, sympy.Rational):
                exact = Fraction(int(value.p), int(value.q))
                return written_as(number, exact, exact)
            low, high = _bounds(value)
            return written_as(number, low, high)
    x, y = a.doit(), b.doit()
    if isinstance(x, sympy.Rational) and isinstance(y, sympy.Rational):
        return bool(x == y)
    difference = abs(x.evalf(_DIGITS) - y.evalf(_DIGITS))
    return bool(difference <= max(abs(x.evalf(_DIGITS)), abs(y.evalf(_DIGITS))) * sympy.Rational(1, 10**40))


def _bounds(value: Any) -> tuple[Fraction, Fraction]:
    """Rational numbers close below and above a real constant. Raises on a complex or infinite one."""
    number = _sympy().Rational(str(value.evalf(_DIGITS)))
    exact = Fraction(int(number.p), int(number.q))
    margin = abs(exact) / 10**40
    return exact - margin, exact + margin
