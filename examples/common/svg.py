"""Pieces of drawings as SVG text."""

from html import escape


def text(x: float, y: float, words: str, size: int = 12, **style: str) -> str:
    """One line of text; underscores in the names of attributes become hyphens."""
    more = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in style.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{more}>{escape(words)}</text>'


def rect(x: float, y: float, w: float, h: float, fill: str, hover: str = "") -> str:
    """A filled rectangle; `hover` is shown where the pointer rests on it."""
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}"'
    return f"{shape}><title>{escape(hover)}</title></rect>" if hover else f"{shape}/>"


def line(x0: float, y0: float, x1: float, y1: float, colour: str, width: float) -> str:
    """A straight line."""
    ends = f'x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'
