"""The parts of sglang-jax that the adapter touches, under their names, for tests without sglang-jax.

`tests/integrations/data/sglang_jax_signatures.json` has the real signatures, and `make integrations` runs the real code.
"""

import enum
import sys
from types import ModuleType, SimpleNamespace

import numpy as np

PACKAGE = "sgl_jax.srt"
LINEAR = f"{PACKAGE}.layers.attention.linear"


class LinearRecurrentAttnBackend:
    """The base of sglang-jax's linear-attention backends: a mesh and the step's metadata."""

    def __init__(self, mesh=None):
        self.mesh, self.forward_metadata = mesh, None

    def get_forward_metadata(self, batch):
        return SimpleNamespace(cu_q_lens=batch.cu_q_lens, recurrent_indices=batch.recurrent_indices)

    @staticmethod
    def get_layer_cache(recurrent_state_pool, layer_id):
        return recurrent_state_pool.get_linear_recurrent_layer_cache(layer_id)


class HybridLinearKVPool:
    """A pool of keys and values of the full-attention layers alone, around one that counts them from 0."""

    def __init__(self, full_attention_layer_ids, full_kv_pool):
        self.full_attention_layer_ids, self.full_kv_pool = full_attention_layer_ids, full_kv_pool

    def _to_physical(self, layer_id):
        return self.full_attention_layer_ids.index(layer_id)


class HybridReqToTokenPool:
    """The places of requests and the slots of their states, for one data-parallel rank and one track slot a request."""

    def __init__(self, size, slots_per_rank, max_context_len):
        self.size, self.slots_per_rank, self.enable_recurrent_extra_buffer = size, slots_per_rank, True
        self.req_to_token = np.arange(size * max_context_len, dtype=np.int32).reshape(size, max_context_len)
        self.req_index_to_recurrent_index_mapping = np.zeros(size, np.int32)
        self.recurrent_free_slots = [list(range(1, slots_per_rank + 1))]

    def clear(self):
        self.recurrent_free_slots = [list(range(1, self.slots_per_rank + 1))]

    def admit(self, request, place):
        take = self.recurrent_free_slots[0].pop
        request.req_pool_idx, request.recurrent_pool_idx = place, take(0)
        request.recurrent_ping_pong_track_buffer, request.recurrent_next_track_idx = [take(0)], 0
        request.recurrent_last_track_seqlen = None
        self.req_index_to_recurrent_index_mapping[place] = request.recurrent_pool_idx

    def get_recurrent_ping_pong_other_idx(self, next_idx):
        return (next_idx + 1) % 1

    def set_recurrent_ping_pong_slot(self, req, idx, slot):
        req.recurrent_ping_pong_track_buffer[idx] = int(slot)

    def get_linear_recurrent_indices(self, req_pool_indices):
        return self.req_index_to_recurrent_index_mapping[req_pool_indices]


class ServerArgs:
    """A server's arguments, of which speculation excludes the extra buffer."""

    def __init__(self, **arguments):
        defaults = dict(
            dp_size=1, speculative_algorithm=None, speculative_num_draft_tokens=4, enable_recurrent_extra_buffer=True,
            recurrent_track_interval=32, max_recurrent_state_size=24,
        )  # fmt: skip
        vars(self).update(defaults | arguments)
        self.__post_init__()

    def __post_init__(self):
        if self.enable_recurrent_extra_buffer and self.speculative_algorithm is not None:
            raise ValueError("--enable-recurrent-extra-buffer does not support speculative decoding yet")


class SpeculativeAlgorithm(enum.Enum):
    """The algorithms that sglang-jax knows, two of them."""

    NONE, DFLASH = "NONE", "DFLASH"

    @staticmethod
    def from_string(name):
        return {None: SpeculativeAlgorithm.NONE, "DFLASH": SpeculativeAlgorithm.DFLASH}[name and name.upper()]


class ModelRunnerKVCacheMixin:
    """Makes a model runner's pools."""

    def _init_pools(self, num_places, dp_size):
        self.req_to_token_pool = HybridReqToTokenPool(num_places, self.server_args.max_recurrent_state_size, 64)


