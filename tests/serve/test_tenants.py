"""Tenants take turns wherever calls wait, and none is told apart by anything but its key or its address."""

import asyncio
import threading

import pytest
from serve.conftest import KEYS

from mamba_align_jax.errors import WorkerLostError
from mamba_align_jax.serve.limits.one_at_a_time import OneAtATime
from mamba_align_jax.serve.refusals import Refusal


async def begun(work):
    """Starts a call, and returns when it waits."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    return task


def test_calls_run_tenant_by_tenant():
    """One of each tenant, whatever a flood has queued before it."""
    ran, gate, is_running = [], threading.Event(), threading.Event()

    async def ask():
        work = OneAtATime(64)
        tasks = [await begun(work.run("a", lambda: is_running.set() or gate.wait()))]
        is_running.wait()
        for tenant, count in (("a", 20), ("b", 2), ("c", 1)):
            tasks += [await begun(work.run(tenant, ran.append, (tenant, number))) for number in range(count)]
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(ask())
    # The call that runs has been the first tenant's turn, and that tenant has had no other one since.
    assert ran[:6] == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("a", 2)]
    assert ran[6:] == [("a", number) for number in range(3, 20)]


def test_a_tenant_has_half_of_the_places_while_others_wait():
    gate = threading.Event()

    async def ask():
        work = OneAtATime(4)
        tasks = [await begun(work.run("a", gate.wait)) for _ in range(4)]
        for tenant in "aaab":
            tasks.append(await begun(work.run(tenant, gate.wait)))
        tasks.append(await begun(work.run("b", gate.wait)))
        tasks.append(await begun(work.run("b", gate.wait)))
        gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(ask())
    refused = [number for number, result in enumerate(results) if isinstance(result, Refusal)]
    assert refused == [4, 5, 6, 9]
    assert all(results[number].code == "overloaded" for number in refused)
    assert [result for number, result in enumerate(results) if number not in refused] == [True] * 6


def test_a_call_that_is_cancelled_gives_up_its_place():
    gate, is_running, ran = threading.Event(), threading.Event(), []

    async def ask():
        work = OneAtATime(3)
        first = await begun(work.run("a", lambda: is_running.set() or gate.wait()))
        is_running.wait()
        second = await begun(work.run("a", ran.append, 2))
        third = await begun(work.run("b", ran.append, 3))
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        first.cancel()
        gate.set()
        await asyncio.gather(first, third, return_exceptions=True)
        await work.run("a", ran.append, 4)
        assert not work._counts

    asyncio.run(ask())
    assert ran == [3, 4]


def test_whatever_a_function_raises_the_next_one_runs():
    async def ask():
        work = OneAtATime(2)
        with pytest.raises(ZeroDivisionError):
            await work.run("a", lambda: 1 // 0)
        return await work.run("a", lambda: 5)

    assert asyncio.run(ask()) == 5


def heard(service, monkeypatch):
    """The tenants of the requests that the engine is asked for."""
    tenants, submit = [], service.serving._submit
    monkeypatch.setattr(
        service.serving, "_submit", lambda stream, *asked: tenants.append(asked[1].tenant) or submit(stream, *asked)
    )
    return tenants


def test_a_tenant_is_a_key(locked, monkeypatch):
    tenants = heard(locked.service, monkeypatch)
    for key in (*KEYS, KEYS[0]):
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": [[1, 2], [3, 4]], "max_tokens": 1, "n": 2}
        assert locked.post("/v1/completions", body, headers=headers).status_code == 200
    first, second = tenants[0], tenants[4]
    assert tenants == 4 * [first] + 4 * [second] + 4 * [first]
    assert first != second
    assert not any(key in tenant for key in KEYS for tenant in tenants)


def test_without_keys_a_tenant_is_an_address(served, monkeypatch):
    tenants = heard(served.service, monkeypatch)
    served.complete([1, 2], max_tokens=1)
    served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    assert tenants == ["127.0.0.1"] * 2


@pytest.mark.parametrize("size", [513, 30_000])
def test_text_that_cannot_fit_is_refused_before_it_is_encoded(served, monkeypatch, size):
    """A token of this model is one byte."""

    def fail(self, text, **options):
        raise AssertionError

    monkeypatch.setattr(type(served.engine.tokenizer), "encode", fail)
    reply = served.post("/v1/completions", {"prompt": "x" * size})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert f"must fit in 512 tokens of at most 1 characters each, got {size} characters" in reply.text


def test_a_lost_process_is_the_servers_fault(served, monkeypatch):
    def lose(*args, **options):
        raise WorkerLostError("lost")

    monkeypatch.setattr(served.service.template, "render", lose)
    reply = served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "overloaded")
    assert reply.headers["retry-after"] == "1"
