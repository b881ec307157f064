"""What is raised and is no Exception, as when a library in Rust panics, ends one request, if it is no interrupt."""

import asyncio
import json
import logging
import shutil
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakes.http import Served
from fakes.letters import Letters
from fakes.raising import Drafting
from fakes.spelling_engine import DRAFTS, PARAMS, SIZES, SPELLER, assert_nothing_is_held, assert_right

from mamba_align_jax import AsyncEngine, Engine, EngineConfig, SamplingParams
from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.device.runner import StepRunner
from mamba_align_jax.engine.grammar import Grammar
from mamba_align_jax.engine.interrupts import contained
from mamba_align_jax.engine.scheduling.request import Request
from mamba_align_jax.engine.scheduling.scheduler import Scheduler
from mamba_align_jax.engine.text.grammar_state import GrammarCompiler, GrammarState
from mamba_align_jax.engine.text.tokenizer import load_tokenizer
from mamba_align_jax.errors import GrammarError, PanicError
from mamba_align_jax.serve.api.generation import _check_end
from mamba_align_jax.serve.refusals import Refusal
from mamba_align_jax.serve.settings import Settings

pytestmark = pytest.mark.usefixtures("one_program")
SPACE = 32


class PanicException(BaseException):
    """Like that of PyO3."""


class Panicking(Letters):
    """It counts the texts with a broken token that it was asked for."""

    asked = 0

    def decode(self, token_ids, **options):
        if not self.broken.isdisjoint(token_ids):
            self.asked += 1
            raise PanicException("planned")
        return super().decode(token_ids, **options)


def is_panic(error):
    return isinstance(error, PanicError) and isinstance(error.__cause__, PanicException)


def only_in_the_first(prompts):
    """A token that the speller writes after the first of two prompts, and that is nowhere else."""
    first, second = Engine(SPELLER, EngineConfig(**SIZES)).generate(prompts, PARAMS)
    others = {*first.token_ids[:2], *second.token_ids, *prompts[0], *prompts[1]}
    return next(token for token in first.token_ids if token not in others)


@pytest.mark.parametrize("call", ["step", "step_outputs"])
@pytest.mark.parametrize("stop", [(), ("never",)], ids=["plain", "stop"])
def test_a_tokenizer_that_panics_ends_its_request_and_is_not_asked_again_for_it(call, stop, caplog):
    prompts = [[1, 2, 3], [4, 5]]
    tokenizer = Panicking([only_in_the_first(prompts)])
    engine = Engine(SPELLER, EngineConfig(**SIZES), tokenizer=tokenizer)
    ids, outputs = [engine.add_request(prompt, replace(PARAMS, stop=stop)) for prompt in prompts], {}
    while engine.has_unfinished:
        found = getattr(engine, call)()
        ended = found if call == "step" else [update.output for update in found if update.output]
        outputs |= {output.request_id: output for output in ended}
    first, second = (outputs[number] for number in ids)
    assert is_panic(first.error)
    assert tokenizer.asked == 1
    assert (second.error, second.finish_reason) == (None, "length")
    assert "planned" in caplog.text
    assert_nothing_is_held(engine)


def test_a_panic_at_the_end_of_a_prompt_refuses_the_request():
    tokenizer = Panicking([7])
    engine = Engine(SPELLER, EngineConfig(**SIZES), tokenizer=tokenizer)
    with pytest.raises(PanicError):
        engine.add_request([1, 2, 3, 4, 7], PARAMS)
    assert tokenizer.asked == 1
    assert not engine.has_unfinished


@pytest.mark.parametrize(
    "place",
    [
        (Scheduler, "_plan_chunk"),
        (HybridCache, "commit"),
        (StepRunner, "dispatch"),
        (StepRunner, "read"),
        (Request, "append"),
    ],
    ids=lambda place: place[1],
)
@pytest.mark.parametrize("kind", [PanicException, GeneratorExit, asyncio.CancelledError])
def test_a_panic_anywhere_in_a_step_ends_the_requests_of_that_step(place, kind, monkeypatch):
    def panic(*args, **kwargs):
        monkeypatch.undo()
        raise kind("planned")

    engine = Engine(SPELLER, EngineConfig(**SIZES))
    first = engine.add_request([1, 2, 3], PARAMS)
    monkeypatch.setattr(*place, panic)
    engine.step()
    outputs = {first: None} | {output.request_id: output for _ in range(40) for output in engine.step()}
    engine.generate([4, 5], PARAMS)
    assert_nothing_is_held(engine)
    assert set(outputs) == {first}


def test_a_drafter_that_panics_ends_its_request():
    class Wrong(Drafting):
        def draft(self, request, tokens, max_drafts):
            raise PanicException("draft")

        def forget(self, request):
            raise PanicException("forget")

    engine = Engine(SPELLER, EngineConfig(**SIZES, **DRAFTS), drafter=Wrong(None))
    with pytest.raises(PanicError, match="draft"):
        engine.generate([1, 2, 3], PARAMS)
    assert_nothing_is_held(engine)


def test_a_listener_that_panics_hears_nothing_more():
    def listen(events):
        raise PanicException("listen")

    engine = Engine(SPELLER, EngineConfig(**SIZES))
    engine.on_cache_event(listen)
    assert_right(engine.generate([[1, 2, 3] * 9], PARAMS), [[1, 2, 3] * 9])


