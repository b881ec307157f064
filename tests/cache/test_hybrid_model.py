"""HybridCache agrees with a simple model of cached prefixes, and with a device that stores in each block its tokens."""

import depth
from fakes.cache_machine import BLOCK, Machine
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


for machine in (Machine, Roomy, Interval, EveryBoundary, RoomyEveryBoundary):
    machine.TestCase.settings = settings(
        max_examples=depth.examples(quick=25, full=80), stateful_step_count=50, deadline=None
    )
TestSmallPools = Machine.TestCase
TestRoomyPools = Roomy.TestCase
TestInterval = Interval.TestCase
TestEveryBoundary = EveryBoundary.TestCase
TestRoomyEveryBoundary = RoomyEveryBoundary.TestCase
