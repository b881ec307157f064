"""HybridCache agrees with a simple model of cached prefixes, and with a device that stores in each block its tokens."""

import depth
from fakes.cache_machine import BLOCK, PAGE, Machine
from hypothesis import settings


class Roomy(Machine):
    """Nothing is ever evicted, so exactly the kept boundaries are found."""

    num_blocks, num_pages, evicts = 400, 1600, False


class Interval(Machine):
    num_blocks, num_pages, interval, evicts = 400, 1600, 2 * BLOCK, False


class EveryBoundary(Machine):
    """No state that mode "align" would keep is evicted while an expendable one is cached."""

    mode, num_blocks = "all", 16


class RoomyEveryBoundary(Machine):
    """Nothing is evicted: what is found and not expendable is exactly what mode "align" would keep."""

    num_blocks, num_pages, evicts, mode, interval = 400, 1600, False, "all", 3 * BLOCK


class Inside(Machine):
    """Requests keep states at the end of every page, also inside blocks."""

    grain, num_blocks = PAGE, 14


class RoomyInside(Roomy):
    grain = PAGE


class EveryBoundaryInside(EveryBoundary):
    grain, num_blocks = PAGE, 18


for machine in (Machine, Roomy, Interval, EveryBoundary, RoomyEveryBoundary, Inside, RoomyInside, EveryBoundaryInside):
    machine.TestCase.settings = settings(
        max_examples=depth.examples(quick=25, full=80), stateful_step_count=50, deadline=None
    )
TestSmallPools = Machine.TestCase
TestRoomyPools = Roomy.TestCase
TestInterval = Interval.TestCase
TestEveryBoundary = EveryBoundary.TestCase
TestRoomyEveryBoundary = RoomyEveryBoundary.TestCase
TestInside = Inside.TestCase
TestRoomyInside = RoomyInside.TestCase
TestEveryBoundaryInside = EveryBoundaryInside.TestCase
