"""Speculation keeps each request's slots in order. `make integrations` serves with it in the real sglang-jax."""

import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import depth
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import sgl_jax
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from mamba_align_jax.engine.drafting.prompt_lookup import PromptLookupDrafter
from mamba_align_jax.integrations import sglang_jax, sglang_jax_speculation
from mamba_align_jax.integrations.request_drafts import RequestDrafts
from mamba_align_jax.integrations.sglang_jax import VerifySlots, VerifyStep
from mamba_align_jax.integrations.sglang_jax_speculation import NGramWorker

SIGNATURES = json.loads((Path(__file__).parent / "data" / "sglang_jax_signatures.json").read_text())
PADDINGS = [16], [4], [64], 4


@pytest.fixture
def stack(monkeypatch):
    """What stands for sglang-jax's modules, with our backends."""
    modules = sgl_jax.put(monkeypatch)
    sglang_jax.install()
    return modules


class Fixed:
    """Proposes the same drafts always, and remembers the requests that it shall forget."""

    def __init__(self, *drafts):
        self.drafts, self.forgotten = list(drafts), []

    def draft(self, request, tokens, max_drafts):
        assert max_drafts >= 1
        return self.drafts

    def forget(self, request):
        self.forgotten.append(request)

    def __bool__(self):
        # As of a drafter that is a dict of what it knows.
        return False


class Request:
    """A request of sglang-jax with a prompt, the tokens that it has generated, and stop tokens."""

    def __init__(self, rid, prompt, outputs, wanted=100, stops=()):
        self.rid, self.origin_input_ids, self.output_ids = rid, list(prompt), list(outputs)
        self.sampling_params, self.stops = SimpleNamespace(max_new_tokens=wanted), stops
        self.kv_committed_len = len(prompt) + len(outputs)

    def _check_token_based_finish(self, new_accepted_tokens):
        for i, token in enumerate(new_accepted_tokens):
            if token in self.stops:
                self.finished_len = len(self.output_ids) - len(new_accepted_tokens) + i + 1
                return True
        return False

    def finished(self):
        return len(self.output_ids) >= self.sampling_params.max_new_tokens or bool({*self.output_ids} & {*self.stops})


def made_pool(stack, size=3, slots=24, num_tokens=4, algorithm="NGRAM"):
    """A model runner's pool of requests, made through the changed method."""
    runner = stack.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin()
    runner.server_args = stack.server_args.ServerArgs(
        speculative_algorithm=algorithm, speculative_num_draft_tokens=num_tokens, max_recurrent_state_size=slots
    )
    runner.linear_recurrent_config = object()
    runner._init_pools(size, 1)
    assert runner.server_args.max_recurrent_state_size == slots
    return runner.req_to_token_pool


def all_slots(pool, requests, tree=()):
    """Every slot that someone has."""
    owned = [slot for r in requests for slot in (r.recurrent_pool_idx, *r.recurrent_ping_pong_track_buffer)]
    return sorted([*pool.recurrent_free_slots[0], *pool.draft_slots.ravel(), *owned, *tree])


def made_worker(stack, pool):
    """A worker whose model samples what its `sampled` says."""
    gdn, _ = sglang_jax.backends()
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    linear = gdn(2, 4, 8, 8, 4, mesh)
    attention = SimpleNamespace(linear_attn_backend=linear, get_forward_metadata=lambda batch: "metadata")
    runner = SimpleNamespace(attn_backend=attention, req_to_token_pool=pool)
    target = SimpleNamespace(model_runner=runner, max_running_requests=3, max_padded_num_tokens=16)

    def forward(batch, sampling_metadata=None, skip_sample=False, forward_metadata=None):
        target.seen = batch
        tokens = np.zeros(16, np.int32)
        tokens[: len(target.sampled)] = target.sampled
        assert skip_sample == (forward_metadata is not None)
        return SimpleNamespace(next_token_logits=jax.nn.one_hot(tokens, 100)), None if skip_sample else tokens, 0

    target.forward_batch_generation = forward
    args = SimpleNamespace(speculative_algorithm="NGRAM", speculative_num_draft_tokens=4)
    return stack.dflash_worker.DFlashWorker(args, target), target


