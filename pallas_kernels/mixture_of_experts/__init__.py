"""Mixtures of experts: a router chooses a few experts per token, and the token's output is their weighted sum."""

from pallas_kernels.mixture_of_experts.api import Activation as Activation
from pallas_kernels.mixture_of_experts.api import choose_experts as choose_experts
from pallas_kernels.mixture_of_experts.api import mixture_of_experts as mixture_of_experts
from pallas_kernels.mixture_of_experts.api import mixture_of_experts_sums as mixture_of_experts_sums
from pallas_kernels.mixture_of_experts.api import routed_experts_sums as routed_experts_sums
from pallas_kernels.mixture_of_experts.routing import Routing as Routing
from pallas_kernels.mixture_of_experts.routing import Scores as Scores
