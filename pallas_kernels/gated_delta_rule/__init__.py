"""The gated delta rule: a matrix state per head that decays, is corrected towards each value, and is read."""

from pallas_kernels.gated_delta_rule.api import gated_delta_rule_gates as gated_delta_rule_gates
from pallas_kernels.gated_delta_rule.api import gated_delta_rule_prefill as gated_delta_rule_prefill
from pallas_kernels.gated_delta_rule.api import gated_delta_rule_update as gated_delta_rule_update
