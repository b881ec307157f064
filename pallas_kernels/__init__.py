"""Ops of recurrent models over pools of states and pages: Pallas GPU kernels, each with an XLA twin.

The ops keep no state of their own. They know blocks, rows and tokens, but no requests and no models.
"""

from pallas_kernels.all_reduce import Mailboxes as Mailboxes
from pallas_kernels.all_reduce import all_reduce as all_reduce
from pallas_kernels.all_reduce import all_reduce_rms_norm as all_reduce_rms_norm
from pallas_kernels.all_reduce.mailboxes import can_write_each_other as can_write_each_other
from pallas_kernels.blocks import NULL_BLOCK as NULL_BLOCK
from pallas_kernels.blocks import StateLayout as StateLayout
from pallas_kernels.blocks import WindowLayout as WindowLayout
from pallas_kernels.blocks import read_blocks as read_blocks
from pallas_kernels.blocks import write_blocks as write_blocks
from pallas_kernels.causal_conv1d import causal_conv1d_prefill as causal_conv1d_prefill
from pallas_kernels.causal_conv1d import causal_conv1d_update as causal_conv1d_update
from pallas_kernels.chunks import CHUNK_SIZE as CHUNK_SIZE
from pallas_kernels.chunks import Chunks as Chunks
from pallas_kernels.chunks import Span as Span
from pallas_kernels.chunks import chunk_of_token as chunk_of_token
from pallas_kernels.chunks import chunk_rows as chunk_rows
from pallas_kernels.chunks import spans as spans
from pallas_kernels.dispatch import Implementation as Implementation
from pallas_kernels.dispatch import UnsupportedError as UnsupportedError
from pallas_kernels.gated_delta_rule import gated_delta_rule_gates as gated_delta_rule_gates
from pallas_kernels.gated_delta_rule import gated_delta_rule_prefill as gated_delta_rule_prefill
from pallas_kernels.gated_delta_rule import gated_delta_rule_recurrent as gated_delta_rule_recurrent
from pallas_kernels.gated_delta_rule import gated_delta_rule_update as gated_delta_rule_update
from pallas_kernels.gated_delta_rule.deferred import gated_delta_rule_deferred as gated_delta_rule_deferred
from pallas_kernels.least_kept import least_kept as least_kept
from pallas_kernels.linear import linear as linear
from pallas_kernels.linear import linear_sums as linear_sums
from pallas_kernels.mixture_of_experts import Activation as Activation
from pallas_kernels.mixture_of_experts import Scores as Scores
from pallas_kernels.mixture_of_experts import choose_experts as choose_experts
from pallas_kernels.mixture_of_experts import mixture_of_experts as mixture_of_experts
from pallas_kernels.mixture_of_experts import mixture_of_experts_sums as mixture_of_experts_sums
from pallas_kernels.mixture_of_experts import routed_experts_sums as routed_experts_sums
from pallas_kernels.paged_attention import paged_attention as paged_attention
from pallas_kernels.product_chain import all_reduce_product_chain as all_reduce_product_chain
from pallas_kernels.product_chain import product_chain as product_chain
from pallas_kernels.rms_norm import add_rms_norm as add_rms_norm
from pallas_kernels.rotary import rotate as rotate
from pallas_kernels.rotary import rotate_and_store as rotate_and_store
from pallas_kernels.rows import TokenRows as TokenRows
from pallas_kernels.rows import token_rows as token_rows
from pallas_kernels.selective_scan import selective_scan as selective_scan
from pallas_kernels.selective_state_update import selective_state_update as selective_state_update
from pallas_kernels.selective_state_update.deferred import selective_state_deferred as selective_state_deferred
from pallas_kernels.ssd import ssd as ssd
from pallas_kernels.state_copy import state_copy as state_copy
