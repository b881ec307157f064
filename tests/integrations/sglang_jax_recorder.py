"""Records what sglang-jax asks of a linear-attention backend and what its own one answers, for tests without sglang-jax."""

import inspect
import json
from pathlib import Path

import jax
import numpy as np
from sgl_jax.srt.layers.attention import hybrid_linear_attn_backend as hybrid
from sgl_jax.srt.layers.attention.linear import gdn_backend, kda_backend
from sgl_jax.srt.layers.radix_linear_attention import RadixLinearAttention
from sgl_jax.srt.managers.schedule_batch import Req, ScheduleBatch
from sgl_jax.srt.managers.scheduler import GenerationBatchResult
from sgl_jax.srt.managers.scheduler_output_processor_mixin import SchedulerOutputProcessorMixin
from sgl_jax.srt.managers.tp_worker import ModelWorker
from sgl_jax.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool, MHATokenToKVPool
from sgl_jax.srt.model_executor.forward_batch_info import ForwardBatch
from sgl_jax.srt.model_executor.model_runner_kv_cache_mixin import ModelRunnerKVCacheMixin
from sgl_jax.srt.server_args import ServerArgs
from sgl_jax.srt.speculative.dflash_info import DFlashDraftInput
from sgl_jax.srt.speculative.dflash_worker import DFlashWorker
from sgl_jax.srt.speculative.spec_info import SpeculativeAlgorithm

CALLS = []
# What the adapters override, call or are called by.
SIGNATURES = {
    "GDNAttnBackend.__init__": gdn_backend.GDNAttnBackend.__init__,
    "GDNAttnBackend.__call__": gdn_backend.GDNAttnBackend.__call__,
    "KDAAttnBackend.__init__": kda_backend.KDAAttnBackend.__init__,
    "KDAAttnBackend.__call__": kda_backend.KDAAttnBackend.__call__,
    "LinearRecurrentAttnBackend.__init__": hybrid.LinearRecurrentAttnBackend.__init__,
    "LinearRecurrentAttnBackend.get_layer_cache": hybrid.LinearRecurrentAttnBackend.get_layer_cache,
    "LinearRecurrentAttnBackendMetadata": hybrid.LinearRecurrentAttnBackendMetadata,
    "RadixLinearAttention.__init__": RadixLinearAttention.__init__,
    "MHATokenToKVPool.set_kv_buffer_legacy": MHATokenToKVPool.set_kv_buffer_legacy,
    "HybridLinearKVPool._to_physical": HybridLinearKVPool._to_physical,
    "LinearRecurrentAttnBackend.get_forward_metadata": hybrid.LinearRecurrentAttnBackend.get_forward_metadata,
    "ServerArgs.__post_init__": ServerArgs.__post_init__,
    "SpeculativeAlgorithm.from_string": SpeculativeAlgorithm.from_string,
    "DFlashWorker.__init__": DFlashWorker.__init__,
    "DFlashWorker.forward_batch_speculative_generation": DFlashWorker.forward_batch_speculative_generation,
    "ModelRunnerKVCacheMixin._init_pools": ModelRunnerKVCacheMixin._init_pools,
    "ScheduleBatch.get_spec_model_worker_batch": ScheduleBatch.get_spec_model_worker_batch,
    "ScheduleBatch.get_model_worker_batch": ScheduleBatch.get_model_worker_batch,
    "SchedulerOutputProcessorMixin.process_batch_result_decode": SchedulerOutputProcessorMixin.process_batch_result_decode,
    "HybridReqToTokenPool.clear": HybridReqToTokenPool.clear,
    "HybridReqToTokenPool.get_linear_recurrent_indices": HybridReqToTokenPool.get_linear_recurrent_indices,
    "HybridReqToTokenPool.get_recurrent_ping_pong_other_idx": HybridReqToTokenPool.get_recurrent_ping_pong_other_idx,
    "HybridReqToTokenPool.set_recurrent_ping_pong_slot": HybridReqToTokenPool.set_recurrent_ping_pong_slot,
    "ModelWorker.forward_batch_generation": ModelWorker.forward_batch_generation,
    "ForwardBatch.init_new": ForwardBatch.init_new,
    "Req._check_token_based_finish": Req._check_token_based_finish,
    "DFlashDraftInput": DFlashDraftInput,
    "GenerationBatchResult": GenerationBatchResult,
}


def signatures():
    """Returns the names of the parameters of each function that the adapter relies on."""
    return {name: list(inspect.signature(function).parameters) for name, function in SIGNATURES.items()}


