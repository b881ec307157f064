"""Chains of products, norms and mixtures of experts of few tokens, in one launch."""

from pallas_kernels.product_chain.api import all_reduce_product_chain as all_reduce_product_chain
from pallas_kernels.product_chain.api import product_chain as product_chain
from pallas_kernels.product_chain.schedule import MOST_TOKENS as MOST_TOKENS
from pallas_kernels.product_chain.steps.convolution import Convolution as Convolution
from pallas_kernels.product_chain.steps.experts import Experts as Experts
from pallas_kernels.product_chain.steps.gated_norm import GateActivation as GateActivation
from pallas_kernels.product_chain.steps.gated_norm import GatedNorm as GatedNorm
from pallas_kernels.product_chain.steps.norm import Norm as Norm
from pallas_kernels.product_chain.steps.product import Product as Product
