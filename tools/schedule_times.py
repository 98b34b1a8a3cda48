"""When each operation of a recorded step would run, if work took the steps of COSTS and everything else no time.

A lane runs its operations in order. One begins when its lane is free, all that its lane was told to wait for has ended,
and the host has given it out, which is never ahead of the compute lane: not before the work that it gave that lane last
has begun. All ranks run the same schedule, so a peer's signal comes when this rank's own does.
"""

import dataclasses

# Steps that one operation takes, by the first word of its name; the trace says what is run, not for how long.
COSTS = {"forward": 4, "backward": 4, "wgrad": 2, "gather": 3, "reduce": 3, "done": 0}
REPLICA_COST = 2  # gathers and reduces over the replicas move a shard, not the whole
OTHER_COST = 1
WORK = {"run", "copy", "fill", "collective", "rejoin"}
DRAWN_LANES = ("gather", "compute", "reduce", "host")


@dataclasses.dataclass(frozen=True)
class Wait:
    """That a lane waited for something, before one of its boxes."""

    lane: str  # where it came from
    time: int  # when that had ended
    what: str
    of_peers: bool  # a signal of the peers, as this rank gives it
    implied: bool  # the waiting lane had come after it already


@dataclasses.dataclass
class Box:
    """Work on a lane: one operation, or several of the same that follow each other."""

    lane: str
    phase: str  # first word of the name: "gather"
    unit: str
    names: list
    start: int
    end: int
    free: int  # when its lane had ended what came before
    waits: list

    @property
    def over_replicas(self):
        return is_over_replicas(self.names[0])

    def held_up_by(self):
        """The waits of another lane that ended last, if the lane stood still for them."""
        others = [wait for wait in self.waits if wait.lane != self.lane]
        return [wait for wait in others if wait.time == self.start > self.free]


def is_over_replicas(name):
    return name.endswith(" of replicas")


def phase_and_unit(name, units):
    """("wgrad", "block0") of "wgrad block0.up.weight"; what names no unit is the root's."""
    phase, _, rest = name.partition(" ")
    unit = rest.removeprefix("with ").partition(" ")[0].partition(".")[0]
    return phase, unit if unit in units else units[0]


def cost(operation):
    if operation["kind"] == "rejoin":
        return 0
    if is_over_replicas(operation["name"]):
        return REPLICA_COST
    return COSTS.get(operation["name"].partition(" ")[0], OTHER_COST)


class Timeline:
    """Boxes in the order of issue, and the time at which the compute lane came to each mark of the program."""

    def __init__(self, trace):
        self.units = trace["units"]
        self.boxes, self.marks = [], []
        self.free = dict.fromkeys(DRAWN_LANES, 0)
        self._own_signals = {self._key(o): None for o in trace["operations"] if o["kind"] == "signal"}
        self._reached = {}  # (lane, position): (time, what was done last)
        self._last_name = dict.fromkeys(DRAWN_LANES, "")
        self.waits = {lane: [] for lane in DRAWN_LANES}  # since the lane's last box
        self._given = 0  # when the host gives out what comes now
        self._behind = {}  # (lane, other lane): time up to which it comes after the other
        self._open = dict.fromkeys(DRAWN_LANES)  # the lane's last box, while nothing has come after it
        marks = list(trace["marks"])
        for index, operation in enumerate(trace["operations"]):
            while marks and marks[0]["at"] == index:
                self._mark(marks.pop(0))
            self._add(operation)
        for mark in marks:
            self._mark(mark)

    def length(self):
        return max(self.free.values())

    @staticmethod
    def _key(operation):
        return operation["channel"], operation["sequence"]

    def _mark(self, mark):
        self.marks.append(mark | {"time": self.free["compute"]})

    def _add(self, operation):
        lane, kind = operation["lane"], operation["kind"]
        begin = max(self.free[lane], self.free["host"], self._given)
        if kind == "wait" and "event" in operation:
            event = operation["event"]
            time, what = self._reached[event["lane"], event["position"]]
            begin = self._wait(lane, begin, event["lane"], time, what)
        elif kind == "wait_signal" and self._key(operation) in self._own_signals:  # else: of an earlier step
            given = self._own_signals[self._key(operation)]
            if given is None:
                raise ValueError(f"{lane} #{operation['position']} waits for {operation['name']}, signalled only later")
            begin = self._wait(lane, begin, *given, operation["name"], of_peers=True)
        elif kind == "signal":
            self._own_signals[self._key(operation)] = lane, begin
        elif kind in WORK:
            begin = self._work(operation, begin)
        if kind not in WORK and kind != "move":
            self._open[lane] = None
        if kind != "move":
            self.free[lane] = begin
        self._reached[lane, operation["position"]] = begin, self._last_name[lane]

    def _wait(self, lane, begin, source, time, what, of_peers=False):
        """When the lane goes on."""
        behind = self._behind.get((lane, source), -1)
        self.waits[lane].append(Wait(source, time, what, of_peers, implied=time <= behind))
        self._behind[lane, source] = max(time, behind)
        return max(begin, time)

    def _work(self, operation, begin):
        """The end of what `operation` does."""
        lane, name = operation["lane"], operation["name"]
        self._last_name[lane] = name
        if lane == "compute" and operation["kind"] != "rejoin":
            self._given = begin
        if not cost(operation) and operation["kind"] != "rejoin":
            self._open[lane] = None
            return begin
        phase, unit = phase_and_unit(name, self.units)
        box = self._open[lane]
        if box and (box.phase, box.unit) == (phase, unit):
            if name != box.names[-1]:  # pieces of one reduce bear one name
                box.names.append(name)
                box.end = begin + cost(operation)
            return box.end
        waits = self.waits[lane]
        self.waits[lane] = []
        free = max((b.end for b in self.boxes if b.lane == lane), default=0)
        self._open[lane] = Box(lane, phase, unit, [name], begin, begin + cost(operation), free, waits)
        self.boxes.append(self._open[lane])
        return self._open[lane].end
