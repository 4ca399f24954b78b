"""Presentation of results: tables, charts, and the documents that hold them."""
