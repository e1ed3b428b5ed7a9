"""How a module's owner calls it, read in the owner's source."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap

from torch import nn

_ROLES = ("query", "key")  # the first two arguments of nn.MultiheadAttention


@functools.cache
def reads_other_tokens(owner: type, name: str) -> bool | None:
    """True where modules of this class call their attention ``name`` with other keys than queries.

    The attention is called as an ``nn.MultiheadAttention``. None where the source does not say.
    """
    found: list[bool] = []
    for cls in owner.__mro__[: owner.__mro__.index(nn.Module)]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError, SyntaxError):  # made in a session, or by a program
            continue
        for function in ast.walk(tree):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                reader = _Reader(name)
                reader.visit(function)
                found += reader.differ
    return any(found) if found else None


class _Reader(ast.NodeVisitor):
    """The calls of ``self.<name>`` in a function, with what its variables hold at that place."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[str, str] = {}  # of variables: where two are equal, they hold the same tensor
        self.differ: list[bool] = []

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._assign(target, node.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple) else []
            if len(parts) == len(target.elts):
                held = [self._value(part) for part in parts]
            else:
                held = [f"{self._place(value)}[{index}]" for index in range(len(target.elts))]
            for part, holds in zip(target.elts, held, strict=True):
                if isinstance(part, ast.Name):
                    self.values[part.id] = holds
        elif isinstance(target, ast.Name):
            self.values[target.id] = self._value(value)

    def _value(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return self.values.get(node.id, node.id)
        return self._place(node)

    @staticmethod
    def _place(node: ast.expr) -> str:
        """One evaluation of an expression; another one, elsewhere, may give another tensor."""
        return f"{node.lineno}:{node.col_offset}"

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        called = node.func
        if not (isinstance(called, ast.Attribute) and called.attr == self.name):
            return
        if not (isinstance(called.value, ast.Name) and called.value.id == "self"):
            return
        given = dict(zip(_ROLES, node.args, strict=False))
        given |= {word.arg: word.value for word in node.keywords if word.arg in _ROLES}
        if len(given) == len(_ROLES) and not any(isinstance(part, ast.Starred) for part in given.values()):
            first, second = (given[role] for role in _ROLES)
            same = self._value(first) == self._value(second) or ast.dump(first) == ast.dump(second)
            self.differ.append(not same)
