"""What attention does between its projection and `paged_attention`: norms, the rotation by position, stores to pages."""

from pallas_kernels.rotary.api import rotate as rotate
from pallas_kernels.rotary.api import rotate_and_store as rotate_and_store
from pallas_kernels.rotary.arguments import HeadNorms as HeadNorms
from pallas_kernels.rotary.arguments import PageIndices as PageIndices