def test_install_changes_only_servers_that_ask_for_it(stack):
    args, dflash = stack.server_args.ServerArgs, stack.dflash_worker.DFlashWorker
    sglang_jax_speculation.install()
    with pytest.raises(ValueError, match="does not support speculative decoding yet"):
        args(speculative_algorithm="DFLASH")
    for name in ("NGRAM", "Ngram"):
        assert args(speculative_algorithm=name).speculative_algorithm == "NGRAM"
    from_string, algorithms = stack.spec_info.SpeculativeAlgorithm.from_string, sgl_jax.SpeculativeAlgorithm
    assert [from_string(name) for name in ("NGRAM", "Ngram", "DFLASH")] == [algorithms.DFLASH] * 3
    assert from_string(None) is algorithms.NONE
    with pytest.raises(KeyError):
        from_string("EAGLE5")
    other = SimpleNamespace(speculative_algorithm="DFLASH")
    assert isinstance(stack.dflash_worker.DFlashWorker(other, target_worker=None), dflash)
    runner = stack.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin()
    runner.server_args = args(speculative_algorithm=None)
    runner._init_pools(3, 1)
    assert not hasattr(runner.req_to_token_pool, "draft_slots")
    batch = stack.schedule_batch.ScheduleBatch()
    batch.req_to_token_pool, batch.reqs_info = runner.req_to_token_pool, [None]
    assert batch.get_spec_model_worker_batch(*PADDINGS, draft_token_num=4) == "a step of sglang-jax"
    with pytest.raises(ValueError, match="must be called once"):
        sglang_jax_speculation.install()


def test_functions_are_called_as_those_of_sglang_jax(stack):
    """The stand-ins have its parameters, and what takes their place has them after the functions that it is given."""
    parameters = lambda function: list(inspect.signature(function).parameters)
    own = sglang_jax_speculation
    classes = "HybridReqToTokenPool", "ServerArgs", "SpeculativeAlgorithm", "ForwardBatch"
    for name in (*classes, "ScheduleBatch", "SchedulerOutputProcessorMixin"):
        methods = [method for method in SIGNATURES if method.startswith(f"{name}.")]
        assert methods
        for method in methods:
            assert parameters(getattr(getattr(sgl_jax, name), method.partition(".")[2])) == SIGNATURES[method]
    for function, originals, name in (
        (own._check_arguments, 1, "ServerArgs.__post_init__"),
        (own._verify_batch, 2, "ScheduleBatch.get_spec_model_worker_batch"),
        (own._process_decode, 2, "SchedulerOutputProcessorMixin.process_batch_result_decode"),
    ):
        assert parameters(function)[1 + originals :] == SIGNATURES[name][1:]
    # sglang-jax gives its arguments by place, and ours has another name.
    assert len(parameters(own._init_pools)) - 1 == len(SIGNATURES["ModelRunnerKVCacheMixin._init_pools"])
    worker = parameters(NGramWorker.forward_batch_speculative_generation)
    assert len(worker) == len(SIGNATURES["DFlashWorker.forward_batch_speculative_generation"])
    assert parameters(Request._check_token_based_finish) == SIGNATURES["Req._check_token_based_finish"]
    assert {"sampling_metadata", "skip_sample", "forward_metadata"} <= {
        *SIGNATURES["ModelWorker.forward_batch_generation"]
    }


def test_bad_input_is_refused_by_name(stack):
    sglang_jax_speculation.install()
    args = stack.server_args.ServerArgs
    with pytest.raises(ValueError, match="dp_size must be 1 with speculative_algorithm='NGRAM', got 2"):
        args(speculative_algorithm="NGRAM", dp_size=2)
    with pytest.raises(ValueError, match="must be at most recurrent_track_interval, got 5 and 4"):
        args(speculative_algorithm="NGRAM", speculative_num_draft_tokens=5, recurrent_track_interval=4)
    for number in (0, 9):
        with pytest.raises(
            ValueError, match=f"speculative_num_draft_tokens must be 1 to 8 with .*'NGRAM', got {number}"
        ):
            args(speculative_algorithm="NGRAM", speculative_num_draft_tokens=number)
    runner = stack.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin()
    runner.server_args, runner.linear_recurrent_config = args(speculative_algorithm="NGRAM"), None
    with pytest.raises(ValueError, match="needs a model with recurrent states"):
        runner._init_pools(3, 1)
    native = SimpleNamespace(attn_backend=SimpleNamespace(linear_attn_backend=object()))
    with pytest.raises(ValueError, match=r"that sglang_jax\.install makes, got object"):
        NGramWorker(runner.server_args, SimpleNamespace(model_runner=native))
    _, target = made_worker(stack, None)
    target.max_running_requests = 5
    with pytest.raises(
        ValueError, match="must be at least 20 for 4 tokens of each of 5 running requests in a step, got 16"
    ):
        NGramWorker(SimpleNamespace(speculative_num_draft_tokens=4), target)


