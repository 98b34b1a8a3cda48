#!/usr/bin/env python3
"""Draws the lanes of a step, one SVG per strategy, from what the lanes were given.

    build/release/tests/dist/schedule_trace build/schedule               (one JSON file per strategy)
    .venv/bin/python tools/draw_schedule.py build/schedule docs/schedule

`make schedule` does both.
"""

import argparse
import html
import json
import pathlib

from schedule_times import COSTS, DRAWN_LANES, REPLICA_COST, Timeline

UNIT = 14  # pixels of one step of time
LEFT, RIGHT = 84, 18
LEAST_WIDTH = 1090  # for the words below
TOP = 64  # title and legend
BAND = 20  # above a strip's lanes: what the program does
LANE, GAP = 36, 24  # of a lane, and between two
BETWEEN = 40  # strips
STEP_WIDTH = 100  # of the words at the end of the last strip
CAPTION = 80
FONT = "Helvetica, Arial, sans-serif"
LETTER = 0.58  # mean width of a letter, of its height
INK, PALE, FAINT = "#24303c", "#55616e", "#8a96a3"
# A unit's colours: light for forward and gather, middle for backward, dark for weight gradients and reduces.
COLOURS = (
    ("#e3e6ea", "#c3c9d1", "#a3adb8"),
    ("#d6e6f7", "#a3c8ee", "#74aae0"),
    ("#fbe3c8", "#f6c58d", "#eca552"),
    ("#d8efd8", "#a6d9a8", "#75c07a"),
    ("#ead9f1", "#d0afe0", "#b486cb"),
)
SHADE = {"backward": 1, "wgrad": 2, "reduce": 2}


def fits(text, size, width):
    """Perhaps squeezed a little."""
    return len(text) * size * LETTER <= 1.25 * (width - 4)


def text_in(x, y, content, size, width):
    """Around x, in `width`."""
    tight = len(content) * size * LETTER > width - 4  # whatever font the reader has
    more = f' textLength="{width - 4:g}" lengthAdjust="spacingAndGlyphs"' if tight else ""
    return text_at(x, y, content, size, "middle", more=more)


def text_at(x, y, content, size=12, anchor="start", fill=INK, more=""):
    return (f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{more}>'
            f"{html.escape(content)}</text>")


def said(wait):
    of = "the peers' signal" if wait.of_peers else wait.lane
    return f"after {of}: {wait.what or 'what came before'}"


def titled(lines, shape):
    """With what a viewer shows under the pointer: also the waits that held nothing up are written there."""
    return f"<g><title>{html.escape(chr(10).join(lines), quote=False)}</title>{shape}</g>"


