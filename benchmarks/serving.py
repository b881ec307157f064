"""Times the engine under load: `python -m benchmarks.serving --json benchmarks/results/serving.jsonl`.

This is `mamba-align bench` without its table. The benchmark itself is `mamba_align_jax.load.bench`.
"""

from mamba_align_jax.load.bench import main

if __name__ == "__main__":
    main()
