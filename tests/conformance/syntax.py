"""Syntax trees, for the suites that run torch's own tests rewritten."""

from __future__ import annotations

import ast

__all__ = ["dotted", "expression"]


def expression(text: str) -> ast.expr:
    """The tree of one expression."""
    return ast.parse(text, mode="eval").body


def dotted(node: ast.AST) -> str:
    """ "torch.cuda.synchronize" for such an expression, "" for any that is no dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""