class Strip:
    """One row of lanes: the time from `begin` to `end`."""

    def __init__(self, timeline, lanes, top, begin, end):
        self.timeline, self.lanes, self.top, self.begin, self.end = timeline, lanes, top, begin, end

    def height(self):
        return BAND + len(self.lanes) * (LANE + GAP)

    def x(self, time):
        return LEFT + (time - self.begin) * UNIT

    def y(self, lane):
        """The upper edge of a lane."""
        return self.top + BAND + self.lanes.index(lane) * (LANE + GAP) + 8

    def is_last(self):
        return self.end == self.timeline.length()

    def width(self):
        return (self.end - self.begin) * UNIT + (STEP_WIDTH if self.is_last() else 0)

    def holds(self, box):
        at_a_point = box.start == box.end and self.begin < box.end <= self.end
        return at_a_point or box.start < self.end and box.end > self.begin

    def draw(self):
        parts = [self.band(mark, until) for mark, until in self.spans()]
        for lane in self.lanes:
            row = (f'<rect x="{LEFT}" y="{self.y(lane)}" width="{self.x(self.end) - LEFT:g}" height="{LANE}" '
                   'fill="#f3f5f7"/>')
            rest = self.timeline.waits[lane] if self.is_last() else []  # with no box behind them
            parts.append(titled([f"{lane} lane", *map(said, rest)], row) if rest else row)
            parts.append(text_at(LEFT - 10, self.y(lane) + LANE / 2 + 4, lane, 13, "end", more=' font-weight="bold"'))
        boxes = [box for box in self.timeline.boxes if self.holds(box)]
        parts += [line for box in boxes for line in self.waits(box, binding=False)]
        parts += [self.box(box) for box in boxes]
        parts += self.labels_of_small(boxes)
        parts += [line for box in boxes for line in self.waits(box, binding=True)]
        return parts

    def spans(self):
        """(mark, time of the next one) of the marks that lie in this strip."""
        marks = self.timeline.marks
        ends = [mark["time"] for mark in marks[1:]] + [self.timeline.length()]
        return [(mark, end) for mark, end in zip(marks, ends) if self.begin <= mark["time"] < self.end + self.is_last()]

    def band(self, mark, until):
        x, right = self.x(mark["time"]), self.x(min(until, self.end))
        y = self.top
        fill = {"forward": "#eef4ea", "backward": "#f8efe6"}.get(mark["what"], "none")
        name = f"microbatch {mark['microbatch'] + 1}: {mark['what']}"
        if mark["what"] == "step":
            name = "optimizer's step"
        bottom = self.top + self.height() - GAP + 8
        return (f'<rect x="{x:g}" y="{y}" width="{right - x:g}" height="{bottom - y}" fill="{fill}"/>'
                f'<line x1="{x:g}" y1="{y}" x2="{x:g}" y2="{bottom}" stroke="{FAINT}"/>' + text_at(x + 6, y + 15, name))

    def box(self, box):
        start, end = max(box.start, self.begin), min(box.end, self.end)
        x, y, width = self.x(start), self.y(box.lane), (end - start) * UNIT
        lines = [*box.names, f"{box.lane} lane, {box.start} to {box.end}", *map(said, box.waits)]
        if box.phase == "end":
            bar = f'<line x1="{x:g}" y1="{y - 3}" x2="{x:g}" y2="{y + LANE + 3}" stroke="{INK}" stroke-width="2"/>'
            return titled(lines, bar)
        fill = COLOURS[self.timeline.units.index(box.unit) % len(COLOURS)][SHADE.get(box.phase, 0)]
        dash = ' stroke-dasharray="3 2"' if box.over_replicas else ""
        shape = (f'<rect x="{x + 0.5:g}" y="{y}" width="{width - 1:g}" height="{LANE}" rx="2" fill="{fill}" '
                 f'stroke="{INK}" stroke-width="{1 if dash else 0.7}"{dash}/>')
        middle = x + width / 2
        if end - start < box.end - box.start:  # the rest stands in another strip
            shape += text_at(middle, y + 21, "…", 11, "middle")
        else:
            if fits(box.unit, 11, width):
                shape += text_in(middle, y + 16, box.unit, 11, width)
            if fits(box.phase, 10, width):
                shape += text_in(middle, y + 29, box.phase, 10, width)
        return titled(lines, shape)

    def labels_of_small(self, boxes):
        """What boxes too small for their phase are, below each row of them."""
        runs = []
        for box in sorted(boxes, key=lambda box: (box.lane, box.start)):
            if box.start == box.end or fits(box.phase, 10, (box.end - box.start) * UNIT):
                continue
            name = "replicas" if box.over_replicas else box.phase
            if runs and runs[-1][0] == name and (runs[-1][1].lane, runs[-1][1].end) == (box.lane, box.start):
                runs[-1][1:] = [box, runs[-1][2]]
            else:
                runs.append([name, box, box])
        return [text_at(self.x((first.start + last.end) / 2), self.y(last.lane) + LANE + 12, name, 10, "middle")
                for name, last, first in runs]

    def line(self, wait, box, style):
        down = self.lanes.index(box.lane) > self.lanes.index(wait.lane)
        y1, y2 = self.y(wait.lane) + (LANE if down else 0), self.y(box.lane) + (-1 if down else LANE + 1)
        return f'<line x1="{self.x(wait.time):g}" y1="{y1}" x2="{self.x(box.start):g}" y2="{y2}" {style}/>'

    def drawn_waits(self, box):
        """({lane: wait} that box stood still for, {lane: wait} of the others), the last one for each other lane."""
        binding = {wait.lane: wait for wait in box.held_up_by()}
        slack = {}
        for wait in sorted(box.waits, key=lambda wait: wait.time):
            seen = any(b.lane == wait.lane and b.end == wait.time for b in self.timeline.boxes)
            if seen and not wait.implied and wait.lane not in (box.lane, *binding):
                slack[wait.lane] = wait
        return binding, slack

    def waits(self, box, binding):
        """Lines, as far as both ends lie in this strip."""
        style = (f'stroke="{INK}" stroke-width="1.6" marker-end="url(#head)"' if binding else
                 f'stroke="{FAINT}" stroke-width="1" stroke-dasharray="2 3"')
        waits = self.drawn_waits(box)[0 if binding else 1].values()
        return [self.line(wait, box, style) for wait in waits if self.begin < wait.time and box.start <= self.end]


