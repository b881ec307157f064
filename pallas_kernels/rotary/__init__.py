"""The steps of attention between projection and `paged_attention`: head norms, rotary embedding, stores to pages."""

from pallas_kernels.rotary.api import rotate as rotate
from pallas_kernels.rotary.api import rotate_and_store as rotate_and_store
from pallas_kernels.rotary.arguments import HeadNorms as HeadNorms
from pallas_kernels.rotary.arguments import PageIndices as PageIndices
