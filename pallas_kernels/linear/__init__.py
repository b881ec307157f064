"""Dense products whose weights are streamed once, for the few tokens of a decode step."""

from pallas_kernels.linear.api import linear as linear
from pallas_kernels.linear.api import linear_sums as linear_sums
