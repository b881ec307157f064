"""`AsyncEngine` serves tasks: their tokens are those of `Engine.generate`, and whoever leaves frees exactly his blocks."""

import asyncio
import contextlib
import threading
import time

import pytest
from fakes.speller import VOCAB
from fakes.spelling_engine import DRAFTS, SIZES, SPELLER, assert_nothing_is_held, assert_right, prompts
from fakes.spelling_engine import PARAMS as SPELLED

from mamba_align_jax import AsyncEngine, Engine, EngineConfig, SamplingParams
from mamba_align_jax.errors import EngineDeadError, QueueFullError

pytestmark = pytest.mark.usefixtures("one_program")
STEPPING = {"sync": DRAFTS, "async": dict(DRAFTS, async_stepping=True)}
LONG = SamplingParams(max_tokens=55, ignore_eos=True)


@pytest.fixture(params=STEPPING)
def engine(request):
    return Engine(SPELLER, EngineConfig(**SIZES, **STEPPING[request.param]))


async def last(iterator):
    """Reads a request to its end, and returns its output."""
    tokens, update = (), None
    async for update in iterator:
        tokens += update.token_ids
    assert tokens == update.output.token_ids
    return update.output


def run(main):
    """Runs a coroutine, and fails if it hangs."""
    return asyncio.run(asyncio.wait_for(main, 120))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_tasks_get_the_tokens_of_generate(engine, rng):
    asked = [prompt for _ in range(4) for prompt in prompts(rng)]

    async def main():
        async with AsyncEngine(engine) as serving:
            assert serving.is_running
            assert serving.engine is engine
            return await asyncio.gather(*(last(serving.generate(prompt, SPELLED)) for prompt in asked))

    outputs = run(main())
    assert_right(outputs, asked)
    assert_nothing_is_held(engine)
    expected = engine.generate(asked, SPELLED)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


def test_updates_come_while_the_request_runs(engine):
    async def main():
        async with AsyncEngine(engine) as serving:
            numbers = [len(update.token_ids) async for update in serving.generate([1, 2, 3], LONG)]
        assert sum(numbers) == 55
        assert len(numbers) > 3

    run(main())


def test_whoever_leaves_frees_exactly_his_blocks(engine, rng):
    """Tasks are cancelled, or leave, at random times, before their request is queued among them."""
    asked = {number: rng.integers(0, VOCAB, rng.integers(1, 25)).tolist() for number in range(40)}
    outputs = {}

    async def read(serving, number, limit):
        iterator = serving.generate(asked[number], SPELLED)
        async with contextlib.aclosing(iterator):
            async for update in iterator:
                limit -= len(update.token_ids)
                if limit < 0:
                    return
        outputs[number] = update.output

    async def main():
        async with AsyncEngine(engine) as serving:
            tasks = []
            for number in asked:
                limit = int(rng.integers(0, 40)) if number % 3 == 0 else 100
                tasks.append(asyncio.create_task(read(serving, number, limit)))
                await asyncio.sleep(float(rng.uniform(0, 0.01)))
                if number % 3 == 1:
                    tasks[int(rng.integers(max(number - 3, 0), number + 1))].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: not serving._streams)
            assert_nothing_is_held(engine)

    run(main())
    assert len(outputs) > 5
    assert engine.stats.aborted_requests > 5
    assert_right(list(outputs.values()), [asked[number] for number in outputs])
    assert not engine.has_unfinished


def slow_steps(monkeypatch, engine, seconds):
    step_outputs = engine.step_outputs

    def slow():
        time.sleep(seconds)
        return step_outputs()

    monkeypatch.setattr(engine, "step_outputs", slow)


def test_dropped_iterator_aborts_its_request(engine, monkeypatch):
    slow_steps(monkeypatch, engine, 0.02)

    async def main():
        async with AsyncEngine(engine) as serving:
            async for _ in serving.generate([1, 2, 3], LONG):
                break
            await until(lambda: not serving._streams and not engine.core.requests)
            assert_nothing_is_held(engine)
            assert engine.stats.aborted_requests == 1

    run(main())


def test_slow_reader_gets_one_update(engine):
    async def main():
        async with AsyncEngine(engine) as serving:
            iterator = serving.generate([1, 2, 3], LONG)
            first = await anext(iterator)
            await until(lambda: not serving._streams)
            await asyncio.sleep(0)
            second = await anext(iterator)
            assert first.token_ids + second.token_ids == second.output.token_ids
            assert len(second.output.token_ids) == 55
            with pytest.raises(StopAsyncIteration):
                await anext(iterator)

    run(main())


def test_full_queue_is_refused_at_once():
    engine = Engine(SPELLER, EngineConfig(**SIZES, max_waiting=2))

    async def main():
        async with AsyncEngine(engine) as serving:
            with engine.core.turns._lock:  # no step can be made
                tasks = [asyncio.create_task(last(serving.generate([number], SPELLED))) for number in range(5)]
                done, _ = await asyncio.wait(tasks[2:], timeout=300)
                assert done == set(tasks[2:])
                assert not any(task.done() for task in tasks[:2])
                for task in done:
                    with pytest.raises(QueueFullError, match="max_waiting = 2"):
                        task.result()
            assert [len((await task).token_ids) for task in tasks[:2]] == [18, 18]
            await last(serving.generate([1], SPELLED))

    run(main())


def test_wrong_requests_are_refused(engine):
    async def main():
        async with AsyncEngine(engine) as serving:
            for prompt, params, wanted in (
                ([], None, "must not be empty"),
                ([VOCAB], None, "prompt_token_ids must be in"),
                ("text", None, "without a tokenizer"),
                ([1], SamplingParams(stop="x"), "stop must be empty in an engine without a tokenizer"),
                ([1], "params", "params must be"),
            ):
                with pytest.raises(ValueError, match=wanted):
                    await anext(serving.generate(prompt, params))
            assert not serving._coming

    run(main())


