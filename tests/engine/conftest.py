"""Which cases of the engine's tests leave a quick run: each way of stepping compiles programs of its own."""

import depth

# The ways of stepping of a quick run, where a test runs under every way of `test_adjust.STEPPING`.
WAYS = ("plain", "async_drafts")
TESTS = (
    "test_greedy_tokens_follow_the_definitions",
    "test_drawn_tokens_are_those_of_a_plain_engine",
    "test_greedy_tokens_are_the_best_that_are_allowed",
    "test_log_probabilities_are_right_under_any_stepping",
    "test_request_of_no_tokens_ends_when_its_prompt_has_run",
)


def pytest_collection_modifyitems(items):
    ours = [item for item in items if item.path.parent.name == "engine"]
    depth.keep_values(ours, dict.fromkeys(TESTS, WAYS), "stepping")