@settings(max_examples=depth.examples(quick=30, full=1000), deadline=None)
@given(data=st.data())
def test_each_slot_has_the_state_of_the_tokens_that_its_owner_says(data):
    """Requests come, verify drafts, keep boundaries and leave. A slot is a tuple of the tokens that its state has read."""
    with pytest.MonkeyPatch.context() as patch:
        stack = sgl_jax.put(patch)
        sglang_jax_speculation.install()
        num_tokens, interval = 3, 4
        pool = made_pool(stack, size=3, slots=12, num_tokens=num_tokens)
        expected = sorted(range(1, 12 + 3 * (num_tokens + 1) + 1))
        slots, running, fresh = {}, {}, iter(range(10_000))
        for _ in range(data.draw(st.integers(1, 25))):
            place = data.draw(st.integers(0, 2))
            request = running.get(place)
            if request is None:
                request = running[place] = Request(
                    place, [next(fresh) for _ in range(data.draw(st.integers(1, 6)))], []
                )
                pool.admit(request, place)
                slots[request.recurrent_pool_idx] = tuple(request.origin_input_ids)
                request.output_ids.append(next(fresh))
            elif data.draw(st.integers(0, 4)) == 0:
                pool.recurrent_free_slots[0] += [request.recurrent_pool_idx, *request.recurrent_ping_pong_track_buffer]
                pool.req_index_to_recurrent_index_mapping[place] = 0
                del running[place]
            else:
                drafts = [next(fresh) for _ in range(data.draw(st.integers(0, num_tokens - 1)))]
                row = sglang_jax_speculation._row(request, RequestDrafts(Fixed(*drafts)), num_tokens, interval)
                before = (*request.origin_input_ids, *request.output_ids[:-1])
                written = pool.slots([row], 2)
                (own,) = pool.get_linear_recurrent_indices(np.array([place]))
                assert slots[own] == before
                owned = {
                    s for r in running.values() for s in (r.recurrent_pool_idx, *r.recurrent_ping_pong_track_buffer)
                }
                for t in range(len(row.tokens)):
                    assert written.token[0, t] not in owned
                    slots[int(written.token[0, t])] = (*before, *row.tokens[: t + 1])
                if written.kept[0]:
                    assert written.kept[0] not in owned
                    slots[int(written.kept[0])] = slots[int(written.kept_source[0])]
                assert not any(part[1:].any() for part in written)
                accepted = data.draw(st.integers(1, len(row.tokens)))
                pool.accept(row, accepted)
                request.output_ids += [*row.tokens[1:accepted], next(fresh)]
            for r in running.values():
                tokens = (*r.origin_input_ids, *r.output_ids)
                assert slots[r.recurrent_pool_idx] == tokens[:-1]
                assert pool.req_index_to_recurrent_index_mapping[r.req_pool_idx] == r.recurrent_pool_idx
                last = (len(tokens) - 1) // interval * interval
                if last > len(r.origin_input_ids):
                    assert r.recurrent_last_track_seqlen == last
                    assert slots[r.recurrent_ping_pong_track_buffer[0]] == tokens[:last]
            assert all_slots(pool, running.values()) == expected
        pool.clear()
        assert all_slots(pool, []) == expected


def test_a_step_has_the_drafts_that_a_request_can_use(stack):
    request = lambda wanted: Request("r", [1] * 29, [2], wanted)
    drafts = RequestDrafts(Fixed(7, 8, 9, 10, 11))
    row = lambda wanted, interval=32: sglang_jax_speculation._row(request(wanted), drafts, 4, interval)
    assert row(100)[1:] == (29, [2, 7, 8, 9], 32)
    assert row(3).tokens == [2, 7]
    assert row(2).tokens == [2]
    assert row(100, None).boundary is None
    # The boundary at the end of the computed tokens is kept already.
    at_boundary = Request("r", [1] * 32, [2])
    assert sglang_jax_speculation._row(at_boundary, RequestDrafts(Fixed()), 4, 32).boundary == 64