def test_shutdown_that_drains_finishes_what_runs(engine, rng):
    async def main():
        serving = AsyncEngine(engine)
        serving.start()
        tasks = [asyncio.create_task(last(serving.generate([number], SPELLED))) for number in range(9)]
        await asyncio.sleep(0.01)
        await serving.shutdown()
        assert not serving.is_running
        assert {len((await task).token_ids) for task in tasks} == {18}
        with pytest.raises(EngineDeadError, match="does not run"):
            await anext(serving.generate([1], SPELLED))
        await serving.shutdown()

    run(main())
    assert_nothing_is_held(engine)


def test_shutdown_without_draining_ends_what_runs(engine):
    async def main():
        async with AsyncEngine(engine) as serving:
            tasks = [asyncio.create_task(last(serving.generate([number], LONG))) for number in range(9)]
            await until(lambda: engine.stats.steps > 2)
            draining = asyncio.create_task(serving.shutdown())
            await asyncio.sleep(0)
            await serving.shutdown(drain=False)
            await draining
            reasons = {(await task).finish_reason for task in tasks}
            assert "abort" in reasons
            assert reasons <= {"abort", "length"}

    run(main())
    assert_nothing_is_held(engine)


def test_shutdown_forgets_the_output_of_a_reader_that_leaves_at_the_same_time(engine):
    async def main():
        serving, gate = AsyncEngine(engine), threading.Event()
        serving.start()
        stream = serving.generate([1], LONG)
        await anext(stream)
        # The thread finds both commands, first the one that ends all requests, then that of the reader.
        serving._commands.put(lambda: gate.wait(300))
        stopping = asyncio.create_task(serving.shutdown(drain=False))
        await asyncio.sleep(0)
        await stream.aclose()
        gate.set()
        await stopping
        assert not engine.has_unfinished

    run(main())


def test_request_that_another_thread_aborts_ends_for_its_reader(engine, monkeypatch):
    """`Engine.abort` returns the output, and the task that reads the request gets its last update all the same."""
    slow_steps(monkeypatch, engine, 0.02)

    async def main():
        async with AsyncEngine(engine) as serving:
            reader = serving.generate([1, 2, 3], LONG)
            first = await anext(reader)
            output = await asyncio.to_thread(engine.abort, first.request_id)
            rest = await last(_after(first, reader))
            assert (rest, rest.finish_reason) == (output, "abort")
        assert not serving._streams
        assert not engine.has_unfinished

    run(main())


async def _after(first, reader):
    yield first
    async for update in reader:
        yield update


@pytest.mark.parametrize("error", [MemoryError("lost"), SystemExit(3)], ids=["Exception", "BaseException"])
def test_fatal_error_reaches_every_waiter(engine, monkeypatch, error):
    def die():
        raise error

    async def main():
        async with AsyncEngine(engine) as serving:
            first = serving.generate([1, 2], LONG)
            await anext(first)
            tasks = [asyncio.create_task(last(serving.generate([number], LONG))) for number in range(5)]
            await asyncio.sleep(0)
            monkeypatch.setattr(engine, "step_outputs", die)
            for reader in (*tasks, last(first)):
                with pytest.raises(EngineDeadError, match="has ended") as raised:
                    await reader
                assert raised.value.__cause__ is error
            assert not serving.is_running
            assert serving.error is error
            with pytest.raises(EngineDeadError, match="does not run") as raised:
                await anext(serving.generate([1], SPELLED))
            assert raised.value.__cause__ is error

    run(main())
    # The engine itself is whole, and serves again.
    assert_nothing_is_held(engine)


def test_several_event_loops_and_calls_of_generate_share_an_engine(engine, rng):
    asked = prompts(rng)
    serving, errors = AsyncEngine(engine), []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    async def read():
        assert_right(await asyncio.gather(*(last(serving.generate(prompt, SPELLED)) for prompt in asked)), asked)

    serving.start()
    jobs = [lambda: run(read()), lambda: run(read()), lambda: assert_right(engine.generate(asked, SPELLED), asked)]
    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    run(serving.shutdown())
    assert not errors
    assert_nothing_is_held(engine)


def test_closed_event_loop_aborts_its_requests(engine):
    serving = AsyncEngine(engine)
    serving.start()

    async def leave():
        iterator = serving.generate([1, 2], LONG)
        await anext(iterator)
        return iterator

    loop = asyncio.new_event_loop()
    iterator = loop.run_until_complete(leave())
    loop.close()
    run(until(lambda: not serving._streams))
    run(serving.shutdown())
    assert_nothing_is_held(engine)
    with contextlib.suppress(StopIteration):
        iterator.aclose().send(None)


def test_event_loop_runs_while_the_engine_steps(engine, monkeypatch):
    """A request that comes during a long step does not make the event loop wait for it."""
    step_outputs, (entered, released, ended) = engine.step_outputs, (threading.Event() for _ in range(3))

    def held():
        entered.set()
        released.wait(300)
        ended.set()
        return step_outputs()

    monkeypatch.setattr(engine, "step_outputs", held)
    params = SamplingParams(max_tokens=2, ignore_eos=True)

    async def main():
        async with AsyncEngine(engine) as serving:
            answers = [asyncio.create_task(last(serving.generate([1], params)))]
            try:
                await until(entered.is_set)
                answers += [asyncio.create_task(last(serving.generate([number], params))) for number in (2, 3)]
                await until(lambda: len(serving._coming) == 2)
                assert not ended.is_set()
            finally:
                released.set()
            await asyncio.gather(*answers)

    run(main())
