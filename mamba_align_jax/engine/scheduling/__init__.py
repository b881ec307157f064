"""Which requests run in the next step: requests, their queue, the plan of a step and the sizes of programs."""