def test_a_batch_is_verified_as_prompts_and_goes_on_from_what_was_accepted(stack):
    drafter = Fixed(7, 8, 9)
    sglang_jax_speculation.install(drafter=drafter)
    pool = made_pool(stack)
    worker, target = made_worker(stack, pool)
    # All drafts of the first are right, the second draft of the second is wrong, the third stops at its first draft.
    requests = [Request("a", [1] * 30, [2], 4), Request("b", [1] * 12, [3, 4]), Request("c", [1] * 5, [6], stops=[7])]
    for place, request in enumerate(requests):
        pool.admit(request, place)
        request.kv_committed_len = len(request.origin_input_ids) + len(request.output_ids)
    batch = stack.schedule_batch.ScheduleBatch()
    computed = np.array([30, 13, 5])
    info = SimpleNamespace(
        reqs=requests, req_pool_indices=np.arange(3), seq_lens=computed + 1, extend_logprob_start_lens=[0]
    )
    batch.req_to_token_pool, batch.reqs_info = pool, [info]
    batch.tree_cache = SimpleNamespace(recurrent_track_interval=32)
    modes = stack.forward_batch_info
    batch.forward_mode = modes.ForwardMode.DECODE

    step = batch.get_spec_model_worker_batch(*PADDINGS, draft_token_num=4)
    assert (step.forward_mode, batch.forward_mode) == (modes.ForwardMode.EXTEND, modes.ForwardMode.DECODE)
    assert (batch.per_dp_bs_size, step.extend_logprob_start_lens) == (4, None)
    # The first request wants three tokens more, so it gets two drafts.
    assert step.input_ids.tolist() == [2, 7, 8, 4, 7, 8, 9, 6, 7, 8, 9]
    assert (step.prefix_lens, step.extend_lens, step.seq_lens.tolist()) == ([30, 13, 5], [3, 4, 4], [33, 17, 9, 0])
    where = [pool.req_to_token[i, begin : begin + size] for i, begin, size in ((0, 30, 3), (1, 13, 4), (2, 5, 4))]
    assert step.out_cache_loc.tolist() == np.concatenate(where).tolist()
    assert (info.seq_lens == computed + 1).all()
    slots = step.verify_slots
    np.testing.assert_array_equal(slots.token[:3], pool.draft_slots[:3, :4])
    assert slots.kept.tolist() == [pool.draft_slots[0, 4], 0, 0, 0]
    assert slots.kept_source.tolist() == [pool.draft_slots[0, 1], 0, 0, 0]

    target.sampled = [7, 8, 50, 7, 60, 61, 62, 7, 8, 9, 63]
    right = slots.token.copy()
    result = worker.forward_batch_speculative_generation(step)
    assert target.seen.forward_mode == modes.ForwardMode.TARGET_VERIFY
    assert result.accept_lens.tolist() == [3, 2, 1, 0]
    tokens = result.next_token_ids.reshape(4, 4)
    assert [tokens[i, :n].tolist() for i, n in enumerate(result.accept_lens)] == [[7, 8, 50], [7, 60], [7], []]
    state = result.next_draft_input
    assert {*vars(result)} <= {*SIGNATURES["GenerationBatchResult"]}
    assert {*vars(state)} <= {*SIGNATURES["DFlashDraftInput"], "new_seq_lens"}
    assert state.verified_id.tolist() == [50, 60, 7]
    assert (state.draft_seq_lens.tolist(), state.new_seq_lens.tolist()) == ([33, 15, 6], [34, 16, 7, 0])
    assert [r.recurrent_pool_idx for r in requests] == [right[0, 2], right[1, 1], right[2, 0]]
    assert (requests[0].recurrent_last_track_seqlen, requests[1].recurrent_last_track_seqlen) == (32, None)

    scheduler = stack.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin()
    scheduler.process_batch_result_decode(batch, result)
    # The first and the third are finished, and may cache all tokens whose keys and states they have.
    assert [requests[0].cached, requests[2].cached] == [33, 6]
    assert requests[1].kv_committed_len == 15
    assert [rid for rid, _ in drafter.forgotten] == ["a", "c"]


def test_a_prompt_step_takes_what_the_model_samples(stack):
    sglang_jax_speculation.install()
    worker, target = made_worker(stack, made_pool(stack))
    target.sampled = [5, 6]
    batch = SimpleNamespace(bid=3, seq_lens=np.array([30, 12, 0, 0]), logits_indices_selector=np.array([0, 1]))
    result = worker.forward_batch_speculative_generation(batch)
    assert result.accept_lens is None
    assert result.next_token_ids[:2].tolist() == [5, 6]
    assert result.next_draft_input.verified_id.tolist() == [5, 6]
    assert result.next_draft_input.draft_seq_lens.tolist() == [30, 12]
    assert batch.capture_hidden_mode == stack.forward_batch_info.CaptureHiddenMode.NULL


def test_layers_are_told_of_the_slots_of_a_verify_step(stack):
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    backend = sglang_jax.backends()[0](2, 4, 8, 8, 4, mesh)
    batch = SimpleNamespace(cu_q_lens=jnp.array([0, 3]), recurrent_indices=jnp.array([4]))
    assert not isinstance(backend.get_forward_metadata(batch), VerifyStep)
    batch.verify_slots = VerifySlots(np.array([[5, 6, 7]]), np.array([8]), np.array([6]))
    rows = sglang_jax._rows(backend.get_forward_metadata(batch), jnp.array([30]))
    assert (rows.fresh, rows.block.tolist(), rows.query_start_loc.tolist()) == (None, [4], [0, 3])
    assert (rows.token_blocks.tolist(), rows.kept_block.tolist(), rows.kept_source.tolist()) == ([[5, 6, 7]], [8], [6])


def test_the_default_drafter_looks_up_the_prompt(stack):
    sglang_jax_speculation.install()
    method = stack.schedule_batch.ScheduleBatch.__dict__["get_spec_model_worker_batch"]
    assert isinstance(method.args[1]._drafter, PromptLookupDrafter)
