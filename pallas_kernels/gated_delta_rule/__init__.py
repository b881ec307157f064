"""Gated delta rule and Kimi delta attention over packed rows, with the states in a pool."""

from pallas_kernels.gated_delta_rule.api import gated_delta_rule_gates as gated_delta_rule_gates
from pallas_kernels.gated_delta_rule.api import gated_delta_rule_prefill as gated_delta_rule_prefill
from pallas_kernels.gated_delta_rule.api import gated_delta_rule_recurrent as gated_delta_rule_recurrent
from pallas_kernels.gated_delta_rule.api import gated_delta_rule_update as gated_delta_rule_update
