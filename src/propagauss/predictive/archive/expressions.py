"""Sizes that depend on the input, as `Mul(Integer(4), Symbol('s0', ...))`: SymPy would evaluate any Python instead."""

from __future__ import annotations

import ast
import re
from typing import Any

from propagauss.predictive.archive.refused import Refused

SYMBOL = re.compile(r"[a-z]{1,4}[0-9]{1,5}")  # PyTorch counts up to the number, so it must be small
NUMBERS = {"Integer", "Float", "Rational"}
FUNCTIONS = {
    *("Add", "Mul", "Pow", "Min", "Max", "Mod", "PythonMod", "FloorDiv", "CeilDiv", "CleanDiv", "ModularIndexing"),
    *("Where", "Identity", "ToFloat", "TruncToInt", "TruncToFloat", "CeilToInt", "FloorToInt", "RoundToInt"),
    *("IntTrueDiv", "FloatTrueDiv", "Equality", "Unequality", "GreaterThan", "LessThan", "StrictGreaterThan"),
    *("StrictLessThan", "And", "Or", "Not"),
}
LENGTH, DIGITS, POWER = 10_000, 19, 8


def check_size(text: Any) -> None:
    if not isinstance(text, str) or len(text) > LENGTH:
        raise Refused("a size in its program is malformed")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError) as error:
        raise Refused(f"a size in its program is malformed ({text[:60]!r})") from error
    if not _fine(tree.body):
        raise Refused(f"a size in its program is {text[:60]!r}")


def _fine(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return bool(SYMBOL.fullmatch(node.id)) or node.id in ("true", "false")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    if node.func.id == "Symbol":
        first = node.args[0] if len(node.args) == 1 else None
        marks = all(
            isinstance(mark.value, ast.Constant) and mark.value.value in (True, False) for mark in node.keywords
        )
        name = first.value if isinstance(first, ast.Constant) else None
        return marks and isinstance(name, str) and bool(SYMBOL.fullmatch(name))
    if node.func.id in NUMBERS:
        return _number(node)
    if node.func.id == "Pow" and not (len(node.args) == 2 and _small(node.args[1]) and not _has_power(node.args[0])):
        return False  # towers of powers take all memory
    return node.func.id in FUNCTIONS and not node.keywords and all(_fine(each) for each in node.args)


def _number(node: ast.Call) -> bool:
    values = [each.operand if isinstance(each, ast.UnaryOp) else each for each in node.args]
    signs = all(isinstance(each.op, ast.USub) for each in node.args if isinstance(each, ast.UnaryOp))
    plain = all(isinstance(each, ast.Constant) and isinstance(each.value, int | str) for each in values)
    short = all(re.fullmatch(rf"[0-9.eE+\-]{{1,{DIGITS}}}", str(each.value)) for each in values if plain)  # type: ignore[attr-defined]
    precision = all(isinstance(each.value, ast.Constant) and each.value.value in range(64) for each in node.keywords)
    return signs and plain and short and precision


def _small(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Integer"):
        return False
    try:
        return len(node.args) == 1 and abs(ast.literal_eval(node.args[0])) <= POWER
    except (TypeError, ValueError):
        return False


def _has_power(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "Pow" for each in ast.walk(node))
