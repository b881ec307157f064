"""The tool that clients offer to the model, which they hold to a call of it, and the errors that they expect."""

PLACES = ("Rome", "Oslo")
# A model of bytes makes a token of each letter, so there are two places only.
SCHEMA = dict(
    type="object",
    properties=dict(place=dict(type="string", enum=list(PLACES))),
    required=["place"],
    additionalProperties=False,
)


def raised_by(kind, make):
    """Returns the error of a kind that a call raises."""
    error = None
    try:
        make()
    except kind as raised:
        error = raised
    assert error is not None, f"no {kind.__name__}"
    return error