def title_of(trace):
    title = f"strategy {trace['strategy']}"
    if trace["replicas"] > 1:
        title += f" on a hybrid mesh of {trace['replicas']} replicas"
    if trace["optimizer_over_replicas"]:
        title += ", optimizer sharded over them"
    return f"{title}: rank 0 of {trace['ranks']}, one step of {trace['microbatches']} microbatches"


def legend(trace):
    parts, x = [], LEFT
    for index, unit in enumerate(trace["units"]):
        for shade in range(3):
            parts.append(f'<rect x="{x + 11 * shade}" y="38" width="11" height="12" '
                         f'fill="{COLOURS[index % len(COLOURS)][shade]}"/>')
        parts.append(text_at(x + 38, 48, unit))
        x += 50 + 8 * len(unit)
    shades = "light: forward, gather · middle: backward · dark: weight gradient, reduce"
    if trace["replicas"] > 1:
        shades += " · dashed: over the replicas"
    parts.append(text_at(x, 48, shades, fill=PALE))
    return parts


def caption(y):
    costs = ", ".join(f"{name} {steps}" for name, steps in COSTS.items() if steps)
    lines = (
        "Time to the right, from one strip to the next. Arrow: the lane stood still until then. Dotted: a wait that "
        "held nothing up. Thick bar: end of a backward.",
        "The host is never ahead of the compute lane: nothing begins before the compute work given out before it.",
        f"Which operation comes on which lane, and what it waits for, is recorded; how long it takes is not: {costs}, "
        f"over replicas {REPLICA_COST}, others 1.",
    )
    return [text_at(LEFT, y + 18 * number, line, fill=PALE) for number, line in enumerate(lines)]


def svg(trace):
    """The picture of a trace, as text."""
    timeline = Timeline(trace)
    lanes = [lane for lane in DRAWN_LANES if lane != "host" or any(box.lane == "host" for box in timeline.boxes)]
    begins = [mark["time"] for mark in timeline.marks if mark["what"] == "forward"]
    strips, top = [], TOP
    for begin, end in zip(begins, [*begins[1:], timeline.length()]):
        strips.append(Strip(timeline, lanes, top, begin, end))
        top += strips[-1].height() + BETWEEN - GAP
    height = top + CAPTION - 20
    width = LEFT + max([LEAST_WIDTH, *(strip.width() for strip in strips)]) + RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="{FONT}">',
        f'<defs><marker id="head" markerWidth="7" markerHeight="7" refX="6" refY="3.5" orient="auto">'
        f'<path d="M0,0 L7,3.5 L0,7 z" fill="{INK}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        text_at(LEFT, 26, title_of(trace), 16, more=' font-weight="bold"'),
        *legend(trace),
        *(part for strip in strips for part in strip.draw()),
        *caption(top + 8),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=pathlib.Path, help="folder of schedule_trace's JSON files")
    parser.add_argument("pictures", type=pathlib.Path, help="folder for the SVG files")
    arguments = parser.parse_args()
    arguments.pictures.mkdir(parents=True, exist_ok=True)
    for path in sorted(arguments.traces.glob("*.json")):
        (arguments.pictures / f"{path.stem}.svg").write_text(svg(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
