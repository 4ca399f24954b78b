"""Renews the documents from the results: see bench/report/documents.py."""

from bench.report.documents import main, parser

__all__ = ["main", "parser"]
