"""The gated delta rule over decode and verify rows with deferred states: written once per group of tokens."""

from pallas_kernels.gated_delta_rule.deferred.api import gated_delta_rule_deferred as gated_delta_rule_deferred
from pallas_kernels.gated_delta_rule.deferred.entries import DeltaRuleEntries as DeltaRuleEntries