def watch():
    """Keeps what goes in and out of sglang-jax's own backend of the first layer, from now on."""
    own = gdn_backend.GDNAttnBackend.__call__

    def watched(self, q, k, v, a, b, layer, forward_batch, recurrent_state_pool, **kwargs):
        result = own(self, q, k, v, a, b, layer, forward_batch, recurrent_state_pool, **kwargs)
        if layer.layer_id == 0:
            states, (windows,) = self.get_layer_cache(recurrent_state_pool, 0)
            out, (new_states, (new_windows,)) = result
            step, decode = self.forward_metadata, forward_batch.forward_mode.is_decode()
            call = dict(
                q=q, k=k, v=v, a=a, b=b, conv=layer.conv1d.weight.value, A_log=layer.A_log.value,
                dt_bias=layer.dt_bias.value, states=states, windows=windows, out=out, new_states=new_states,
                new_windows=new_windows, cu_q_lens=step.cu_q_lens, recurrent_indices=step.recurrent_indices,
                has_initial_state=step.has_initial_state, recurrent_track_indices=step.recurrent_track_indices,
                recurrent_track_mask=step.recurrent_track_mask,
            )  # fmt: skip
            if not decode:
                call["extend_prefix_lens"] = forward_batch.extend_prefix_lens
            jax.debug.callback(lambda call: CALLS.append(jax.tree.map(np.array, call)), call)
        return result

    gdn_backend.GDNAttnBackend.__call__ = watched


def chosen():
    """Picks one call of each kind that a backend has to get right."""

    def first(wanted):
        return next(call for call in CALLS if wanted(call, call["recurrent_indices"] > 0, call["recurrent_track_mask"]))

    fresh = lambda call, real: real & ~call["has_initial_state"]
    prefill = lambda call: "extend_prefix_lens" in call
    return {
        "prefill_of_several_rows": first(lambda c, real, kept: prefill(c) and fresh(c, real).any() and real.sum() > 1),
        "prefill_that_goes_on": first(
            lambda c, real, kept: prefill(c) and (real & c["has_initial_state"] & (kept != 0)).any()
        ),
        "decode_of_several_rows": first(lambda c, real, kept: not prefill(c) and 1 < real.sum() < len(real)),
        "decode_that_keeps": first(lambda c, real, kept: not prefill(c) and (real & (kept != 0)).any()),
    }


def kda_calls():
    """Calls sglang-jax's KDA backend with the data of its own tests, of which two rows go on from a state."""
    from sgl_jax.test.test_kda_attention import create_test_data

    rng, sizes, found = np.random.default_rng(2), (2, 16, 4, np.float32), {}
    for name, mode, lengths in (("kda_prefill", "prefill", [5, 70, 2]), ("kda_decode", "decode", [1, 1, 1])):
        batch, pool, layer, *tokens = create_test_data(
            mode, lengths, *sizes, rng, all_have_initial_state=[False, True, True]
        )[:8]  # fmt: skip
        (states,), ((windows,),) = pool.recurrent_buffers, pool.conv_buffers
        step = batch.attn_backend.forward_metadata
        call = dict(zip("qkvab", tokens, strict=True))
        for part in "qkv":
            call[f"{part}_conv"] = getattr(layer, f"{part}_conv1d").weight.value
        call |= dict(
            A_log=layer.A_log.value, dt_bias=layer.dt_bias.value, states=states, windows=windows,
            cu_q_lens=step.cu_q_lens, recurrent_indices=step.recurrent_indices, has_initial_state=step.has_initial_state,
        )  # fmt: skip
        if mode == "prefill":
            call["extend_prefix_lens"] = batch.extend_prefix_lens
        place = jax.sharding.NamedSharding(pool.mesh, jax.sharding.PartitionSpec("data", "tensor"))
        out, (new_states, (new_windows,)) = layer(batch, *(jax.device_put(x, place) for x in tokens), pool)
        call |= dict(out=out, new_states=new_states, new_windows=new_windows)
        found[name] = {key: np.asarray(value) for key, value in call.items()}
    return found


def write(folder):
    """Writes the picked calls and the signatures. Of new pools only the slots that changed are kept."""
    for name, call in (chosen() | kda_calls()).items():
        call = dict(call)
        for pool in ("states", "windows"):
            old, new = call[pool], call.pop(f"new_{pool}")
            slots = np.flatnonzero([not np.array_equal(before, after) for before, after in zip(old, new, strict=True)])
            call[f"{pool}_slots"], call[f"{pool}_after"] = slots.astype(np.int32), new[slots]
        np.savez_compressed(Path(folder) / f"sglang_jax_{name}.npz", **call)
    (Path(folder) / "sglang_jax_signatures.json").write_text(json.dumps(signatures(), indent=1) + "\n")