def test_a_matcher_that_panics_is_not_used_again():
    class Matcher:
        calls = 0

        def unsafe_compute_mask_ptr(self, *where):
            self.calls += 1
            raise PanicException("mask")

    state = GrammarState(matcher := Matcher(), 61, [0])
    for _ in range(2):
        with pytest.raises(PanicError, match="mask"):
            state.allow([1], 1)
    assert matcher.calls == 1


def test_a_grammar_that_grows_too_complex_is_the_callers_fault():
    """Its first tokens are allowed quickly, and then llguidance gives up."""
    pytest.importorskip("llguidance")
    schema = json.dumps({"type": "string", "pattern": "(((a{0,60}){60}){60})"})
    state = GrammarCompiler(load_tokenizer(BYTE_MODEL), 256, [10]).start(Grammar("json_schema", schema))
    tokens = [*b'"' + b"a" * 60]

    def go_on():
        for count in range(len(tokens)):
            state.allow(tokens[:count], 0)

    with pytest.raises(GrammarError, match="too many expressions") as raised:
        go_on()
    with pytest.raises(Refusal, match="too many expressions") as refused:
        _check_end(SimpleNamespace(finish_reason="error", error=raised.value), "tools")
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "tools", "grammar")


@pytest.mark.parametrize("name", ["LLTokenizer", "LLMatcher"])
def test_a_grammar_whose_compilation_panics_is_refused(name, monkeypatch):
    llguidance = pytest.importorskip("llguidance")

    def panic(*args, **kwargs):
        raise PanicException("compile")

    panic.grammar_from_regex = lambda text: text
    monkeypatch.setattr(llguidance, name, panic)
    compiler = GrammarCompiler(load_tokenizer(BYTE_MODEL), 256, [10])
    with pytest.raises(ValueError, match=r"grammar must be .*compile"):
        compiler.check(Grammar("regex", "a"))


class Rude(Drafting):
    """It raises for one prompt."""

    def draft(self, request, tokens, max_drafts):
        if tokens[0] == 1:
            raise self.proposed
        return []


@pytest.mark.parametrize(
    "error", [PanicException("x"), SystemExit(3), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_no_one_interrupts_the_thread_of_an_asynchronous_engine(error):
    """So whatever is raised in it ends one request."""
    engine = Engine(SPELLER, EngineConfig(**SIZES, **DRAFTS), drafter=Rude(error))

    async def ask(serving, prompt):
        async for update in serving.generate(prompt, PARAMS):
            if update.output:
                return update.output

    async def main():
        async with AsyncEngine(engine) as serving:
            wrong, right = await asyncio.gather(ask(serving, [1, 2, 3]), ask(serving, [4, 5]))
            assert isinstance(wrong.error, PanicError)
            assert wrong.error.__cause__ is error
            assert_right([right], [[4, 5]])
            assert serving.is_running

    asyncio.run(main())
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_an_interrupt_of_the_callers_thread_is_raised_again_and_ends_no_request(error):
    drafter = Rude(error)
    engine = Engine(SPELLER, EngineConfig(**SIZES, **DRAFTS), drafter=drafter)
    number = engine.add_request([1, 2, 3], PARAMS)
    engine.step()
    with pytest.raises(type(error)):
        engine.step()
    drafter.draft = lambda *arguments: []
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert [output.request_id for output in outputs] == [number]
    assert_right(outputs, [[1, 2, 3]])


@pytest.mark.parametrize("error", [PanicException("x"), SystemExit(3), ValueError("y")], ids=lambda e: type(e).__name__)
def test_a_thread_that_works_for_another_one_raises_exceptions_only(error):
    def fail():
        raise error

    with pytest.raises(Exception) as raised:  # noqa: PT011
        contained(fail)()
    assert raised.value is error or raised.value.__cause__ is error


@pytest.fixture(scope="module")
def stripping(tmp_path_factory):
    """A tokenizer.json with which the library panics at a text of one space."""
    pytest.importorskip("tokenizers")
    directory = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(BYTE_MODEL, directory)
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 1}
    content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"], strip]}
    file.write_text(json.dumps(content))
    return load_tokenizer(directory)


def test_a_real_panic_ends_one_call_of_a_server(stripping, caplog):
    caplog.set_level(logging.ERROR)
    engine = Engine(SPELLER, EngineConfig(**SIZES), tokenizer=stripping)
    spaces = {"max_tokens": 6, "temperature": 0, "logit_bias": {str(SPACE): 100}, "ignore_eos": True}
    with Served(engine, Settings(warmup="none")) as served:
        for prompt in ([37, SPACE], [SPACE]):
            for stream in (False, True):
                caplog.clear()
                response = served.post("/v1/completions", {"prompt": prompt, "stream": stream, **spaces})
                assert response.status_code == 500 or "error" in response.text, response.text
                # The server may log an error after it has answered.
                for _ in range(3000):
                    if "slice index" in caplog.text:
                        break
                    time.sleep(0.01)
                assert "slice index" in caplog.text
        assert served.post("/detokenize", {"tokens": [SPACE]}).status_code == 500
        assert served.client.get("/health").status_code == 200
        assert served.complete([1, 2, 3], max_tokens=3, ignore_eos=True)["choices"][0]["finish_reason"] == "length"
    assert len(engine.generate([1, 2], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2
