"""Sums over the devices of a mesh axis, by kernels that write into each other's memory."""

from pallas_kernels.all_reduce.api import all_reduce as all_reduce
from pallas_kernels.all_reduce.api import all_reduce_rms_norm as all_reduce_rms_norm
from pallas_kernels.all_reduce.mailboxes import Mailboxes as Mailboxes
