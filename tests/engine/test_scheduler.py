"""The scheduler computes every token of every request exactly once. Its caches are real, its device is a fake."""

import itertools

import depth
import pytest
from fakes.device import BLOCK, PAGE, Device, assert_complete, foresight, kept, make, request, serve
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax.cache.hashing import HashChain
from mamba_align_jax.cache.state_blocks import StateBlockManager
from mamba_align_jax.engine.scheduling.waiting import WaitingQueue
from mamba_align_jax.errors import QueueFullError


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_requests_run_together_and_finish(mode):
    requests = [request(i, range(i, i + 5 * (i + 1))) for i in range(6)]
    serve(make(mode=mode), requests)
    assert_complete(requests)


@pytest.mark.parametrize("steps_in_flight", [0, 1])
def test_chunk_ends_at_the_last_boundary_for_which_there_are_blocks(steps_in_flight):
    """In mode "all" a chunk of 40 tokens needs 5 blocks, and there are 4. A chunk of 32 gives back 3 of them at once."""
    scheduler = make(num_blocks=5, mode="all", budget=40, steps_in_flight=steps_in_flight)
    this, chunks = request(0, range(77), 1), []
    listen = lambda row, tokens, late: chunks.append((row.start, row.num_tokens))
    serve(scheduler, [this], steps_in_flight=steps_in_flight, heard=listen)
    assert chunks == [(0, 32), (32, 24), (56, 21)]
    assert_complete([this])


def test_no_request_enters_while_a_chunk_is_shortened_for_want_of_blocks():
    """The blocks that the first request lacks are those that another one would take."""
    scheduler = make(num_blocks=6, mode="all", budget=56)
    requests = [request(0, [0] * 50, 1), request(1, [1] * 7, 1)]
    chunks = []
    serve(
        scheduler, requests, heard=lambda row, tokens, late: chunks.append((row.request.id, row.start, row.num_tokens))
    )
    assert chunks[:3] == [(0, 0, 40), (0, 40, 10), (1, 0, 7)]
    assert_complete(requests)


def test_chunk_is_not_shortened_for_want_of_pages():
    """A request keeps its pages, so a shorter chunk would only take those that others need."""
    scheduler, chunks = make(num_pages=13, mode="all", budget=60), []
    requests = [request(0, [0] * 20, 12), request(1, [1] * 30, 1)]
    serve(scheduler, requests, heard=lambda row, tokens, late: chunks.append((row.request.id, row.num_tokens)))
    assert [length for number, length in chunks if number == 1 and length > 1] == [30]
    assert_complete(requests)


def test_next_turn_of_a_conversation_hits_generated_tokens():
    scheduler = make()
    device = Device("align")
    first = request(0, range(20), max_tokens=14)
    serve(scheduler, [first], device=device)
    second = request(1, [*first.tokens, 5, 6, 7])
    serve(scheduler, [second], device=device)
    assert second.num_cached == 32  # 33 of the first turn's 34 tokens were computed
    assert_complete([first, second])


def test_newest_request_is_preempted_if_pages_run_out():
    scheduler, device = make(num_pages=14), Device("align")
    requests = [request(i, [i] * 12, max_tokens=20) for i in range(4)]
    done = serve(scheduler, requests, device=device)
    assert scheduler.counters["preemptions"] > 0
    _, *again = (n for n, entered in enumerate(device.entered) if entered == 2)
    assert again[0] < device.entered.index(3), "who gives way comes back before those who never ran"
    assert done[0] == 0, "the oldest is never held up"
    assert_complete(requests)


def test_prompts_that_block_each_other_finish():
    scheduler = make(num_pages=12, budget=8, prefill_rows=3)
    requests = [request(i, [i] * 36, max_tokens=2) for i in range(3)]
    serve(scheduler, requests)
    assert_complete(requests)


def test_no_request_overtakes_a_waiting_one():
    scheduler, device = make(num_pages=12), Device("align")
    requests = [request(0, [0] * 30, 8), request(1, [1] * 30, 2), request(2, [2] * 3, 1)]
    serve(scheduler, requests, device=device)
    assert list(dict.fromkeys(device.entered)) == [0, 1, 2]


