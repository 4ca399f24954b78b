"""A recorded run as one HTML page without a script and without any reference to a network.

It shows the summary and the lanes of one typical step. To zoom and to look at other steps, open the
trace of `perfetto_trace` in Perfetto.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from fastsync.timeline.data import RankStep, Run, by_step
from fastsync.timeline.moves import Span, size_text
from fastsync.timeline.views import Bar, lanes_of, step_length, summarise, summary_text

_RANKS = 8  # that are shown at most
_STYLE = """
:root { color-scheme: light dark; font: 14px/1.45 system-ui, sans-serif; }
body { max-width: 1240px; margin: 24px auto; padding: 0 16px; }
.lane { display: flex; align-items: center; }
.lane > span { flex: 0 0 11em; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.track { position: relative; flex: 1; height: 16px; margin: 1px 0; background: #8882; }
.track i { position: absolute; top: 0; height: 100%; min-width: 1px; }
.forward { background: #9aabc4; } .backward { background: #71849f; }
.exposed { background: #d43f3a; } .waiting { background: #dd9a1f; }
.late { background: #16788b66; } .all-reduce, .gather, .busy { background: #16788b; }
.reduction, .sum, .average { background: #7a5ea8; }
pre { overflow-x: auto; }
"""
_LEGEND = (
    *(("forward", "forward"), ("backward", "backward"), ("exposed", "exposed")),
    *(("waiting", "waits for its turn"), ("late", "waits for another rank")),
    *(
        ("busy", "all-reduce or gather"),
        ("reduction", "reduction of a unit, average of a fragment"),
    ),
)


def html_page(run: Run) -> str:
    """Return the page.

    Raises:
        ValueError: no step is complete on all ranks.
    """
    summary, text, steps = summarise(run), summary_text(run), by_step(run)
    sending = [n for n in steps if steps[n][0].moves] or list(steps)
    typical = min(sending, key=lambda n: abs(step_length(steps[n]) - summary.step))
    shown = steps[typical][:_RANKS]
    late = summary.straggler and summary.straggler.ranks[0]
    if late is not None and all(step.rank != late for step in shown):
        shown[-1] = next(step for step in steps[typical] if step.rank == late)
    legend = " ".join(f'<i class="{kind}">&emsp;</i> {words}&ensp;' for kind, words in _LEGEND)
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>fastsync timeline</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(run.model)} on {run.world_size} ranks</h1><pre>{escape(text)}</pre>",
        f"<h2>Step {typical}, {_ms(step_length(steps[typical]))}</h2><p>{legend}</p>",
        *_lanes(run, shown, steps[typical]),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _lanes(run: Run, shown: Sequence[RankStep], every: Sequence[RankStep]) -> Iterator[str]:
    """Lanes of some ranks, on one scale.

    Args:
        every: the step on all ranks, which tell when the last one has launched a collective.
    """
    origin, end = min(s.start for s in every), max(s.last for s in every)
    launched: dict[tuple[str, int, int], int] = {}
    for step in every:
        for key, time in step.launches.items():
            launched[key] = max(launched.get(key, 0), time)

    def bar(kind: str, span: Span, title: str) -> str:
        begin = max(span[0], origin)  # an average may have been sent in a step before
        left, width = (100 * x / (end - origin) for x in (begin - origin, span[1] - begin))
        told = escape(f"{title}\n{_ms(1e-9 * (span[1] - span[0]))}")
        return f'<i class="{kind}" style="left:{left:.3f}%;width:{width:.3f}%" title="{told}"></i>'

    def lane(label: str, bars: Sequence[str]) -> str:
        track = f'<div class="track">{"".join(bars)}</div>'
        return f'<div class="lane"><span>{escape(label)}</span>{track}</div>'

    for step in shown:
        yield f"<h3>Rank {step.rank}</h3>"
        for _, label, bars in lanes_of(run, step):
            drawn = []
            for each in bars:
                begin, done = each.span
                if each.launch is not None:  # nothing moves before the last rank has launched it
                    last = min(max(launched[each.launch], begin), done)
                    drawn.append(bar("late", (begin, last), f"{label} waits for another rank"))
                    begin = last
                drawn.append(bar(each.name, (begin, done), _told(f"{each.name}, {label}", each)))
            yield lane(label, drawn)
        busy = [bar("busy", span, "a collective is under way") for span in step.busy]
        yield lane("communication", busy)


def _told(title: str, bar: Bar) -> str:
    """Return the text that the pointer over a bar shows."""
    wire = f" as {bar.facts['wire']}" if "wire" in bar.facts else ""
    size = [size_text(float(str(bar.facts["bytes"]))) + wire] if "bytes" in bar.facts else []
    parameters = bar.facts.get("parameters", [])
    assert isinstance(parameters, list)
    return "\n".join([title, *size, *parameters])
