"""Puts a model on its devices: decides how its states are kept and how large the pools are, and makes the runner."""

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from mamba_align_jax.engine.config import EngineConfig
from mamba_align_jax.engine.device.command_thread import is_slow_to_start
from mamba_align_jax.engine.device.defaults import complete, scratch_bytes
from mamba_align_jax.engine.device.explanation import Explanation
from mamba_align_jax.engine.device.model_facts import facts_of
from mamba_align_jax.engine.device.runner import StepRunner
from mamba_align_jax.engine.device.sizing import (
    DeviceMemory,
    PoolSizes,
    align_config,
    check_memory,
    pool_sizes,
    state_granularity,
)
from mamba_align_jax.engine.drafting.choose import choose_drafter
from mamba_align_jax.engine.drafting.guarded import GuardedDrafter
from mamba_align_jax.engine.drafting.protocols import DeviceDrafter, Drafter
from mamba_align_jax.layers.layouts import with_pool_layouts
from mamba_align_jax.models.tensor_parallel import shard_model, share


class ModelWorker:
    """A model on the devices of this process, with pools, ready to run steps.

    Attributes:
        config: The engine's configuration, complete.
        model_config: The model's configuration.
        explanation: What was chosen, and what fits.
        align: How states are kept.
        sizes: Sizes of the pools, on one device.
        drafters: The drafter on the host, which can't change its arguments, and the one on the device.
        steps_in_flight: How many steps may be dispatched while the result of an earlier one is unread.
        granularity: Number of tokens between the positions at which the cache may keep a state.
        runner: Runs the steps.
    """

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        drafter: Drafter | DeviceDrafter | None = None,
        mesh: Mesh | None = None,
        *,
        agree: Callable[[PoolSizes], PoolSizes] = lambda sizes: sizes,
        make_runner: Callable[..., StepRunner] = StepRunner,
        may_launch_ahead: bool = True,
    ) -> None:
        """Puts a model on its devices and makes the pools.

        Args:
            model: A `ServedModel`.
            config: The engine's configuration.
            drafter: As for `Engine`.
            mesh: As for `Engine`.
            agree: Returns the sizes of the pools, given those that fit on the devices of this process.
            make_runner: Makes the runner: `StepRunner`, or another one with its arguments.
            may_launch_ahead: Whether steps may be launched in a thread. They are where that pays.

        Raises:
            ValueError: As for `Engine`.
        """
        self.model_config = model.config
        model = with_pool_layouts(model, config.window_layout, config.state_layout)
        layout, devices, own = None, (), model
        if mesh is not None:
            model, layout = shard_model(model, mesh)
            devices, own = mesh.local_devices, share(model)
        memory, facts = DeviceMemory.of(devices), facts_of(own)
        on_host = drafter is not None and not isinstance(drafter, DeviceDrafter)
        config, reasons = complete(config, own, facts, memory, drafts_on_host=on_host)
        self.config = config
        self.align = align_config(config, own)
        self.drafters = choose_drafter(config, model, drafter)
        if self.drafters.host is not None:
            guarded = GuardedDrafter(self.drafters.host, model.config.vocab_size)
            self.drafters = self.drafters._replace(host=guarded)
        launches_ahead = config.async_stepping and may_launch_ahead and is_slow_to_start(mesh)
        # While the devices run one step, the next one is started, and the step before is read.
        self.steps_in_flight = config.steps_in_flight + launches_ahead
        scratch = scratch_bytes(config, own, facts)
        options = dict(drafter=self.drafters.device, reserved_bytes=scratch, steps_in_flight=self.steps_in_flight)
        self.sizes = agree(pool_sizes(self.align, config, own, memory, **options))
        self.explanation = Explanation.of(config, reasons, self.align, self.sizes, memory, facts, scratch)
        check_memory(self.align, config, self.sizes, model.config.vocab_size, devices)
        self.granularity = state_granularity(self.align, config, self.sizes, self.steps_in_flight)
        self.runner = make_runner(
            model,
            self.align,
            self.sizes,
            config.kv_page_size,
            config.max_prefill_rows,
            config.max_num_batched_tokens,
            config.max_mixed_tokens,
            drafter=self.drafters.device,
            layout=layout,
            launches_ahead=launches_ahead,
            copies_states=self.granularity < config.block_size,
        )