@pytest.mark.parametrize("steps_in_flight", [0, 1])
def test_stream_of_later_requests_delays_no_earlier_one(steps_in_flight):
    """Small requests never leave two pages free at once, but the last chunk of the first request gets its two."""
    scheduler = make(num_pages=1 + 8, budget=20, steps_in_flight=steps_in_flight)
    requests = [request(0, [0] * 31, 1), *[request(n, [n] * 2, 3) for n in range(1, 60)]]
    done = serve(scheduler, requests, arrivals=range(60), steps_in_flight=steps_in_flight)
    assert done.index(0) < 5
    assert_complete(requests)


def test_requests_run_by_priority_then_by_arrival():
    scheduler, device = make(), Device("align")
    priorities = [0, 0, 0, 1, 0, -1, 1, -1]
    requests = [request(n, [n] * 9, priority=priority) for n, priority in enumerate(priorities)]
    done = serve(scheduler, requests, [0, 0, 0, *[1] * 5], device=device)
    # Two prompts fill a step. Whoever runs goes on; of those that wait, 5 and 7 come first.
    assert device.entered == done == [0, 1, 5, 7, 2, 4, 3, 6]
    assert_complete(requests)


@pytest.mark.parametrize(("limit", "overtaken"), [(None, 40), (3, 6), (1, 2)])
def test_overtaking_limit_bounds_how_many_later_requests_run_first(limit, overtaken):
    """Under an endless stream of requests that are two levels more important, a request waits for at most 2 * limit."""
    scheduler, device = make(), Device("align")
    scheduler.waiting.overtaking_limit = limit
    first = [request(n, [n] * 9, 10) for n in range(3)]
    late = request(100, [5] * 9, priority=2)
    stream = [request(200 + n, [6] * 9, priority=0) for n in range(40)]
    done = serve(scheduler, [*first, late, *stream], [0, 0, 0, 1, *[1 + n // 3 for n in range(40)]], device=device)
    assert len([n for n in device.entered[: device.entered.index(100)] if n >= 200]) == overtaken
    assert len(done) == 44
    # Requests of one level still run in the order of their arrival.
    assert [n for n in device.entered if n >= 200] == [r.id for r in stream]
    assert_complete([*first, late, *stream])


def test_newest_request_of_the_highest_priority_number_is_preempted():
    """It comes back before newer requests and before those of higher priority numbers."""
    scheduler, device = make(num_pages=14), Device("align")
    priorities = [1, 0, 1, 1, 0]
    requests = [request(n, [n] * 12, 20, priority=priority) for n, priority in enumerate(priorities)]
    done = serve(scheduler, requests, [0, 0, 0, 4, 4], device=device)
    assert scheduler.counters["preemptions"] > 0
    assert done == [1, 4, 0, 2, 3]
    assert device.entered.count(1) == 1, "the first of all never gives way"
    assert_complete(requests)


def test_full_queue_takes_preempted_requests_only():
    scheduler = make(num_pages=14, queue=1)
    requests = [request(n, [n] * 12, 20) for n in range(3)]
    for r in requests[:2]:
        scheduler.add(r)
        scheduler.dispatched(plan := scheduler.schedule())
        for row in plan.rows:
            scheduler.finished(row, [1] if row.samples else [])
    scheduler.add(requests[2])
    scheduler._preempt(scheduler.running[-1])
    assert [r.id for r in scheduler.waiting] == [1, 2]
    late = request(3, [1], checkpoint_at=[1])
    with pytest.raises(QueueFullError, match="max_waiting = 1 requests wait already"):
        scheduler.add(late)
    assert [r.id for r in scheduler.waiting] == [1, 2]
    scheduler.remove(requests[2])
    assert requests[2] not in scheduler.waiting
    scheduler.schedule()
    assert [r.id for r in scheduler.running] == [0, 1]
    scheduler.add(late)
    with pytest.raises(QueueFullError):
        scheduler.add(request(4, [1]))


def test_a_flood_of_one_tenant_is_one_turn():
    """A second tenant's request enters next, whatever the first one has queued before it, and so does a third one's."""
    scheduler, device = make(), Device("align")
    flood = [request(n, [n % 7] * 9, tenant="a") for n in range(30)]
    others = [request(100, [8] * 9, tenant="b"), request(101, [9] * 9, tenant="b"), request(200, [9] * 9, tenant="c")]
    scheduler.add(flood[0])
    for one in [*flood[1:], *others]:
        scheduler.add(one)
    assert [r.id for r in scheduler.waiting][:8] == [0, 100, 200, 1, 101, 2, 3, 4]
    serve(scheduler, [], device=device, tenants=True)
    assert device.entered == [0, 100, 200, 1, 101, *range(2, 30)]
    assert_complete([*flood, *others])


def test_a_tenant_that_had_to_wait_gives_way_to_those_that_ran_first():
    """The flood's second request came second but entered last, so it is preempted first and comes back last."""
    scheduler = make(num_pages=14)
    requests = [request(n, [n] * 12, 20, tenant=tenant) for n, tenant in enumerate("aab")]
    device = Device("align")
    serve(scheduler, requests, device=device, tenants=True)
    assert device.entered == [0, 2, 1, 2, 1], (
        "the last two gave way, and come back in the order in which they ran first"
    )
    assert_complete(requests)


def test_a_tenant_has_half_of_a_queue_while_others_wait():
    """And what it has queued alone keeps nobody out."""
    queue, numbers = WaitingQueue(6), itertools.count()

    def room(tenant, count=1):
        """How many requests of a tenant are taken."""
        for taken in range(count):
            try:
                queue.add(request(next(numbers), [1], tenant=tenant))
            except QueueFullError:
                return taken
        return count

    assert room("a", 9) == 6
    assert (room("b", 9), room("c", 9), room("a", 9)) == (3, 0, 0)
    for one in list(queue):
        queue.remove(one)
    assert (room("b"), room("a", 9), room("c", 9), room("b", 9)) == (1, 3, 2, 0)
    assert len(queue) == 6


@settings(max_examples=depth.examples(60, 300), deadline=None)
@given(st.data())
def test_tenants_take_turns(data):
    """As a slow model has it: of the tenants that wait, it is the turn of the one whose last turn, or whose arrival in an
    empty line, is the longest ago. Requests that come, leave and are preempted change nothing of that."""
    queue, now = WaitingQueue(), itertools.count()
    waits, returned, running, since = [], [], [], {}  # `since` is by priority and tenant

    def leave(one, had_turn):
        place = one.params.priority, one.params.tenant
        waits.remove(one)
        if not any((r.params.priority, r.params.tenant) == place for r in waits):
            del since[place]
        elif had_turn:
            since[place] = next(now)

    def turn():
        level = min(r.params.priority for r in [*waits, *returned])
        again = [r for r in returned if r.params.priority == level]
        return min(again, key=ran.index) if again else next_new(level)

    def next_new(level):
        _, tenant = min((place for place in since if place[0] == level), key=since.get)
        return next(r for r in waits if (r.params.priority, r.params.tenant) == (level, tenant))

    ran = []
    for number, action in enumerate(data.draw(st.lists(st.integers(0, 9), min_size=10, max_size=60))):
        if action < 5 or not queue:
            one = request(number, [1], tenant=data.draw(st.sampled_from("abc")), priority=data.draw(st.integers(0, 1)))
            queue.add(one)
            waits.append(one)
            since.setdefault((one.params.priority, one.params.tenant), next(now))
        elif action < 8:
            one = turn()
            assert queue.first is one
            assert next(iter(queue)) is one
            queue.enter(one, running)
            if one in returned:
                returned.remove(one)
            else:
                ran.append(one)
                leave(one, had_turn=True)
            one.num_admissions += 1
            running.append(one)
            level = [r for r in ran if r.params.priority == one.params.priority and r in running]
            assert level == sorted(level, key=lambda r: r.rank), "those that ran first rank first"
        elif action == 8 and running:
            one = running.pop(data.draw(st.integers(0, len(running) - 1)))
            queue.put_back(one)
            returned.append(one)
        else:
            one = data.draw(st.sampled_from([*waits, *returned]))
            had_turn = one in waits and next_new(one.params.priority) is one
            queue.remove(one)
            returned.remove(one) if one in returned else leave(one, had_turn)
        assert sorted(r.id for r in queue) == sorted(r.id for r in [*waits, *returned])
        assert len(queue) == len(waits) + len(returned)
        assert all(r in queue for r in [*waits, *returned])
        assert not any(r in queue for r in running)


def test_remaining_budget_is_not_spent_inside_a_block():
    """Chunks end on boundaries whatever else runs, so hits do not depend on load."""
    scheduler = make(budget=20, prefill_rows=3)
    for i in range(2):
        scheduler.add(request(i, [i] * 40))
    assert [(row.request.id, row.num_tokens) for row in scheduler.schedule().rows] == [(0, 16)]
    scheduler = make(budget=5)
    scheduler.add(request(0, [0] * 40))
    assert [row.num_tokens for row in scheduler.schedule().rows] == [5], "a budget below a block still makes progress"


def test_aborted_request_frees_exactly_its_blocks():
    scheduler = make()
    a, b = request(0, range(20)), request(1, range(50, 70))
    for r in (a, b):
        scheduler.add(r)
    plan = scheduler.schedule()
    scheduler.dispatched(plan)
    for row in plan.rows:
        scheduler.finished(row, [3])
    held = scheduler.cache.states.columns(0)
    scheduler.remove(b)
    assert scheduler.cache.states.columns(0) == held
    assert scheduler.cache.states.pool.num_held == len(held)
    scheduler.remove(a)
    assert scheduler.cache.states.pool.num_held == scheduler.cache.kv.pool.num_held == 0


@settings(max_examples=depth.examples(20, 60), deadline=None)
@given(st.data())
def test_kept_boundaries_depend_on_the_request_only(data):
    """Budget, other requests, drafts and preemptions do not change which boundaries are cached in the end."""
    shared = data.draw(st.integers(0, 40))
    prompt = [7] * shared + data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=30))
    max_tokens, at = data.draw(st.integers(1, 30)), tuple(data.draw(st.lists(st.integers(0, 60), max_size=3)))
    interval = data.draw(st.sampled_from([None, 2 * BLOCK]))
    results = []
    for busy in (False, True):
        budget, rows, mates, preempted, drafter, K, in_flight, guesses = 1000, 1, [], set(), None, 0, 0, ((0, 0),)
        if busy:
            budget, rows = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3))
            sizes = data.draw(st.lists(st.integers(1, 40), max_size=3))
            mates = [request(10 + n, [100 + n] * size, 10) for n, size in enumerate(sizes)]
            preempted = data.draw(st.sets(st.integers(1, 60), max_size=6))
            K, in_flight, guesses = (
                data.draw(st.sampled_from([0, 3])),
                data.draw(st.integers(0, 1)),
                [(3, 2), (1, 0), (3, 3)],
            )
            drafter = foresight(guesses) if K and not in_flight else None
        scheduler, device = (
            make(400, 900, budget=1000, interval=interval, drafter=drafter, K=K),
            Device("align", plan=guesses),
        )
        serve(scheduler, [request(0, [7] * 30)], device=device)
        scheduler.max_num_batched_tokens, scheduler.max_prefill_rows = budget, rows

        # The scheduler preempts no request while a result is unread.
        def preempt(step, scheduler=scheduler, preempted=() if in_flight else preempted):
            if step in preempted and scheduler.running:
                scheduler._preempt(scheduler.running[-1])

        this = request(1, prompt, max_tokens, checkpoint_at=at)
        before = len(mates) // 2
        all_of_them = [*mates[:before], this, *mates[before:]]
        serve(scheduler, all_of_them, device=device, between=preempt, steps_in_flight=in_flight)
        assert scheduler.cache.states.pool.num_evictions == 0
        assert_complete([this, *mates])
        results.append((kept(scheduler, this.tokens), this.num_cached, this.cache_miss, this.checkpoint_at))
    assert results[0] == results[1]
    boundaries, cached, _, requested = results[0]
    computed = len(prompt) + max_tokens - 1
    last = {(len(prompt) - 1) // BLOCK * BLOCK, computed // BLOCK * BLOCK} - {0}
    asked = {end for end in requested if end > cached}
    assert last | asked <= set(boundaries)
    if interval:
        assert set(range(interval, computed + 1, interval)) - set(range(cached)) <= set(boundaries)


@settings(max_examples=depth.examples(15, 40), deadline=None)
@given(st.data())
def test_repeated_prompts_and_prefixes_hit_the_cache(data):
    """A prompt that is sent again hits at once; a prefix with new suffixes from the third time on; a chat's next turn where
    the last one ended."""
    scheduler = make(400, 900, budget=data.draw(st.integers(1, 50)), prefill_rows=data.draw(st.integers(1, 3)))
    device = Device("align")
    prompt = data.draw(st.lists(st.integers(0, 9), min_size=BLOCK + 1, max_size=40))
    again = [request(n, prompt, data.draw(st.integers(1, 20))) for n in range(2)]
    for r in again:
        serve(scheduler, [r], device=device)
    assert again[1].num_cached == (len(prompt) - 1) // BLOCK * BLOCK
    assert again[1].cache_miss is None
    turn = request(2, [*again[1].tokens, 50])
    serve(scheduler, [turn], device=device)
    assert turn.num_cached >= (len(again[1].tokens) - 1) // BLOCK * BLOCK

    prefix = [99, *data.draw(st.lists(st.integers(0, 9), min_size=BLOCK - 1, max_size=40))]
    siblings = [request(3 + n, [*prefix, 20 + n, *[n] * data.draw(st.integers(0, 30))]) for n in range(3)]
    for r in siblings:
        serve(scheduler, [r], device=device)
    assert siblings[2].num_cached == len(prefix) // BLOCK * BLOCK
    assert_complete([*again, turn, *siblings])


def test_newest_boundary_of_a_running_request_stays_cached():
    scheduler, this = make(), request(0, [3] * 20, max_tokens=50)
    counts = []
    serve(scheduler, [this], between=lambda step: counts.append(kept(scheduler, this.tokens)))
    assert [16] in counts
    assert [16, 40] in counts
    assert all(len(boundaries) <= 2 for boundaries in counts)
    assert kept(scheduler, this.tokens) == [16, 64]  # 69 of its 70 tokens were computed


def test_requested_boundaries_stay_cached():
    scheduler = make(budget=13)
    this = request(0, range(45), checkpoint_at=[0, 5, 12, 9, 31, 45, 46, 1000])
    serve(scheduler, [this])
    assert this.checkpoint_at == (8, 24, 40)
    assert kept(scheduler, this.tokens) == [8, 24, 40, 48]
    assert this.output("length").checkpoint_at == (8, 24, 40)
    # A state at the prompt's own end stays cached too, though decoding passes further boundaries.
    scheduler = make()
    this = request(0, range(16), checkpoint_at=[16])
    serve(scheduler, [this])
    assert this.checkpoint_at == (16,)
    assert 16 in kept(scheduler, this.tokens)
    scheduler = make(mode="none")
    this = request(0, range(45), checkpoint_at=[9])
    serve(scheduler, [this])
    assert this.checkpoint_at == ()


def test_reset_forgets_cached_prefixes_and_those_of_running_requests():
    scheduler, device = make(), Device("align")
    serve(scheduler, [request(0, range(20))], device=device)
    running = request(1, range(50, 71), max_tokens=20)

    def reset(step):
        if step == 2:
            scheduler.cache.reset_prefix_cache()

    serve(scheduler, [running], device=device, between=reset)
    assert_complete([running])
    for tokens in (list(range(20)), running.tokens):
        hit = scheduler.cache.lookup([*tokens, 1])
        assert (hit.length, hit.junction, hit.miss) == (0, 0, "evicted")
    assert scheduler.cache.states.pool.num_cached == scheduler.cache.kv.pool.num_cached == 0


def test_accepted_drafts_save_steps_and_drafter_forgets_the_request():
    """All drafts are accepted: a step adds 1 + K tokens, and never more than max_tokens allows."""
    drafter = foresight([(9, 9)])
    scheduler, device = make(drafter=drafter, K=3), Device("align")
    alone = request(0, range(5), max_tokens=12)
    serve(scheduler, [alone], device=device)
    assert_complete([alone])
    # One token comes from the prompt, then 4 + 4, and of the last 3 two may be drafts.
    assert drafter.asked == [3, 3, 2]
    assert not drafter.known, "dropped with the request"


def test_request_chooses_its_number_of_drafts():
    drafter = foresight([(9, 9)])
    requests = [request(0, range(5), 20, K=0), request(1, range(9), 20, K=1), request(2, range(3), 20)]
    serve(make(drafter=drafter, K=3), requests)
    assert_complete(requests)
    assert set(drafter.asked) == {1, 2, 3}


def test_drafts_are_dropped_before_requests_are_preempted():
    """Two requests need two blocks each, and their windows of four have one more block together."""
    scheduler, counts = make(num_blocks=1 + 6, drafter=foresight([(9, 9)]), K=3), set()
    plan = scheduler.schedule

    def schedule(**settled):
        result = plan(**settled)
        counts.update(len(row.drafts) for row in result.decode)
        return result

    scheduler.schedule = schedule
    requests = [request(i, [i] * 4, max_tokens=30) for i in range(2)]
    serve(scheduler, requests)
    assert_complete(requests)
    assert counts >= {0, 3}
    assert scheduler.counters["preemptions"] == 0


def test_states_after_rejected_drafts_and_stop_tokens_are_not_found():
    """The lookup asks for a boundary that the first request's drafts passed but its tokens did not."""
    scheduler, device = make(drafter=foresight([(3, 2)]), K=3), Device("align")
    first = request(0, range(5))
    scheduler.add(first)
    for _ in range(2):
        plan = scheduler.schedule()
        ((row, sampled),) = device.run(plan)
        scheduler.dispatched(plan)
        # The last token of the second step's three counts as lying behind a stop token.
        scheduler.finished(row, sampled[:2])
    assert (row.start, row.num_tokens, sampled[:2]) == (5, 4, list(row.drafts[:2]))
    assert first.num_computed == 7
    scheduler.remove(first)
    assert scheduler.cache.lookup([*first.tokens, *sampled[2:], 1, 2, 3]).length == 0
    assert len(scheduler.cache.kv.lookup([*first.tokens, *sampled[2:], 1, 2, 3], HashChain(PAGE))) == 1


@settings(max_examples=depth.examples(25, 80), deadline=None)
@given(st.data())
def test_any_schedule_computes_every_token_once(data):
    """Small pools, shared prefixes, late arrivals, a full queue, aborts, priorities, preemption and drafts, right and wrong
    ones, included."""
    K = data.draw(st.sampled_from([0, 1, 3, BLOCK - 1]))
    in_flight = data.draw(st.integers(0, 2))
    plan = st.lists(st.tuples(st.integers(0, K), st.integers(0, K)), min_size=1, max_size=5)
    count = data.draw(st.integers(1, 9))
    requests = []
    for number in range(count):
        shared = data.draw(st.integers(0, 25))
        suffix = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=10))
        own = data.draw(st.sampled_from([None, None, *range(K + 1)]))
        priority = data.draw(st.sampled_from([0, 0, 0, -1, 1]))
        places = tuple(data.draw(st.lists(st.integers(0, 35), max_size=2)))
        params = dict(priority=priority, checkpoint_at=places)
        requests.append(request(number, [7] * shared + suffix, data.draw(st.integers(1, 12)), own, **params))
    granularity = data.draw(st.sampled_from([BLOCK, PAGE]))
    least = 1 + StateBlockManager(99, BLOCK, K, granularity=granularity).blocks_needed(in_flight)
    scheduler = make(
        num_blocks=data.draw(st.integers(least, 14 + 3 * K)),
        granularity=granularity,
        num_pages=data.draw(st.integers(14, 40)),
        mode=data.draw(st.sampled_from(["align", "all", "none"])),
        budget=data.draw(st.integers(1, 40)),
        prefill_rows=data.draw(st.integers(1, 3)),
        drafter=None if in_flight else foresight(data.draw(plan)),
        K=K,
        queue=data.draw(st.sampled_from([None, None, 1, 2])),
        steps_in_flight=in_flight,
    )
    arrivals = [data.draw(st.integers(0, 20)) for _ in requests]
    aborts = [
        (data.draw(st.integers(0, 15)), data.draw(st.integers(0, count - 1)))
        for _ in range(data.draw(st.integers(0, 3)))
    ]
    serve(scheduler, requests, arrivals, aborts, steps_in_flight=in_flight, plan=data.draw(plan))
    assert_complete([r for r in requests if r.id not in {number for _, number in aborts}])