class ScheduleBatch:
    """A batch of requests. A step of it has what the real one has, without padding of tokens."""

    def get_spec_model_worker_batch(
        self, token_paddings, bs_paddings, cache_loc_paddings, page_size, enable_static_lora=False, draft_token_num=1
    ):
        return "a step of sglang-jax"

    def get_model_worker_batch(
        self, token_paddings, bs_paddings, cache_loc_paddings, page_size, enable_static_lora=False
    ):
        self.per_dp_bs_size = bs_paddings[-1]
        (info,) = self.reqs_info
        pad = lambda x: np.concatenate([x, np.zeros(self.per_dp_bs_size - len(x), np.int32)]).astype(np.int32)
        names = "input_ids", "out_cache_loc", "prefix_lens", "extend_lens", "extend_logprob_start_lens"
        step = SimpleNamespace(bid=7, forward_mode=self.forward_mode, per_dp_bs_size=self.per_dp_bs_size)
        vars(step).update({name: getattr(info, name) for name in names})
        step.seq_lens, step.recurrent_indices = pad(info.seq_lens), pad(info.recurrent_indices)
        return step


class SchedulerOutputProcessorMixin:
    """Gives each request what it sampled. A finished request caches what it has committed."""

    def process_batch_result_decode(self, batch, result, launch_done=None):
        for i, request in enumerate(batch.reqs_info[0].reqs):
            tokens = result.next_token_ids.reshape(len(result.accept_lens), -1)[i, : result.accept_lens[i]].tolist()
            request.output_ids.extend(tokens)
            if request.finished():
                request.cached = request.kv_committed_len
            else:
                request.kv_committed_len += len(tokens) - 1


class DFlashWorker:
    """The worker of sglang-jax's own algorithm."""

    def __init__(self, server_args, target_worker):
        self.server_args, self.target_worker = server_args, target_worker


class ForwardBatch:
    """What a model gets of a step."""

    @staticmethod
    def init_new(batch, model_runner):
        return batch, model_runner


def put(monkeypatch):
    """Makes the stand-ins importable as sglang-jax, for one test. Returns the modules that `install` changes."""
    # A test may change what belongs to a class, so each has classes of its own.
    fresh = lambda base: type(base.__name__, (base,), {})
    monkeypatch.setattr(SpeculativeAlgorithm, "from_string", SpeculativeAlgorithm.from_string)
    contents = {
        f"{PACKAGE}.layers.attention.hybrid_linear_attn_backend": dict(
            LinearRecurrentAttnBackend=LinearRecurrentAttnBackend
        ),
        f"{LINEAR}.gdn_backend": dict(GDNAttnBackend=object()),
        f"{LINEAR}.kda_backend": dict(KDAAttnBackend=object()),
        f"{PACKAGE}.mem_cache.memory_pool": dict(HybridLinearKVPool=type("Pool", (HybridLinearKVPool,), {})),
        f"{PACKAGE}.server_args": dict(ServerArgs=fresh(ServerArgs)),
        f"{PACKAGE}.model_executor.model_runner_kv_cache_mixin": dict(
            ModelRunnerKVCacheMixin=fresh(ModelRunnerKVCacheMixin)
        ),
        f"{PACKAGE}.model_executor.forward_batch_info": dict(
            ForwardMode=enum.Enum("ForwardMode", "EXTEND DECODE TARGET_VERIFY"),
            CaptureHiddenMode=enum.Enum("CaptureHiddenMode", "NULL FULL"),
            ForwardBatch=ForwardBatch,
        ),
        f"{PACKAGE}.managers.schedule_batch": dict(ScheduleBatch=fresh(ScheduleBatch)),
        f"{PACKAGE}.managers.scheduler": dict(GenerationBatchResult=SimpleNamespace),
        f"{PACKAGE}.managers.scheduler_output_processor_mixin": dict(
            SchedulerOutputProcessorMixin=fresh(SchedulerOutputProcessorMixin)
        ),
        f"{PACKAGE}.speculative.spec_info": dict(SpeculativeAlgorithm=SpeculativeAlgorithm),
        f"{PACKAGE}.speculative.dflash_worker": dict(DFlashWorker=fresh(DFlashWorker)),
        f"{PACKAGE}.speculative.dflash_info": dict(DFlashDraftInput=SimpleNamespace),
    }
    for name, members in contents.items():
        parts = name.split(".")
        for size in range(1, len(parts)):
            parent = ".".join(parts[:size])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(**{name.rpartition(".")[2]: sys.modules[name] for name in contents})
