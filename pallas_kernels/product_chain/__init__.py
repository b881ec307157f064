"""Chains of products, norms and mixtures of experts of few tokens, in one launch."""

from pallas_kernels.product_chain._schedule import MOST_TOKENS as MOST_TOKENS
from pallas_kernels.product_chain._steps import Convolution as Convolution
from pallas_kernels.product_chain._steps import Experts as Experts
from pallas_kernels.product_chain._steps import GateActivation as GateActivation
from pallas_kernels.product_chain._steps import GatedNorm as GatedNorm
from pallas_kernels.product_chain._steps import Norm as Norm
from pallas_kernels.product_chain._steps import Product as Product
from pallas_kernels.product_chain.api import all_reduce_product_chain as all_reduce_product_chain
from pallas_kernels.product_chain.api import product_chain as product_chain
